"""Write docs/benchmarks.md from the tables of a run: its text, and the figures in it, of which none is typed by hand.

The order is: three findings and one picture, how the figures were measured, what the columns mean, where onecopy loses,
and then the long tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from onecopy.bench.host_time import PEER
from onecopy.bench.result_tables import ResultTables, Table
from onecopy.bench.tables import markdown
from onecopy.bench.variants import THEIRS, YARDSTICK

NOISE = 0.05
"""Ratios of times that differ by at most this much count as the same."""

MEMORY_NOISE = 0.01
"""Amounts of memory that differ by at most this part count as the same."""

LEVEL_1, LEVEL_2 = "onecopy, bucket views", "onecopy, reduce-scatter hook"
LEVEL_3 = "onecopy, ShardedDataParallel, overlap_forward"
COMPARED = {"DDP": YARDSTICK, "torch's class": THEIRS, "level 1": LEVEL_1, "level 2": LEVEL_2, "level 3": LEVEL_3}
"""The variants of the findings, by the names that the findings use."""

HEAD = "# Performance"

SETTING = """## How it was measured

`make bench` measured all variants on one machine: {machine}. `onecopy bench page` wrote this page from the results.

- Every rank has one thread and uses gloo. All variants use AdamW in float32, and the same seeds, data and flags.
- On a plain loopback the cores that compute also do the work of communication. So those figures say little about
  clusters.
- "4gbit" is a link of 4 Gbit/s, which is closer to a cluster. It is a loopback in its own network namespace, with a
  limited rate and an MTU of 1500.
- The reference model is a GPT of 24M parameters, 69% of them in one embedding, with a batch of 2 x 64 tokens. The deep
  model has 23M parameters in 12 equal blocks, with a batch of 4 x 64 tokens.
- Variants take turns. A turn is three steps, of which the last two are timed. The processes are started anew every
  five rounds.
- If the variants of a table do not fit into memory together, they run in several heats. Each heat includes DDP and
  torch's class.
- For memory, each variant runs in its own processes.
- `make bench-setup` installs the peers.

Noise: a ratio counts as **the same, within noise**, if it differs from 1 by at most {noise}, or if its quartiles lie on
both sides of 1. If the whole run is repeated on two cores, a ratio can change by 0.05 to 0.1.
"""

COLUMNS = """## What the columns mean

The findings use short names:

{names}

Step time:

- "x DDP" and "x torch" are the times as ratios to "{yardstick}" and to "{theirs}". Each is the median of the ratios of
  single rounds. "quartiles" belong to "x DDP".
- "backward" and "step" are the two parts of an iteration in ms: forward and backward pass, and `optimizer.step()`. With
  the overlap hooks ("hook_with_zero_step", "interleaved") the optimizer runs inside `backward()`. So "backward"
  includes the update, and "step" is almost 0.
- "idle" is the share of time in which the cores of the machine had nothing to do. With as many ranks as cores, overlap
  can gain at most this share.
- "wire" is the number of bytes that the loopback counted, with headers, divided by the bytes of the model times (N-1).
  An all-reduce of all gradients sends 2 of these units. A reduce-scatter, which gives each rank only its part of the
  sum, sends 1. An all-gather of all parameters sends 1.
- FSDP2 and DeepSpeed send more here than on a cluster with GPUs. They call torch's reduce-scatter. For gloo, torch runs
  a whole all-reduce in its place, which sends twice as much. So they send 3 units and more. With NCCL they send 2
  units, or 3 with resharding.
- "difference" is the largest difference of any parameter from DDP's after 10 steps.
- The lower bound below a table is computed from primitives that the same run measured: 1/N of the update and the least
  traffic. It is the longer of two times: the time to move the bytes, or the time to compute plus the processor time
  that moving takes.

Memory, in MB on the rank with the highest peak:

