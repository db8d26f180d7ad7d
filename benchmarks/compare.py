"""Compare onecopy with its alternatives in one run on this machine: step time, memory, and saving.

``compare.py run`` measures and prints tables, ``show`` prints those of an earlier run, and ``page`` writes them to
docs/benchmarks.md. ``record`` keeps the ratios to DDP of a run, and ``check`` fails if a later run is slower::

    python benchmarks/compare.py run --ranks 2 --rounds 5 --parts time --variants 'DDP;onecopy'

Ranks are started with torchrun, in their own network namespace if the machine allows it. There the loopback's counters
count only this run, and ``tc`` can limit its rate like that of a real link.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import report
import torch
from machines import has_namespaces
from rich.console import Console
from variants import ALWAYS, MEMORY_ONLY, MODELS, VARIANTS, Sizes
from worker import COUNTED

HERE = Path(__file__).resolve().parent
PAGE, RECORDED = HERE.parent / "docs" / "benchmarks.md", HERE / "recorded.json"
PARTS = ("time", "memory", "save")

ROUNDS_PER_LAUNCH = 5
"""The number of rounds after which the ranks are started anew, so that chance effects of one launch average out."""

WARM_UP_STEPS = 3
"""Steps before the first timed step; the first launch makes more, because it compares parameters."""

BYTES_PER_ELEMENT = 16
"""The average memory of a variant on a rank, per element: parameters, gradients, state, buffers."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """The variants, numbers of ranks, models and links of a benchmark, and the parts that are measured."""

    names: Sequence[str]
    ranks: Sequence[int]
    models: dict[str, Sizes]
    links: Sequence[str]
    rounds: int
    parts: Sequence[str]

    def rows(self, console: Console) -> Iterator[Row]:
        """Run all measurements and yield their rows."""
        first = next(iter(self.models))
        if "time" in self.parts:
            for model in self.models:
                for link in self.links:
                    for ranks in self.ranks:
                        yield from self._times(model, link, ranks, console)
        if "memory" in self.parts:
            for ranks in self.ranks:
                for name in (*self.names, *MEMORY_ONLY):
                    console.print(f"memory: {name}, {ranks} ranks", style="dim")
                    yield from self._launch("memory", first, [name], ranks)
        if "save" in self.parts:
            console.print("gathering the state and saving", style="dim")
            yield from self._launch("save", first, self.names, self.ranks[0])

    def _times(self, model: str, link: str, ranks: int, console: Console) -> Iterator[Row]:
        """Measure step times, in heats of variants that fit into memory together, and launch anew every few rounds."""
        for heat, names in enumerate(heats(self.names, ranks, self.models[model], free_bytes())):
            launches = []
            for start in range(0, self.rounds, ROUNDS_PER_LAUNCH):
                about = f"{model}, {ranks} ranks, {link or 'loopback'}, heat {heat + 1}"
                console.print(f"step times: {about}, round {start + 1}/{self.rounds}", style="dim")
                options = ["--rounds", str(min(ROUNDS_PER_LAUNCH, self.rounds - start))]
                options += ["--warm-up", str(WARM_UP_STEPS)] if start else []
                launches.append(self._launch("time", model, names, ranks, link, options))
            for row in merged(launches):
                yield {**row, "link": link, "heat": heat}

    def _launch(
        self, kind: str, model: str, names: Sequence[str], ranks: int, link: str = "", options: Sequence[str] = ()
    ) -> list[Row]:
        """Start the ranks of one measurement and return their rows, or the row of a failure."""
        worker = [kind, "--names", json.dumps(list(names)), "--sizes", json.dumps(asdict(self.models[model])), *options]
        rows, error = torchrun(ranks, worker, link)
        if not rows:
            rows = [
                {
                    "kind": kind if kind != "time" else "failed",
                    "variant": ", ".join(names),
                    "ranks": ranks,
                    "error": error,
                }
            ]
        return [{**row, "model": model} for row in rows]


def heats(names: Sequence[str], ranks: int, sizes: Sizes, free: int) -> list[list[str]]:
    """Divide the variants into heats that fit into memory; each heat includes the variants of ``ALWAYS``."""
    room = int(0.85 * free / (BYTES_PER_ELEMENT * sizes.elements() * ranks))
    size = max(1, room - len(ALWAYS))
    others = [name for name in names if name not in ALWAYS]
    groups = [others[start : start + size] for start in range(0, len(others), size)] or [[]]
    return [[*ALWAYS, *group] for group in groups]


def merged(launches: Sequence[Sequence[Row]]) -> list[Row]:
    """Merge the rows of several launches into one row per variant.

    Lists are concatenated. Other values are taken from the first launch, and the error from the first that failed.
    """
    found: dict[tuple[str, str], Row] = {}
    for row in (row for rows in launches for row in rows):
        known = found.setdefault((row["kind"], row["variant"]), {})
        lists = {key: [*known.get(key, []), *value] for key, value in row.items() if isinstance(value, list)}
        known.update({**row, **known, **lists, "error": known.get("error") or row["error"]})
    return list(found.values())


def torchrun(ranks: int, worker: Sequence[str], link: str = "") -> tuple[list[Row], str]:
    """Run the worker on a number of ranks and return the rows that they wrote, and a line about a failure."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
        command += [f"--nproc-per-node={ranks}", str(HERE / "worker.py"), *worker, "--folder", folder]
        interfaces = {"GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
        environment = {**os.environ, **interfaces, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        if has_namespaces():
            environment[COUNTED] = "1"
            limit = f" mtu 1500 && tc qdisc add dev lo root tbf rate {shlex.quote(link)} burst 256kb latency 100ms"
            inside = f"ip link set lo up{limit if link else ''} && exec {shlex.join(command)}"
            command = ["unshare", "--net", "--map-root-user", "sh", "-c", inside]
        elif link:
            return [], f"a link of {link} needs a network namespace, which this machine does not allow"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        files = sorted(Path(folder).glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()], failure(done.stderr)


def failure(text: str) -> str:
    """Return one line about a failure from the output of torchrun: a rank that a signal has killed, or an error."""
    killed = re.findall(r"rank +: (\d+) .*\n.*exitcode.*\n.*\n.*Signal \d+ \((SIG(?!TERM)\w+)\) received", text)
    if killed:
        return "; ".join(f"rank {rank} was killed by {name}" for rank, name in sorted(killed))
    errors = [line.partition("]: ")[2] or line for line in text.splitlines() if "Error" in line]
    return (errors or text.splitlines()[-1:] or ["no output"])[0]


def free_bytes() -> int:
    """Return the bytes of memory that are available to processes."""
    (kilobytes,) = re.findall(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())
    return int(kilobytes) * 1024


def machine() -> str:
    """Return a description of this machine in one line."""
    (kilobytes,) = re.findall(r"MemTotal: +(\d+)", Path("/proc/meminfo").read_text())
    cpu = next(iter(re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())), platform.machine())
    memory = f"{int(kilobytes) // 1_000_000} GB"
    return f"{os.cpu_count()} cores ({cpu}), {memory}, no GPU, Linux {platform.release()}, torch {torch.__version__}"


def chosen(pattern: str) -> list[str]:
    """Return the variants whose names contain one of the texts in ``pattern``, and those of ``ALWAYS``."""
    texts = [text.strip() for text in pattern.split(";") if text.strip()]
    return [name for name in VARIANTS if not texts or name in ALWAYS or any(text in name for text in texts)]


def read(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of earlier runs."""
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def run(options: argparse.Namespace, console: Console) -> None:
    """Measure, write each row to the file as soon as it is measured, and print the tables."""
    changes = {key: int(value) for key, _, value in (text.partition("=") for text in options.size)}
    about = f" ({', '.join(options.size)})" if changes else ""
    plan = Plan(
        names=chosen(options.variants),
        ranks=[int(ranks) for ranks in options.ranks.split(",")],
        models={f"{name}{about}": replace(MODELS[name], **changes) for name in options.model.split(",")},
        links=["" if name == "loopback" else name for name in options.link.split(",")],
        rounds=options.rounds,
        parts=options.parts.split(","),
    )
    console.print(f"{machine()}; {len(plan.names)} of {len(VARIANTS)} variants")
    rows = []
    with options.out.open("w") as file:
        for row in plan.rows(console):
            if row.get("error"):
                console.print(f"failed: {row['variant']}: {row['error']}", style="red", markup=False)
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
    for table in report.tables(rows):
        console.print(table.shown())
    console.print(f"results are in {options.out}")


def main() -> int:
    """Return 1 if ``check`` has found a loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure variants and print tables")
    measure.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas")
    measure.add_argument("--variants", default="", help="only variants whose names contain one of these texts: A;B")
    measure.add_argument("--model", default="reference", help=f"models, separated by commas: {', '.join(MODELS)}")
    measure.add_argument("--link", default="loopback", help="'loopback' or rates such as 4gbit, separated by commas")
    measure.add_argument("--rounds", type=int, default=20, help="how often each variant is measured")
    measure.add_argument("--parts", default=",".join(PARTS), help="measurements, separated by commas")
    measure.add_argument("--size", action="append", default=[], help="change a size of the model, such as depth=4")
    measure.add_argument("--out", type=Path, default=Path("bench.jsonl"), help="the file for the results")
    for name in ("show", "page", "record", "check"):
        commands.add_parser(name).add_argument("files", nargs="+", type=Path, help="files of results")
    options, console = parser.parse_args(), Console(width=150, highlight=False)
    if options.command == "run":
        run(options, console)
        return 0
    rows = read(options.files)
    if options.command == "show":
        for table in report.tables(rows):
            console.print(table.shown())
    elif options.command == "page":
        report.write_page(rows, machine(), PAGE)
    elif options.command == "record":
        RECORDED.write_text(json.dumps(report.ratios_of(rows), indent=1) + "\n")
    else:
        found = report.losses(rows, RECORDED)
        for line in found or ["no ratio is worse than the recorded one by more than noise"]:
            console.print(line, style="red" if found else None)
        return int(bool(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
