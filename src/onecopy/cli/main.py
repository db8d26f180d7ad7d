"""The command line: ``onecopy plan``, ``onecopy checkpoint inspect|verify|convert`` and ``onecopy bench``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Column, Table
except ImportError as error:
    raise SystemExit(f"the command line needs more packages ({error.name}): pip install 'onecopy[cli]'") from None

from onecopy.checkpoint import conversion, directories
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.signing import SigningKey
from onecopy.cli.bench import app as bench
from onecopy.cli.plan import EXAMPLES, plan
from onecopy.errors import OnecopyError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Plan memory, inspect checkpoints, and measure onecopy."
)
checkpoint = typer.Typer(no_args_is_help=True, help="Inspect, verify and convert checkpoints.")
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(bench, name="bench")


@app.command("plan", epilog=EXAMPLES)
@functools.wraps(plan)
def guarded_plan(*args: Any, **kwargs: Any) -> None:
    """Run the planner; errors are one line."""
    _guarded(lambda: plan(*args, **kwargs))


Source = Annotated[
    Path, typer.Argument(help="A checkpoint, or a directory with several checkpoints, of which the newest is taken.")
]


class Form(str, Enum):
    """The format that a file is converted to."""

    torch = "torch"
    safetensors = "safetensors"
    native = "native"


@checkpoint.command()
def inspect(path: Source) -> None:
    """Show the names, shapes, types and sizes of all tensors in a checkpoint, and the ranks that wrote them."""

    def show() -> None:
        folder, found = directories.with_newest(path, lambda folder: (folder, directories.read_manifest(folder)))
        _show(Console(), folder, found)

    _guarded(show)


@checkpoint.command()
def verify(
    path: Source,
    key_file: Annotated[
        Path | None, typer.Option(help="A file with the key with which the checkpoint must have been signed.")
    ] = None,
) -> None:
    """Read all files of a checkpoint and compare them with their checksums."""

    def check() -> None:
        key = SigningKey.from_file(key_file) if key_file else None
        folder, size = directories.with_newest(path, lambda folder: (folder, directories.verify(folder, key=key)))
        Console().print(f"{folder}: {_size(size)}, all as {'signed' if key else 'written'}")

    _guarded(check)


@checkpoint.command()
def convert(
    path: Annotated[Path, typer.Argument(help="A checkpoint. With --to native, a file written by torch.save.")],
    target: Annotated[
        Path, typer.Argument(help="The file to write. With --to native, the directory that holds the checkpoints.")
    ],
    to: Annotated[
        Form,
        typer.Option(
            help="torch: one torch.save file with model and optimizer. safetensors: one file with the model's weights. "
            "native: a checkpoint of onecopy."
        ),
    ],
    step: Annotated[int | None, typer.Option(help="With --to native: the step number of the new checkpoint.")] = None,
) -> None:
    """Convert a checkpoint to one file that torch or safetensors can read, or a torch.save file to a checkpoint."""

    def run() -> None:
        written = target
        if to is Form.torch:
            conversion.to_torch(path, target)
        elif to is Form.safetensors:
            conversion.to_safetensors(path, target)
        else:
            written = conversion.from_torch(path, target, step)
        Console().print(f"wrote {written}")

    _guarded(run)


def _guarded(action: Callable[[], None]) -> None:
    """Run a command and print an error that the user can correct as one line instead of a traceback."""
    try:
        action()
    except (OnecopyError, OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(1) from None


def _show(console: Console, folder: Path, found: Manifest) -> None:
    """Print the tables of files and tensors of a checkpoint."""
    total = sum(file.size for file in found.files.values())
    versions = ", ".join(f"{name} {version}" for name, version in found.written_by.items())
    console.print(f"{folder}: step {found.step}, {_size(total)}, written by {found.world_size} ranks ({versions})")
    console.print(f"fingerprint {found.fingerprint}")
    if found.base is not None:
        console.print(f"saved with trainable_only: the values of {len(found.base)} frozen parameters are not in it")
    files = Table("file", "bytes", "pieces", title="files")
    for name, file in found.files.items():
        pieces = sum(piece.file == name for entry in found.tensors.values() for piece in entry.pieces)
        files.add_row(name, f"{file.size:,}", str(pieces))
    console.print(files)
    for number, optimizer in enumerate(found.optimizers):
        names = "by the model's names" if optimizer.named else "by position"
        kind = optimizer.kind or "an optimizer of unknown class"
        console.print(f"optimizer {number}: {kind}, {len(optimizer.params)} parameters {names}")
    tensors = Table(Column("tensor", overflow="fold"), "type", "shape", "bytes", "written by", title="tensors")
    for key, entry in sorted(found.tensors.items()):
        writers = sorted({piece.file.removeprefix("rank-").removesuffix(".safetensors") for piece in entry.pieces})
        ranks = ", ".join(str(int(writer)) for writer in writers)
        tensors.add_row(key, entry.dtype, str(tuple(entry.shape)), f"{entry.nbytes:,}", f"rank {ranks}")
    console.print(tensors)


def _size(count: int) -> str:
    """Return a number of bytes with a unit."""
    amount = float(count)
    for unit in ("bytes", "KB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{count} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("the last unit takes all")


def main() -> None:
    """Run the command line interface."""
    app()
