"""Figures, tables and a picture from the rows of a run, in the terminal and on docs/benchmarks.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table as Shown
from variants import THEIRS, YARDSTICK, Sizes
from worker import KINDS

Row = dict[str, Any]
Run = tuple[str, int, str]
"""The model, the number of ranks and the link of a timed run."""

MB = 1e6

NOISE, MEMORY_NOISE = 0.05, 0.01
"""Ratios of times, and amounts of memory, that differ by at most this part count as the same."""

MARGIN = 0.03
"""For ``make bench-check`` a ratio may exceed the recorded upper quartile by this much."""

COMPARED = {
    "DDP": YARDSTICK,
    "torch's class": THEIRS,
    "level 1": "onecopy, bucket views",
    "level 2": "onecopy, reduce-scatter hook",
    "level 3": "onecopy, ShardedDataParallel, overlap_forward",
}
"""The variants of the findings, by the names that the findings use."""

MARKS = "<!-- {}: made by make bench -->", "<!-- end of {} -->"
"""Generated parts of the page are between these lines."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text. A row that is too short has an error in its last cell."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[*row, *[""] * (len(self.columns) - len(row))] for row in self.rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"### {self.title}\n\n{text}" if self.title else text

    def shown(self) -> Shown:
        """Return the table for the terminal."""
        table = Shown(title=self.title)
        for place, column in enumerate(self.columns):
            table.add_column(column, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table


# Figures


def runs_in(rows: Iterable[Row]) -> list[Run]:
    """Return all timed runs."""
    return list(dict.fromkeys((row["model"], row["ranks"], row["link"]) for row in rows if row["kind"] == "time"))


def select(rows: Iterable[Row], kind: str, run: Run | None = None) -> list[Row]:
    """Return the rows of one kind, of one run or of all runs."""
    return [
        row for row in rows if row["kind"] == kind and (run is None or (row["model"], row["ranks"], row["link"]) == run)
    ]


def title_of(run: Run) -> str:
    """Return a description of a run."""
    model, ranks, link = run
    return f"{model} model, {ranks} ranks, {link or 'plain loopback'}"


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the quartiles of the ratios of two variants, round by round, so that common noise cancels."""
    return statistics.quantiles([a / b for a, b in zip(one, other, strict=True)], n=4)


def summaries(rows: Sequence[Row], run: Run) -> list[Row]:
    """Return one row per variant of a timed run: times, ratios within its heat, idle time, bytes, difference."""
    heats: dict[tuple[int, str], Row] = {(row["heat"], row["variant"]): row for row in select(rows, "time", run)}
    found: dict[str, Row] = {}
    for (heat, variant), row in heats.items():
        if variant in found:
            continue
        found[variant] = {"variant": variant, "error": row["error"]}
        if row["error"]:
            continue
        low, middle, high = ratios(row["seconds"], heats[heat, YARDSTICK]["seconds"])
        unit = 4 * Sizes(**row["sizes"]).elements() * max(1, run[1] - 1)
        found[variant] |= {
            "ms": 1e3 * statistics.median(row["seconds"]),
            "backward": 1e3 * statistics.median(row["backward"]),
            "step": 1e3 * statistics.median(row["step"]),
            "to_ddp": middle,
            "quartiles": (low, high),
            "to_torch": ratios(row["seconds"], heats[heat, THEIRS]["seconds"])[1],
            "idle": statistics.median(row["idle"]),
            "wire": statistics.median(row["wire"]) / unit if row["wire"] else None,
            "difference": row["difference"],
        }
    return list(found.values())


def verdict(summary: Row) -> str:
    """Return whether a variant is slower or faster than DDP, or the same within noise."""
    low, high = summary["quartiles"]
    if summary["to_ddp"] > 1 + NOISE and low > 1:
        return "slower"
    return "faster" if summary["to_ddp"] < 1 - NOISE and high < 1 else "the same"


def largest(rows: Sequence[Row], ranks: int) -> dict[str, Row]:
    """Return for each variant the row of the rank with the highest peak, or of the failure."""
    found: dict[str, Row] = {}
    for row in select(rows, "memory"):
        if row["ranks"] == ranks and (row.get("error") or row["peak"] >= found.get(row["variant"], row)["peak"]):
            found[row["variant"]] = row
    return found


def ranks_of_memory(rows: Sequence[Row]) -> list[int]:
    """Return the numbers of ranks for which memory was measured."""
    return sorted({row["ranks"] for row in select(rows, "memory")})


# Tables


def time_table(rows: Sequence[Row], run: Run) -> Table:
    """Return the table of step times and bytes on the wire of one run."""
    columns = ("variant", "ms", "backward", "step", "x DDP", "quartiles", "x torch", "idle", "wire", "difference")
    cells = []
    for each in summaries(rows, run):
        if each["error"]:
            cells.append([each["variant"], each["error"]])
            continue
        low, high = each["quartiles"]
        times = [f"{each[key]:.1f}" for key in ("ms", "backward", "step")]
        wire = "" if each["wire"] is None else f"{each['wire']:.2f}"
        compared = [f"{each['to_ddp']:.3f}", f"{low:.2f}-{high:.2f}", f"{each['to_torch']:.3f}"]
        difference = f"{each['difference']:.0e}" if each["difference"] else "0"
        cells.append([each["variant"], *times, *compared, f"{100 * each['idle']:.0f}%", wire, difference])
    rounds = max(len(row["seconds"]) for row in select(rows, "time", run))
    return Table(f"{title_of(run).capitalize()}, {rounds} rounds", columns, cells)


def memory_table(rows: Sequence[Row], ranks: int) -> Table:
    """Return the table of MB by kind on the rank with the highest peak, and the imbalance of the state."""
    cells = []
    for variant, row in largest(rows, ranks).items():
        if row.get("error"):
            cells.append([variant, row["error"]])
            continue
        states = [
            each["state"] for each in select(rows, "memory") if (each["variant"], each["ranks"]) == (variant, ranks)
        ]
        sizes = [*(row[kind] for kind in KINDS), sum(row[kind] for kind in KINDS), row["between"], row["peak"]]
        imbalance = max(states) * len(states) / sum(states) if sum(states) else 1.0
        megabytes = [f"{size / MB:.1f}" for size in sizes]
        cells.append([variant, *megabytes, f"{row['resident'] / MB:.0f}", f"{imbalance:.3f}"])
    columns = ("variant", *KINDS, "together", "between steps", "peak", "resident", "max/mean state")
    return Table(f"{ranks} ranks", columns, cells)


def saving_table(rows: Sequence[Row]) -> Table:
    """Return the table of the seconds to gather the state, and to save."""
    cells = []
    for row in select(rows, "save"):
        seconds = [f"{row[part]:.2f}" if part in row else "" for part in ("consolidate", "save")]
        cells.append([row["variant"], row["error"]] if row["error"] else [row["variant"], *seconds])
    return Table("", ("variant", "gather the state", "save"), cells)


def findings_table(rows: Sequence[Row]) -> Table:
    """Return the figures of DDP, torch's class and the three levels in one table."""
    ranks = max(ranks_of_memory(rows), default=0)
    memory, saved = largest(rows, ranks), {row["variant"]: row for row in select(rows, "save")}
    cells = []
    for name, variant in COMPARED.items():
        timed = [each for run in runs_in(rows) for each in summaries(rows, run) if each["variant"] == variant]
        timed = [each for each in timed if not each["error"]]
        said = [verdict(each) for each in timed]
        times = [f"{each['to_ddp']:.3f}" for each in timed]
        spread = f"{min(times)} to {max(times)}" if len(set(times)) > 1 else "".join(times[:1])
        counts = ", ".join(f"{what} in {said.count(what)}" for what in ("faster", "the same", "slower") if what in said)
        peak, seconds = memory.get(variant, {}).get("peak"), saved.get(variant, {}).get("save")
        cells.append(
            [
                name,
                "" if peak is None else f"{peak / MB:.1f}",
                spread,
                "" if variant == YARDSTICK or not said else f"{counts} of {len(said)} runs",
                "" if seconds is None else f"{seconds:.2f}",
            ]
        )
    return Table("", ("", f"peak MB, {ranks} ranks", "step time, x DDP", "against DDP", "seconds to save"), cells)


def slower_table(rows: Sequence[Row]) -> Table:
    """Return the variants of onecopy whose step is slower than with DDP or with torch's class, beyond noise."""
    cells = []
    for run in runs_in(rows):
        for each in summaries(rows, run):
            if not each["variant"].startswith("onecopy") or each["error"]:
                continue
            if verdict(each) == "slower" or each["to_torch"] > 1 + NOISE:
                low, high = each["quartiles"]
                figures = [f"{each['to_ddp']:.3f}", f"{low:.2f}-{high:.2f}", f"{each['to_torch']:.3f}"]
                cells.append([title_of(run).capitalize(), each["variant"], *figures])
    return Table("", ("run", "variant", "x DDP", "quartiles", "x torch"), cells)


def larger_table(rows: Sequence[Row]) -> Table:
    """Return the variants of others that need less memory than ``ShardedDataParallel`` at some moment."""
    cells = []
    for ranks in ranks_of_memory(rows):
        sizes = {
            variant: (sum(row[kind] for kind in KINDS), row["between"], row["peak"])
            for variant, row in largest(rows, ranks).items()
            if not row.get("error")
        }
        ours = sizes.get("onecopy, ShardedDataParallel", (0, 0, 0))
        less = {
            variant: each
            for variant, each in sizes.items()
            if not variant.startswith("onecopy")
            and any(size < (1 - MEMORY_NOISE) * limit for size, limit in zip(each, ours, strict=True))
        }
        if less:
            less = {"onecopy, ShardedDataParallel": ours, **less}
        cells += [[str(ranks), variant, *(f"{size / MB:.1f}" for size in each)] for variant, each in less.items()]
    columns = ("ranks", "variant", "MB when `step()` is called", "MB between steps", "MB at the peak")
    return Table("", columns, cells)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return all tables for which there are rows, and at the end where onecopy loses."""
    found = [time_table(rows, run) for run in runs_in(rows)]
    found += [memory_table(rows, ranks) for ranks in ranks_of_memory(rows)]
    found += [replace(saving_table(rows), title="seconds")] if select(rows, "save") else []
    lost = (
        replace(slower_table(rows), title="slower steps"),
        replace(larger_table(rows), title="less memory than ours"),
    )
    return [*found, *(table for table in lost if table.rows)]


# The page


def write_page(rows: Sequence[Row], machine: str, page: Path) -> None:
    """Replace the generated parts of the page, and draw its pictures beside it."""
    pictures = [draw(rows, run, page.parent) for run in runs_in(rows) if largest(rows, run[1])]
    links = [f"![Step time over peak memory, {title}]({path.name})" for title, path in pictures]
    parts = {
        "findings": findings_table(rows).markdown(),
        "machine": f"The machine: {machine}.",
        "slower": slower_table(rows).markdown(),
        "larger": larger_table(rows).markdown(),
        "times": "\n\n".join([*(time_table(rows, run).markdown() for run in runs_in(rows)), *links]),
        "memory": "\n\n".join(memory_table(rows, ranks).markdown() for ranks in ranks_of_memory(rows)),
        "saving": saving_table(rows).markdown(),
    }
    text = page.read_text()
    for name, part in parts.items():
        begin, end = (mark.format(name) for mark in MARKS)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{part}\n\n{end}{rest.split(end)[1]}"
    page.write_text(text)


def draw(rows: Sequence[Row], run: Run, folder: Path) -> tuple[str, Path]:
    """Draw the step time of each variant over its peak memory, and return the title and the path of the picture."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "onecopy", "svg.fonttype": "none"})
    memory = largest(rows, run[1])
    points = sorted(
        (each["to_ddp"], memory[each["variant"]]["peak"] / MB, each["variant"])
        for each in summaries(rows, run)
        if not each["error"] and "peak" in memory.get(each["variant"], {})
    )
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    limit = 2.2 * statistics.median(x for _, x, _ in points)
    for number, (y, x, name) in enumerate(points, start=1):
        colour = "#1b6ca8" if name.startswith("onecopy") else "#b0b0b0"
        axes.scatter(min(x, limit), y, color=colour, s=42, zorder=3)
        axes.annotate(str(number), (min(x, limit), y), (4, 4), textcoords="offset points", fontsize=8)
        label = f"{number} {name}" + (" (memory beyond the picture)" if x > limit else "")
        axes.scatter([], [], color=colour, s=20, label=label)
    axes.axhline(1.0, color="#555555", linewidth=0.6, linestyle=":")
    axes.set_xlabel(f"peak MB of tensors on the largest of {run[1]} ranks")
    axes.set_ylabel(f"step time, x {YARDSTICK}")
    axes.set_title(title_of(run), fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=7, handletextpad=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    name = run[0].translate(str.maketrans(" ", "-", "(),"))
    path = folder / f"bench-frontier-{name}-{run[1]}-{run[2] or 'loopback'}.svg"
    figure.savefig(path, metadata={"Date": None})
    return title_of(run), path


# The guard against losses of speed: ratios of a short run beside recorded ratios, never absolute times


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return for each run and variant of onecopy the median ratio to DDP, its quartiles, and bytes on the wire."""
    return {
        title_of(run): {
            each["variant"]: [each["to_ddp"], *each["quartiles"], each["wire"] or 0.0]
            for each in summaries(rows, run)
            if not each["error"] and each["variant"].startswith("onecopy")
        }
        for run in runs_in(rows)
    }


def losses(rows: Sequence[Row], recorded: Path) -> list[str]:
    """Return a line for each ratio that is worse than the recorded one by more than both quartiles and a margin."""
    before, found = json.loads(recorded.read_text()), []
    for run, variants in ratios_of(rows).items():
        for variant, (now, low, _, wire) in variants.items():
            if variant not in before.get(run, {}):
                continue
            middle, _, high, sent = before[run][variant]
            limit = max(middle, high) + MARGIN
            # It is slower only if even its lower quartile is above the recorded upper quartile.
            if low > limit:
                found.append(f"{run}: {variant}: {middle:.3f} before, {now:.3f} now, limit {limit:.3f}")
            if sent and wire > 1.02 * sent:
                found.append(f"{run}: {variant}: bytes on the wire: {sent:.3f} before, {wire:.3f} now")
    return found