- "parameters" to "other" are the bytes of tensors when `step()` is called and gradients exist. "together" is their sum.
- "between steps" is the same sum after `step()`.
- "peak" is the highest sum during a step, with activations. It adds the largest growth that torch's memory profiler
  reports to "between steps".
- "resident" is the resident size of the process, with the profiler and the libraries. Look at this column for
  DeepSpeed: its defaults reserve buckets of up to 2 GB, which this model never fills.
- "max/mean state" is the optimizer state of the largest rank, divided by the mean of all ranks.
"""

TIMES = "## Step time and bytes on the wire"

MODEL = """## The time model

`onecopy.planning.estimate` predicts the time of a step. Its inputs were measured in the same run: the time of a step
without communication, the time to move the model's bytes and nothing else, and the processor time that moving takes.
For another machine, give it that machine's figures. "ratio" is the predicted time divided by the measured time.
"""

MEMORY = "## Memory"

SIZES = """### Models of several sizes

The reference model with more blocks, on 2 ranks. The table has the memory that is not parameters, gradients or state:
between steps, and at the peak of a step with activations.
"""

SAVING = """## Gathering the state, and saving

Seconds on 2 ranks, medians of 3. onecopy saves with `checkpoint.save`, DeepSpeed with `save_checkpoint`, FSDP2 with
torch.distributed.checkpoint. The others write one `torch.save` file and flush it to the disk.
"""

GROWTH = """## Growth

Seconds to plan the layout, in one process. Nothing is communicated for it.
"""

HOST_TIME = """### Host time of step()

The processor time of the thread that calls `step()`, in ms, on 2 ranks, without waiting. The part outside of AdamW's
own `step()` is in brackets.

There are as many tensors as in the real models. But every dimension of at least 16 is divided by 16, so that arithmetic
does not hide the host time. Before each measured step the variant makes another step, and the caches are overwritten.
Each figure is the least of many rounds. The first row is AdamW by itself on every second tensor, about as many as one
rank owns.
"""

WHY_TIME = """Level 1 and the two overlap hooks all-reduce gradients and then send parameters. That is 1.5 times the
bytes that DDP sends, and as many as torch's class sends. With as many ranks as cores, communication takes processor
time from computing, on the link too."""

WHY_MEMORY = """FSDP2 also divides the parameters among the ranks. DeepSpeed frees the gradients after a step."""

WHY_HOST_TIME = """Before anything is sent, `step()` of onecopy checks on every rank for moved parameters and missing
gradients. torch's class does not."""


def page(results: ResultTables) -> str:
    """Return the whole page as Markdown."""
    frontiers = [picture for picture in results.pictures if "frontier" in picture]
    # A limited link is closer to a cluster than a plain loopback.
    first = sorted(frontiers, key=lambda picture: "loopback" in picture)[:1]
    rest = [picture for picture in results.pictures if picture not in first]
    parts = [HEAD, *_findings(results), *_pictures(first, "frontier")]
    names = "\n".join(f'- {name}: "{variant}"' for name, variant in COMPARED.items())
    parts.append(SETTING.format(machine=results.machine, noise=NOISE))
    parts.append(COLUMNS.format(names=names, yardstick=YARDSTICK, theirs=THEIRS))
    parts += _losses(results)
    parts += [*_shown(TIMES, results.times), *_pictures(rest, "frontier", "scaling")]
    parts += _shown(MODEL, results.model)
    parts += [*_shown(MEMORY, results.memory), *_pictures(rest, "memory")]
    parts += _shown(SIZES, results.sizes)
    parts += _shown(SAVING, results.saving)
    parts += [*_shown(GROWTH, results.planning), *_shown(HOST_TIME, results.host_time), *_pictures(rest, "growth")]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _shown(head: str, tables: Sequence[Table]) -> Iterator[str]:
    """Yield a heading and the tables below it, or nothing if there is no table."""
    if tables:
        yield head
    for table in tables:
        if table.title:
            yield f"### {table.title}"
        yield table.markdown()
        if table.note:
            yield table.note


