"""Write docs/benchmarks.md from the rows of a run: its text, and the figures in it, of which none is typed by hand.

The order is: three findings and one picture, how the figures were measured, what the columns mean, where onecopy loses,
and then the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onecopy.bench.host_time import PEER
from onecopy.bench.memory_use import KINDS
from onecopy.bench.summaries import Row, bound, host_time_models, predictions, runs_in, select, summaries, title_of
from onecopy.bench.tables import (
    MB,
    MEMORY_COLUMNS,
    SIZE_COLUMNS,
    TIME_COLUMNS,
    host_time_columns,
    host_time_rows,
    markdown,
    memory_rows,
    save_rows,
    size_rows,
    time_cells,
)
from onecopy.bench.variants import THEIRS, YARDSTICK

NOISE = 0.02

LEVEL_1, LEVEL_2 = "onecopy, bucket views", "onecopy, reduce-scatter hook"
LEVEL_3 = "onecopy, ShardedDataParallel, overlap_forward"
COMPARED = {"DDP": YARDSTICK, "torch's class": THEIRS, "level 1": LEVEL_1, "level 2": LEVEL_2, "level 3": LEVEL_3}
"""The variants of the findings, by the names that the findings use."""

HEAD = "# Performance"

SETTING = """## How it was measured

`onecopy bench page` writes this page from the results of `make bench` on one machine: {machine}.

- Every rank has one thread and uses gloo. All variants use AdamW in float32, and the same seeds, data and flags.
- On a plain loopback the cores that compute also do the work of communication. So those figures say little about
  clusters. The link is closer to one: it is a loopback in its own network namespace, limited to the given rate, with
  an MTU of 1500.
- The reference model is a GPT of 24M parameters, 69% of them in one embedding, with a batch of 2 x 64 tokens. The deep
  model has 23M parameters in 12 equal blocks, with a batch of 4 x 64 tokens.
- Variants take turns. A turn is three steps, of which the last two are timed. The processes are started anew every
  five rounds. If the variants of a table do not fit into memory together, they run in several heats. Each heat
  includes the variants that the others are compared with.
- For memory, each variant runs in its own processes.
- On two cores a ratio can differ by 0.05 to 0.1 when the whole run is repeated. Smaller differences mean nothing.
- `make bench-setup` installs the peers.
"""

COLUMNS = """## What the columns mean

In the findings, DDP is "{yardstick}", torch's class is "{theirs}", level 1 is "{level_1}", level 2 is "{level_2}" and
level 3 is "{level_3}".

Step time:

- "x DDP" and "x torch" are ratios to "{yardstick}" and "{theirs}": medians of the ratios of single rounds.
  "Quartiles" belong to "x DDP".
- "backward" and "step" are the two parts of an iteration in ms. A step inside the backward pass leaves nothing for
  the second.
- "idle" is the share of time in which the machine's cores had nothing to do. With as many ranks as cores, more
  overlap cannot gain more than that.
- "wire" is the bytes that the loopback counted, headers included, in units of the model's bytes times (N-1). FSDP2 and
  DeepSpeed send 3 units and more here because gloo has no reduce-scatter of its own. On NCCL they send 2 units, or 3
  with resharding.
- "difference" is the largest difference of any parameter from DDP's after 10 steps.
- The gain of `sparse_embeddings` depends on how few rows of an embedding a batch uses: here at most 128 of the
  reference model's 32,768 rows on each rank.
- The lower bound below a table follows from primitives that were measured in the same run, for 1/N of the update and
  the least traffic. It is the longer of two times: moving the bytes, or computing plus the processor time that moving
  takes.

Memory, in MB on the rank with the highest peak:

- "parameters" to "other" are the bytes of tensors when `step()` is called and gradients exist. "together" is their sum.
- "between steps" is the same sum after `step()`.
- "peak" adds the largest growth during a step to it, activations included, as torch's memory profiler reports it.
- "resident" is the resident size of the process. It includes the profiler and the libraries. DeepSpeed runs with its
  defaults, which reserve buckets of up to 2 GB that this model never fills: look at its resident size instead.
"""

TIMES = "## Step time and bytes on the wire"

MODEL = """## The time model

`onecopy.planning.estimate` predicts the time of a step. Its inputs were measured in the same run: the time of a step
without communication, the time to move the model's bytes and nothing else, and the processor time that moving takes.
For another machine, give it that machine's figures. The ratio is predicted to measured time.
"""

MEMORY = "## Memory"

SIZES = """### Models of several sizes

The reference model with more blocks, on 2 ranks: the memory that is not parameters, gradients or state, between steps
and at the peak of a step (activations included).
"""

SAVING = """## Gathering the state, and saving

