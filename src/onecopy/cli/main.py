"""The command line: ``onecopy plan`` and ``onecopy checkpoint``."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from typer.core import TyperGroup

from onecopy.checkpoint import convert as conversion
from onecopy.checkpoint import directories
from onecopy.checkpoint.manifest import Manifest
from onecopy.checkpoint.storage import Location
from onecopy.cli import plan
from onecopy.errors import OnecopyError


class Commands(TyperGroup):
    """Commands whose errors are one line instead of a traceback. The exit code is 1, and 2 for a wrong command."""

    def invoke(self, context: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(context)
        except typer.Exit:  # a RuntimeError, too
            raise
        except ModuleNotFoundError as error:
            message = f"{error}: pip install 'onecopy[cli]'"
        except (OnecopyError, OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
            message = str(error)
        typer.secho(f"error: {message}", err=True, fg="red")
        raise typer.Exit(1)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="See what onecopy saves, and inspect and convert checkpoints.",
    epilog="Example: onecopy plan --params 7e9 --ranks 64. Each command has --help with examples.",
)
checkpoint = typer.Typer(
    no_args_is_help=True,
    help="Inspect, verify and convert checkpoints.",
    epilog="Example: onecopy checkpoint inspect runs/first",
)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.add_typer(checkpoint, name="checkpoint")

Source = Annotated[
    str,
    typer.Argument(help="A checkpoint, or a directory or URL with several checkpoints, of which the newest is taken."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


class Form(str, Enum):
    """The format that a file is converted to."""

    torch = "torch"
    safetensors = "safetensors"


@checkpoint.command(epilog="Example: onecopy checkpoint inspect runs/first")
def inspect(path: Source, as_json: AsJson = False) -> None:
    """Show the names, shapes, types and sizes of all tensors in a checkpoint, and the ranks that wrote them."""
    folder = directories.candidates_in(path)[0]
    found = directories.read_manifest(folder)
    if as_json:
        typer.echo(json.dumps(_as_json(folder, found), indent=1))
    else:
        _show(Console(), folder, found)


@checkpoint.command(epilog="Example: onecopy checkpoint verify runs/first/step-00000120")
def verify(path: Source, as_json: AsJson = False) -> None:
    """Read all files of a checkpoint and compare them with their checksums."""
    folder = directories.candidates_in(path)[0]
    size = directories.verify(folder)
    if as_json:
        typer.echo(json.dumps({"checkpoint": str(folder), "bytes": size}))
    else:
        console = Console()
        console.print(f"{folder}: {_size(size)}, all as written")
        if older := len(directories.candidates_in(path)) - 1:
            console.print(f"{older} other checkpoint{'s' * (older > 1)} in {path}: not read")


@checkpoint.command(epilog="Example: onecopy checkpoint convert runs/first model.safetensors --to safetensors")
def convert(
    path: Source,
    target: Annotated[str, typer.Argument(help="The file to write.")],
    to: Annotated[
        Form,
        typer.Option(
            help="torch: one torch.save file with model and optimizer. safetensors: one file with the model's weights."
        ),
    ],
) -> None:
    """Convert a checkpoint to one file that torch or safetensors can read."""
    (conversion.to_torch if to is Form.torch else conversion.to_safetensors)(path, target)
    Console().print(f"wrote {target}")


def _as_json(folder: Location, found: Manifest) -> dict[str, object]:
    return {
        "checkpoint": str(folder),
        "step": found.step,
        "ranks": found.world_size,
        "written_by": found.written_by,
        "files": {name: file.size for name, file in found.files.items()},
        "optimizers": [{"class": each.kind, "params": list(each.params)} for each in found.optimizers],
        "tensors": {
            key: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.nbytes,
                "pieces": [asdict(piece) for piece in entry.pieces],
            }
            for key, entry in sorted(found.tensors.items())
        },
    }


def _show(console: Console, folder: Location, found: Manifest) -> None:
    """Print the tables of files and tensors of a checkpoint."""
    total = sum(file.size for file in found.files.values())
    versions = ", ".join(f"{name} {version}" for name, version in found.written_by.items())
    ranks = f"{found.world_size} rank{'s' * (found.world_size > 1)}"
    console.print(f"{folder}: step {found.step}, {_size(total)}, written by {ranks} ({versions})")
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
