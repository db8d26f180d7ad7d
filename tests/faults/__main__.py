"""``make faults``: try every fault, and print how often it was tried, how often it was survived, and the worst time."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from tests.faults import page
from tests.faults.rows import Results, Row, table, text_of
from tests.support.paths import ROOT

PARTS = {
    "restarts": "ranks that are killed under torchrun --max-restarts",
    "saves": "kills at every point of a save, and disks that fail there",
    "files": "several processes in one directory, damaged and hostile files",
    "ends": "ends of processes",
    "machines": "a link between two machines that is cut",
}
"""The parts of the table, each a module of this package."""


def run_part(part: str, results: Results) -> None:
    """Run a part in this process, and print each row as it is done."""
    begun = time.monotonic()
    rows = results.parts.setdefault(part, [])
    for row in importlib.import_module(f"tests.faults.{part}").rows(results.count, results.seed):
        rows.append(row)
        print(text_of(row), flush=True)
    results.seconds[part] = round(time.monotonic() - begun, 1)


def run_parts(parts: list[str], results: Results) -> None:
    """Run each part in a process of its own, so that none of them finds the threads and the memory of another."""
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            print(f"{part}: {PARTS[part]}", flush=True)
            out = Path(folder) / part
            command = [sys.executable, "-m", "tests.faults", str(results.count), "--seed", str(results.seed)]
            done = subprocess.run([*command, "--only", part, "--out", str(out)], cwd=ROOT, check=False)
            if out.exists():
                found = Results.read(out)
                results.parts.update(found.parts)
                results.seconds.update(found.seconds)
            else:
                results.parts[part] = [Row(part, 1, 0, 0.0, "", [f"it has ended with the code {done.returncode}"])]


def main() -> int:
    """Return 1 if a row has a failure."""
    parser = argparse.ArgumentParser(description="Try every fault many times.")
    parser.add_argument("count", type=int, nargs="?", default=100, help="100 tries every combination once")
    parser.add_argument("--seed", type=int, default=0, help="the seed of everything that is drawn")
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, help="a file for the results, as JSON")
    parser.add_argument("--write", action="store_true", help=f"write the results to {page.RECORDED} and {page.PAGE}")
    arguments = parser.parse_args()
    parts = [part for part in arguments.only.split(",") if part] or list(PARTS)
    if arguments.count < 1 or set(parts) - set(PARTS):
        parser.error(f"count must be positive, and --only some of {', '.join(PARTS)}")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # gloo reports every connection that a fault has closed
    results = Results(arguments.count, arguments.seed, torch.__version__)
    if len(parts) == 1:
        run_part(parts[0], results)
    else:
        run_parts(parts, results)
        print(f"\n{table(results.rows)}\n")
        print(", ".join(f"{part} {seconds:.0f} s" for part, seconds in results.seconds.items()))
    is_right = results.is_right  # of this run: the recorded file keeps other parts
    if arguments.out:
        results.write(arguments.out)
    if arguments.write:
        page.record(results)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