Seconds on 2 ranks, medians of 3. onecopy saves with `checkpoint.save`, DeepSpeed with `save_checkpoint`, FSDP2 with
torch.distributed.checkpoint. The others write one `torch.save` file and flush it to the disk.
"""

GROWTH = """## Growth

Seconds to plan the layout, in one process. Nothing is communicated for it.
"""

HOST_TIME = """
The next table is the host time of `step()` on 2 ranks: ms of processor time of the calling thread, without waiting. The
part outside of AdamW's own `step()` is in brackets. There are as many tensors as in the real models, but every
dimension of at least 16 is divided by 16, so that arithmetic does not hide the host time. Before each measured step the
contender makes another step, and the caches are overwritten. Each figure is the least of many rounds. The first row is
AdamW by itself on every second tensor, about as many as one rank owns.
"""

WHY = """
Why: level 1 (`onecopy`, with or without bucket views) and the two overlap hooks all-reduce gradients and then send
parameters. That is 1.5 times the bytes that DDP sends, and as many as torch's class sends. With as many ranks as
cores, communication takes processor time from computing, on the link too. Overlap cannot gain more than the idle time
of the cores. Before anything is sent, `step()` of onecopy checks on every rank for moved parameters and missing
gradients. torch's class does not check this; without bucket views it sends every parameter in its own message.
"""


def page(rows: Sequence[Row], machine: str, pictures: Sequence[Path]) -> str:
    """Return the whole page as Markdown."""
    frontiers = [picture for picture in pictures if "frontier" in picture.stem]
    # A limited link is closer to a cluster than a plain loopback.
    first = sorted(frontiers, key=lambda picture: "loopback" in picture.stem)[:1]
    rest = [picture for picture in pictures if picture not in first]
    parts = [HEAD, *_findings(rows), *_pictures(first, "frontier")]
    names = {"yardstick": YARDSTICK, "theirs": THEIRS, "level_1": LEVEL_1, "level_2": LEVEL_2, "level_3": LEVEL_3}
    parts += [SETTING.format(machine=machine), COLUMNS.format(**names)]
    parts += [*_losses(rows), *_times(rows), *_pictures(rest, "frontier", "scaling")]
    parts += [MODEL, *_model(rows)]
    if select(rows, "memory"):
        parts += [MEMORY, *_memory(rows), *_pictures(rest, "memory")]
    if select(rows, "size"):
        parts += [SIZES, markdown(SIZE_COLUMNS, size_rows(rows))]
    if select(rows, "save"):
        parts += [SAVING, markdown(("variant", "gather the state", "save"), save_rows(rows))]
    if select(rows, "planning"):
        parts += [GROWTH, *_growth(rows), *_pictures(rest, "growth")]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _findings(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a heading and a numbered list: the results for memory, time and saving, in one sentence each."""
    found = [*_memory_finding(rows), *_time_finding(rows), *_saving_finding(rows)]
    if found:
        yield "## Three findings" if len(found) == 3 else "## Findings"
        yield "\n".join(f"{number}. {text}" for number, text in enumerate(found, start=1))


