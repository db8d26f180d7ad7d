"""Runs every client with every optimizer and prints a table: does it train, save, and resume to the same parameters?

Each client runs in one go, and again in two halves: train half, save, be killed, resume in new processes. Both must
end with the same parameters on all ranks, bit by bit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import MODES, OPTIMIZERS
from launching import RANKS, with_torchrun

HERE = Path(__file__).parent
EXAMPLES = HERE.parent / "examples/frameworks"
PAGE = HERE.parent / "docs/frameworks.md"
MARKS = "<!-- clients: made by make clients -->", "<!-- end of clients -->"


@dataclass(frozen=True)
class Client:
    """A row of the table: a script and the variant of it."""

    name: str
    script: str
    variant: str = ""
    optimizers: tuple[str, ...] = OPTIMIZERS


CLIENTS = [
    Client("script as nanoGPT, consolidated", "nanogpt.py"),
    Client("script that consolidates", "script.py", "adamw"),
    Client("script, bitsandbytes AdamW8bit", "script.py", "bitsandbytes"),
    Client("script, torchao AdamW8bit", "script.py", "torchao"),
    Client("Lightning Trainer", "lightning_trainer.py", "trainer"),
    Client("Lightning Trainer, our strategy", "lightning_trainer.py", "strategy", ("onecopy",)),
    Client("Lightning Trainer, our strategy, sharded gradients", "lightning_trainer.py", "sharded", ("onecopy",)),
    Client("Lightning Fabric", "fabric.py"),
    Client("Accelerate, a hook that consolidates", "accelerate_script.py", "hook"),
    Client("Accelerate, consolidated before save_state", "accelerate_script.py", "consolidate"),
    Client("Trainer, optimizers=", "transformers_trainer.py", "full"),
    Client("Trainer, optimizer_cls_and_kwargs=", "transformers_trainer.py", "full-class"),
    Client("Trainer, LoRA, optimizers=", "transformers_trainer.py", "lora"),
    Client("Trainer, LoRA, optimizer_cls_and_kwargs=", "transformers_trainer.py", "lora-class"),
    Client("Trainer, our callback that gathers nothing", "transformers_trainer.py", "callback", ("onecopy",)),
    Client("Ignite", "ignite_trainer.py"),
    Client("mmengine Runner, our hook", "mmengine_runner.py", "class"),
    Client("mmengine Runner, a hook that consolidates", "mmengine_runner.py", "hook"),
    Client("mmengine Runner, type= a registered name", "mmengine_runner.py", "name"),
]

PACKAGES = (
    "torch",
    "lightning",
    "accelerate",
    "transformers",
    "peft",
    "pytorch-ignite",
    "mmengine",
    "bitsandbytes",
    "torchao",
)

GOOD = "yes"


def results(out: Path, mode: str, kind: str) -> list[dict[str, str]]:
    """The files of a kind that the ranks of a run left, the oldest first."""
    files = sorted(out.glob(f"{mode}-{kind}-*.json"), key=lambda file: file.stat().st_mtime)
    return [json.loads(file.read_text()) for file in files]


def failure(out: Path, mode: str, in_time: bool) -> str:
    """Why a run failed, with the first sentence of its first error, or an empty string if it did not."""
    errors = results(out, mode, "error")
    kind = "saved" if mode == "first-half" else "result"
    if len(results(out, mode, kind)) == RANKS and not errors:
        return ""
    stage = {"straight": "does not train", "first-half": "trains, cannot save", "resume": "saves, cannot resume"}[mode]
    # A hang comes before the error of a rank whose peer was ended. One rank may hang while it saves, and the others in
    # training, where they wait for it.
    hangs = sorted(results(out, mode, "hang"), key=lambda hang: hang["when"] != "saving")
    errors = hangs or errors or [{"error": "it ended without a reason" if in_time else "it hangs", "when": "training"}]
    if errors[0]["when"] == "saving":
        stage = "trains, cannot save"  # each epoch ends with a save
    return f"{stage}: {errors[0]['error']}"


def run_client(client: Client, optimizer: str, out: Path) -> tuple[str, str]:
    """Run a client in one go and in two halves; return the table's cell and the digest of the first run."""
    digests: dict[str, set[str]] = {}
    for mode in MODES:
        arguments = ["--optimizer", optimizer, "--mode", mode, "--out", str(out)]
        if client.variant:
            arguments += ["--variant", client.variant]
        in_time = with_torchrun(HERE / client.script, arguments, out / f"{mode}.log")
        if why := failure(out, mode, in_time):
            return why, ""
        digests[mode] = {result["digest"] for result in results(out, mode, "result")}
    if any(len(digests[mode]) != 1 for mode in ("straight", "resume")):
        return "ranks end with different parameters", ""
    if digests["straight"] != digests["resume"]:
        return "resumes to other parameters", min(digests["straight"])
    return GOOD, min(digests["straight"])