def _findings(results: ResultTables) -> Iterator[str]:
    """Yield a heading, the findings on memory, time and saving, and a table of the figures behind them."""
    peaks = _compared(results.memory[-1:], "peak")
    verdicts, ratios = _compared_with_ddp(results)
    seconds = _compared(results.saving, "save")
    ranks = results.memory[-1].title if results.memory else ""
    found = []
    if peaks:
        sentences = _least(peaks, f"MB at the peak of a step with {ranks}", "need", 0)
        found.append(f"**Memory**, of the five in the table. {sentences}")
    if verdicts:
        sentences = " ".join(f"{_capital(name)} is {verdict}." for name, verdict in verdicts.items())
        found.append(f"**Time** of a step, compared with DDP, in the runs that had each. {sentences}")
    if seconds:
        found.append(f"**Saving** model and optimizer. {_least(seconds, 's', 'take', 2)}")
    if not found:
        return
    yield "## Three findings" if len(found) == 3 else "## Findings"
    yield "\n".join(f"{number}. {text}" for number, text in enumerate(found, start=1))
    columns = ("", f"peak MB, {ranks}", "step time, x DDP", "seconds to save")
    cells = [
        [name, f"{peaks[name]:.1f}" if name in peaks else "", ratios.get(name, ""), f"{seconds.get(name, '')}"]
        for name in COMPARED
    ]
    yield markdown(columns, cells)


def _compared(tables: Sequence[Table], column: str) -> dict[str, float]:
    """Return the figures of a column for the variants of the findings."""
    found = {row["variant"]: row[column] for table in tables for row in table.rows() if row[column]}
    return {name: float(found[variant]) for name, variant in COMPARED.items() if variant in found}


def _least(figures: dict[str, float], unit: str, verb: str, digits: int) -> str:
    """Return a sentence on the variants with the smallest figure, and one on the variant with the largest."""
    least, most = (choose(figures.values()) for choose in (min, max))
    best = [name for name, figure in figures.items() if figure == least]
    worst = next(name for name, figure in figures.items() if figure == most)
    verbs = verb if len(best) > 1 else f"{verb}s"
    return (
        f"{_capital(' and '.join(best))} {verbs} the least: {least:.{digits}f} {unit}. "
        f"{_capital(worst)} {verb}s the most: {most:.{digits}f} {unit.split()[0]}."
    )


def _compared_with_ddp(results: ResultTables) -> tuple[dict[str, str], dict[str, str]]:
    """Return for each variant of the findings whether a step is slower or faster than with DDP, and its ratios."""
    verdicts, ratios = {}, {}
    for name, variant in COMPARED.items():
        rows = [row for table in results.times for row in table.rows() if row["variant"] == variant]
        if not rows:
            continue
        each = [_verdict(row) for row in rows]
        counted = [f"{what} in {each.count(what)} of {len(rows)} runs" for what in ("slower", "faster") if what in each]
        if "same" in each:
            counted.append("the same, within noise, in the others" if counted else "the same, within noise")
        figures = [float(row["x DDP"]) for row in rows]
        ratios[name] = (
            f"{min(figures):.3f} to {max(figures):.3f}" if min(figures) < max(figures) else f"{figures[0]:.3f}"
        )
        if variant != YARDSTICK:
            verdicts[name] = ", and ".join(counted)
    return verdicts, ratios


def _capital(text: str) -> str:
    """Return a text that begins with a capital letter, and is otherwise unchanged."""
    return text[:1].upper() + text[1:]


def _verdict(row: dict[str, str]) -> str:
    """Return whether a variant is slower or faster than DDP in one run, or the same within noise."""
    low, high = (float(figure) for figure in re.findall(r"(?:^-)?[\d.]+", row["quartiles"]))
    ratio = float(row["x DDP"])
    if ratio > 1 + NOISE and low > 1:
        return "slower"
    return "faster" if ratio < 1 - NOISE and high < 1 else "same"