def _memory_finding(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence with the highest peak of memory of each variant, at the largest number of ranks."""
    ranks = max((row["ranks"] for row in select(rows, "memory")), default=0)
    peaks: dict[str, float] = {}
    for row in select(rows, "memory"):
        if row["ranks"] == ranks and not row.get("error"):
            peaks[row["variant"]] = max(row["peak"], peaks.get(row["variant"], 0.0))
    known = [f"{name}: {peaks[variant] / MB:.1f} MB" for name, variant in COMPARED.items() if variant in peaks]
    if known:
        yield f"**Memory** at the peak of a step with {ranks} ranks. {'; '.join(known)}."


def _time_finding(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence with the range of each variant's step time as a ratio to DDP, over all runs."""
    ratios: dict[str, list[float]] = {}
    for run in runs_in(rows):
        for each in summaries(rows, run):
            if not each["error"]:
                ratios.setdefault(each["variant"], []).append(each["to_ddp"])
    known = [
        f"{name}: {min(ratios[variant]):.3f} to {max(ratios[variant]):.3f}"
        for name, variant in COMPARED.items()
        if variant in ratios and variant != YARDSTICK
    ]
    if known:
        yield f"**Time** of a step as a ratio to DDP, over the runs below. {'; '.join(known)}."


def _saving_finding(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence with the time that each variant takes to save model and optimizer."""
    seconds = {row["variant"]: row["save"] for row in select(rows, "save") if not row["error"] and "save" in row}
    known = [f"{name}: {seconds[variant]:.2f} s" for name, variant in COMPARED.items() if variant in seconds]
    if known:
        yield f"**Saving** model and optimizer on 2 ranks. {'; '.join(known)}."


def _pictures(pictures: Sequence[Path], *kinds: str) -> Iterator[str]:
    """Yield links to the pictures of some kinds."""
    for picture in pictures:
        if any(kind in picture.stem for kind in kinds):
            yield f"![{picture.stem.removeprefix('bench-').replace('-', ' ')}]({picture.name})"


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of step times for each run."""
    yield TIMES
    for run in runs_in(rows):
        rounds = len(next(row for row in select(rows, "time", run) if row["seconds"])["seconds"])
        yield f"### {title_of(run).capitalize()}, {rounds} rounds"
        yield markdown(TIME_COLUMNS, [time_cells(each) for each in summaries(rows, run)])
        yield f"Lower bound: {1e3 * bound(rows, run):.1f} ms."


def _losses(rows: Sequence[Row]) -> Iterator[str]:
    """Name every comparison that onecopy loses by more than noise."""
    yield "## Where onecopy loses"
    lines = []
    for run in runs_in(rows):
        for each in summaries(rows, run):
            if each["error"] or not each["variant"].startswith("onecopy"):
                continue
            if each["to_torch"] > 1 + NOISE:
                lines.append(f"- {title_of(run)}: {each['variant']} takes {each['to_torch']:.2f} x torch's class.")
            if each["to_ddp"] > 1 + NOISE:
                lines.append(f"- {title_of(run)}: {each['variant']} takes {each['to_ddp']:.2f} x DDP.")
    for ranks in sorted({row["ranks"] for row in select(rows, "memory")}):
        lines += _memory_losses(rows, ranks)
    lines += _host_time_losses(rows)
    yield "\n".join(lines) if lines else "Nowhere beyond noise in this run."
    yield WHY


def _host_time_losses(rows: Sequence[Row]) -> Iterator[str]:
    """Name every model for which the host time of ``step()`` is longer than that of torch's class with bucket views."""
    overhead = [row for row in select(rows, "overhead") if "tensors" in row]
    peers = {row["model"]: row for row in overhead if row["variant"] == PEER}
    for row in overhead:
        for key, text in {"whole": "`step()`", "seconds": "`step()` beside AdamW's own"}.items():
            peer = peers[row["model"]][key]
            if row["variant"].startswith("onecopy") and row[key] > peer:
                yield (
                    f"- Host time of {text}, {row['model']} ({row['tensors']} tensors): {row['variant']} "
                    f"{1e3 * row[key]:.2f} ms, {PEER} {1e3 * peer:.2f} ms."
                )


def _memory_losses(rows: Sequence[Row], ranks: int) -> Iterator[str]:
    """Name every variant that needs less memory than ``ShardedDataParallel``."""
    ours = "onecopy, ShardedDataParallel"
    for when, kinds in {
        "at the peak of a step": ("peak",),
        "when step() is called": KINDS,
        "between steps": ("between",),
    }.items():
        largest: dict[str, float] = {}
        for row in select(rows, "memory"):
            if row["ranks"] == ranks and not row.get("error"):
                largest[row["variant"]] = max(sum(row[kind] for kind in kinds), largest.get(row["variant"], 0.0))
        for name, bytes_ in largest.items():
            if ours in largest and bytes_ < largest[ours] and not name.startswith(ours):
                yield (
                    f"- Memory {when} with {ranks} ranks: ShardedDataParallel {largest[ours] / MB:.0f} MB, {name} "
                    f"{bytes_ / MB:.0f} MB."
                )


def _model(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of predicted step times."""
    cells = [
        [
            title_of(run),
            each["variant"],
            f"{1e3 * each['measured']:.0f}",
            f"{1e3 * each['predicted']:.0f}",
            f"{each['off']:.2f}",
        ]
        for run in runs_in(rows)
        for each in predictions(rows, run)
    ]
    yield markdown(("run", "variant", "measured ms", "predicted ms", "ratio"), cells)


def _memory(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of memory for each number of ranks."""
    for ranks in sorted({row["ranks"] for row in select(rows, "memory")}):
        yield f"### {ranks} ranks"
        yield markdown(MEMORY_COLUMNS, memory_rows(rows, ranks))


def _seconds(value: float | None) -> str:
    return "not run" if value is None else f"{value:.4f}"


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tables of planning times and of the host time of ``step()``."""
    planning = select(rows, "planning")
    ranks = sorted({row["ranks"] for row in planning})
    seconds = {(row["policy"], row["parameters"], row["ranks"]): row["seconds"] for row in planning}
    cells = [
        [policy, f"{count:,}", *(_seconds(seconds.get((policy, count, number))) for number in ranks)]
        for policy, count in dict.fromkeys((row["policy"], row["parameters"]) for row in planning)
    ]
    yield markdown(("policy", "parameters", *(f"{number:,} ranks" for number in ranks)), cells)
    if host_time_models(rows):
        yield HOST_TIME
        yield markdown(host_time_columns(rows), host_time_rows(rows))