def cells_of(client: Client, optimizers: list[str], keep: Path | None) -> dict[str, str]:
    """The cells of a row."""
    cells: dict[str, str] = {}
    plain = ""
    for optimizer in (name for name in optimizers if name in client.optimizers):
        out = Path(tempfile.mkdtemp(prefix="client-"))
        cell, digest = run_client(client, optimizer, out)
        plain = digest if optimizer == "plain" else plain
        if digest and plain and digest != plain:
            cell += ", to other parameters than plain"
        cells[optimizer] = cell
        if keep is not None:
            shutil.copytree(out, keep / f"{client.script}-{client.variant}-{optimizer}", dirs_exist_ok=True)
        shutil.rmtree(out)
        print(f"{client.name}, {optimizer}: {cell}", flush=True)
    return cells


def run_examples(only: str) -> list[str]:
    """Run each example twice, so that it resumes; return the failures."""
    failures = []
    for script in sorted(EXAMPLES.glob("*.py")):
        if not re.search(only, script.stem):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                log = Path(folder) / "log"
                if not with_torchrun(script, [folder], log) or not succeeded(log):
                    failures.append(script.name)
                    print(f"example {script.name} failed:\n{log.read_text()[-2000:]}", flush=True)
                    break
            else:
                print(f"example {script.name}: runs and resumes", flush=True)
    return failures


def succeeded(log: Path) -> bool:
    """Whether no rank of an example raised."""
    return "Traceback (most recent call last)" not in log.read_text()


def versions() -> str:
    """The versions that were run."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    return ", ".join(f"{package} {installed.get(package, 'not installed')}" for package in PACKAGES)


def table(rows: dict[str, dict[str, str]]) -> str:
    """The rows as Markdown."""
    lines = ["| client | plain AdamW | torch's class | onecopy |", "|---|---|---|---|"]
    for name, cells in rows.items():
        shown = [re.sub(r"([|<>])", r"\\\1", cells.get(optimizer, "-")) for optimizer in OPTIMIZERS]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return f"Run with {versions()}.\n\n" + "\n".join(lines)


def write(text: str) -> None:
    """Replace the table on the docs page."""
    page = PAGE.read_text()
    before, rest = page.split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a pattern for the names of clients")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--keep", type=Path, help="a directory for the logs and files of each run")
    parser.add_argument("--rows", type=Path, help="a file in which rows are kept, to run the table in parts")
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    arguments = parser.parse_args()
    optimizers = arguments.optimizers.split(",")
    rows: dict[str, dict[str, str]] = {}
    if arguments.rows and arguments.rows.is_file():
        rows = json.loads(arguments.rows.read_text())
    chosen = [client for client in CLIENTS if re.search(arguments.only, client.name)]
    for client in chosen:
        rows.setdefault(client.name, {}).update(cells_of(client, optimizers, arguments.keep))
        if arguments.rows:
            arguments.rows.write_text(json.dumps(rows, indent=1))
    text = table({client.name: rows[client.name] for client in CLIENTS if client.name in rows})
    print(f"\n{text}")
    if arguments.write:
        write(text)
    failed = [name for name, cells in rows.items() if cells.get("onecopy", GOOD) != GOOD]
    failed += run_examples(arguments.only)
    if failed:
        raise SystemExit(f"failed with onecopy: {', '.join(failed)}")


if __name__ == "__main__":
    main()
