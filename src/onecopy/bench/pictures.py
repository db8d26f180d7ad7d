"""Draw pictures of a run: memory by kind, step time over memory, scaling over ranks, planning and host time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from onecopy.bench.memory_use import KINDS
from onecopy.bench.summaries import Row, host_time_models, runs_in, select, summaries, title_of
from onecopy.bench.tables import MB
from onecopy.bench.variants import YARDSTICK

OURS, OTHERS, MUTED = "#1b6ca8", "#b0b0b0", "#555555"
COLOURS = {"parameters": "#4c78a8", "gradients": "#f2a541", "state": "#72b7a1", "other": "#cccccc", "step": "#e8e8e8"}


def draw(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all pictures for which there are rows, as SVG, and return their paths."""
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "onecopy", "svg.fonttype": "none"})
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        _save(memory_picture(rows, ranks), folder / f"bench-memory-{ranks}.svg")
        for ranks in sorted({row["ranks"] for row in rows if row["kind"] == "memory"})
    ]
    for run in runs_in(rows):
        if any(row["ranks"] == run[1] and row["model"] == run[0] for row in select(rows, "memory")):
            model = run[0].translate(str.maketrans(" ", "-", "(),"))
            name = f"bench-frontier-{model}-{run[1]}-{run[2] or 'loopback'}.svg"
            made.append(_save(frontier_picture(rows, run), folder / name))
    if len({run[1] for run in runs_in(rows)}) > 1:
        made.append(_save(scaling_picture(rows), folder / "bench-scaling.svg"))
    if host_time_models(rows):
        made.append(_save(growth_picture(rows), folder / "bench-growth.svg"))
    return made


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, metadata={"Date": None})
    return path


def _largest(rows: Sequence[Row], ranks: int, model: str | None = None) -> dict[str, Row]:
    """Return for each variant the row of the rank with the highest peak."""
    found: dict[str, Row] = {}
    for row in select(rows, "memory"):
        if row["ranks"] != ranks or row.get("error") or (model is not None and row["model"] != model):
            continue
        if row["variant"] not in found or row["peak"] > found[row["variant"]]["peak"]:
            found[row["variant"]] = row
    return found