def _pictures(pictures: Sequence[str], *kinds: str) -> Iterator[str]:
    """Yield the pictures of some kinds, each with a caption."""
    captions = {
        "frontier": "Step time over peak memory. Further down is faster. Further left needs less memory.",
        "scaling": "Step time and optimizer state over the number of ranks.",
        "memory": "Memory of the largest rank by kind, when `step()` is called, and the growth to the peak.",
        "growth": "Left: time to plan a layout. Right: host time of `step()`.",
    }
    for picture in pictures:
        for kind in kinds:
            if kind in picture:
                yield f"![{captions[kind].replace('`', '')}]({picture})\n\n*{captions[kind]}*"


def _losses(results: ResultTables) -> Iterator[str]:
    """Yield every comparison that onecopy loses by more than noise, with the reason."""
    losses = [*_time_losses(results), *_memory_losses(results), *_host_time_losses(results)]
    yield "## Where onecopy loses"
    yield from losses or ["Nowhere beyond noise in this run."]


def _time_losses(results: ResultTables) -> Iterator[str]:
    """Yield a table of the variants whose step is slower than with DDP or with torch's class."""
    cells = [
        [table.title.rpartition(", ")[0], row["variant"], row["x DDP"], row["quartiles"], row["x torch"]]
        for table in results.times
        for row in table.rows()
        if row["variant"].startswith("onecopy") and (_verdict(row) == "slower" or float(row["x torch"]) > 1 + NOISE)
    ]
    if cells:
        yield f"**Step time.** These variants are slower than DDP or than torch's class beyond noise. {WHY_TIME}"
        yield markdown(("run", "variant", "x DDP", "quartiles", "x torch"), cells)


def _memory_losses(results: ResultTables) -> Iterator[str]:
    """Yield a table of the variants of others that need less memory than ``ShardedDataParallel`` at some moment."""
    shown = ("together", "between steps", "peak")
    cells = []
    for table in results.memory:
        rows = {row["variant"]: row for row in table.rows()}
        ours = rows.get("onecopy, ShardedDataParallel")
        if ours is None:
            continue
        limits = {column: float(ours[column]) * (1 - MEMORY_NOISE) for column in shown}
        less = [
            row
            for name, row in rows.items()
            if not name.startswith("onecopy") and any(float(row[column]) < limits[column] for column in shown)
        ]
        cells += [
            [table.title.split()[0], row["variant"], *(row[column] for column in shown)]
            for row in ([ours, *less] if less else [])
        ]
    if cells:
        yield f"**Memory.** These variants need less memory than ShardedDataParallel at some moment. {WHY_MEMORY}"
        yield markdown(("ranks", "variant", "MB when `step()` is called", "MB between steps", "MB at the peak"), cells)


def _host_time_losses(results: ResultTables) -> Iterator[str]:
    """Yield a sentence on the models for which the host time of ``step()`` is longer than that of torch's class."""
    for table in results.host_time:
        rows = {row.pop("variant"): row for row in table.rows()}
        more = {
            (variant, model): float(row[model].split()[0]) - float(rows[PEER][model].split()[0])
            for variant, row in rows.items()
            if variant.startswith("onecopy")
            for model in row
        }
        sentences = []
        for variant in dict.fromkeys(variant for variant, _ in more):
            longer = [seconds for (name, _), seconds in more.items() if name == variant and seconds > 0]
            if longer:
                sentences.append(
                    f'"{variant}" takes {min(longer):.2f} to {max(longer):.2f} ms more, '
                    f"for {len(longer)} of {len(table.columns) - 1} models."
                )
        if sentences:
            yield (
                f'**Host time.** `step()` takes more processor time than "{PEER}" does. {" ".join(sentences)} '
                f"{WHY_HOST_TIME} [The table](#host-time-of-step) has all figures."
            )