def memory_picture(rows: Sequence[Row], ranks: int) -> Figure:
    """Draw for each variant the memory by kind at the call of ``step()``, and its growth to the peak."""
    found = _largest(rows, ranks)
    names = list(reversed(found))
    figure = Figure(figsize=(8, 0.36 * len(names) + 1.3), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(names)
    usual = sorted(row["peak"] for row in found.values())[len(found) // 2] / MB
    limit = 1.9 * usual
    for kind in (*KINDS, "step"):
        widths = [
            max(0.0, found[name]["peak"] / MB - left[place]) if kind == "step" else found[name][kind] / MB
            for place, name in enumerate(names)
        ]
        label = {"step": "more at the peak", "other": "other buffers"}.get(kind, kind)
        axes.barh(names, widths, left=left, color=COLOURS[kind], label=label, edgecolor="white", linewidth=0.4)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, name in enumerate(names):
        peak = found[name]["peak"] / MB
        shown = f" {peak:.0f}" + (" (cut off)" if peak > limit else "")
        axes.text(
            min(left[place], limit), place, shown, va="center", ha="right" if peak > limit else "left", fontsize=8
        )
    axes.set_xlim(0, 1.08 * min(limit, max(left)))
    axes.set_xlabel(f"MB of tensors on the largest of {ranks} ranks")
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=8)
    _plain(axes)
    for text in axes.get_yticklabels():
        if text.get_text().startswith("onecopy"):
            text.set_color(OURS)
    return figure


def frontier_picture(rows: Sequence[Row], run: tuple[str, int, str]) -> Figure:
    """Draw the step time of each variant over its peak memory."""
    memory = _largest(rows, run[1], run[0])
    points = [
        (memory[each["variant"]]["peak"] / MB, each["to_ddp"], each["variant"])
        for each in summaries(rows, run)
        if not each["error"] and each["variant"] in memory
    ]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    usual = sorted(point[0] for point in points)[len(points) // 2]
    shown = [(min(x, 2.2 * usual), y, name, x > 2.2 * usual) for x, y, name in points]
    for number, (x, y, name, beyond) in enumerate(sorted(shown, key=lambda point: point[1]), start=1):
        ours = name.startswith("onecopy")
        axes.scatter(x, y, color=OURS if ours else OTHERS, s=42, zorder=3)
        axes.annotate(str(number), (x, y), (4, 4), textcoords="offset points", fontsize=8, color=MUTED)
        text = f"{number} {name}" + (" (memory beyond the picture)" if beyond else "")
        axes.scatter([], [], color=OURS if ours else OTHERS, s=20, label=text)
    axes.axhline(1.0, color=MUTED, linewidth=0.6, linestyle=":")
    axes.set_xlabel(f"peak MB of tensors on the largest of {run[1]} ranks")
    axes.set_ylabel(f"step time, x {YARDSTICK}")
    axes.set_title(title_of(run), fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=7, handletextpad=0.2)
    _plain(axes)
    return figure


def scaling_picture(rows: Sequence[Row]) -> Figure:
    """Draw the step time relative to DDP, and the state per rank, over the number of ranks."""
    # Wide lines come first, so that all lines are visible where their values are equal.
    chosen = {
        "FSDP2, no resharding": ("#b0b0b0", 6.0),
        "torch's class, bucket views, fused": ("#d1495b", 2.0),
        "onecopy, bucket views": (OURS, 3.0),
        "onecopy, ShardedDataParallel": ("#0b3c5d", 1.2),
    }
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    loopback = sorted(run for run in runs_in(rows) if not run[2] and run[0] == "reference")
    for name, (colour, width) in chosen.items():
        times, states = [], []
        for run in loopback:
            times += [(run[1], each["to_ddp"]) for each in summaries(rows, run) if each["variant"] == name]
            largest = _largest(rows, run[1], run[0]).get(name)
            states += [(run[1], largest["state"] / MB)] if largest else []
        left.plot(*zip(*times, strict=True), "o-", color=colour, linewidth=width, label=name) if times else None
        right.plot(*zip(*states, strict=True), "o-", color=colour, linewidth=width) if states else None
    left.set_ylabel("step time, x DDP fused")
    right.set_ylabel("MB of state, largest rank")
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.set_xticks([run[1] for run in loopback])
        axes.set_ylim(bottom=0)
        _plain(axes)
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return figure


def growth_picture(rows: Sequence[Row]) -> Figure:
    """Draw the planning time over the number of parameters, and the host time of ``step()`` for each model."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    planning = select(rows, "planning")
    ranks = 256
    for policy in dict.fromkeys(row["policy"] for row in planning):
        points = [
            (row["parameters"], row["seconds"]) for row in planning if (row["policy"], row["ranks"]) == (policy, ranks)
        ]
        if points:
            left.plot(*zip(*points, strict=True), "o-", label=policy)
    left.set_ylabel(f"seconds to plan for {ranks:,} ranks")
    left.set_xlabel("parameters")
    left.set_xscale("log")
    left.set_yscale("log")
    models = list(host_time_models(rows))
    variants = list(dict.fromkeys(row["variant"] for row in select(rows, "overhead") if row.get("model") in models))
    width = 0.8 / max(1, len(variants))
    for number, variant in enumerate(variants):
        mine = [row for row in select(rows, "overhead") if row["variant"] == variant]
        places = [models.index(row["model"]) + (number - (len(variants) - 1) / 2) * width for row in mine]
        beside, whole = ([1e3 * row[key] for row in mine] for key in ("seconds", "whole"))
        colour = f"C{number}"
        right.bar(places, beside, width, color=colour, label=variant)
        adamw = [high - low for high, low in zip(whole, beside, strict=True)]
        right.bar(places, adamw, width, bottom=beside, color=colour, alpha=0.35)
    right.set_ylabel("ms in step() (pale: AdamW's own)")
    right.set_xticks(
        range(len(models)), [f"{name}\n{tensors} tensors" for name, tensors in host_time_models(rows).items()]
    )
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8)
        _plain(axes)
    return figure


def _plain(axes: Any) -> None:
    """Remove the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=2)
