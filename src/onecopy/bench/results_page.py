"""Write docs/benchmarks.md from the rows of a run: its text, and the figures in it, of which none is typed by hand."""

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

HEAD = """# Benchmarks

`onecopy bench page` writes this page from the results of `make bench` on one machine: {machine}. Every rank has one
thread and uses gloo. On a plain loopback the cores that compute also do the work of communication, so those figures
say little about clusters. The link is closer to one: it is a loopback in its own network namespace, limited to the
given rate, with an MTU of 1500. The reference model is a GPT of 24M parameters, 69% of them in one embedding, with a
batch of 2 x 64 tokens. The deep model has 23M parameters in 12 equal blocks, with a batch of 4 x 64 tokens. All
variants use AdamW in float32 and the same seeds, data and flags. `make bench-setup` installs the peers.
"""

TIMES = """## Step time and bytes on the wire

Variants take turns. A turn is three steps, of which the last two are timed. The processes are started anew every five
rounds. If the variants of a table do not fit into memory together, they run in several heats, and each heat includes
the variants that the others are compared with.

- "x DDP" and "x torch" are ratios to "{yardstick}" and "{theirs}": medians of the ratios of single rounds.
  "Quartiles" belong to "x DDP".
- "backward" and "step" are the two parts of an iteration in ms. A step inside the backward pass leaves nothing for
  the second.
- "idle" is the share of time in which the machine's cores had nothing to do. With as many ranks as cores, more
  overlap cannot gain more than that.
- "wire" is the bytes that the loopback counted, headers included, in units of the model's bytes times (N-1).
- "difference" is the largest difference of any parameter from DDP's after 10 steps.

FSDP2 and DeepSpeed send 3 units and more here because gloo has no reduce-scatter of its own. On NCCL they send 2
units, or 3 with resharding. The gain of `sparse_embeddings` depends on how few rows of an embedding a batch uses:
here at most 128 of the reference model's 32,768 rows on each rank. On two cores a ratio can differ by 0.05 to 0.1
when the whole run is repeated. Smaller differences mean nothing.
"""

MODEL = """## The time model

`onecopy.planning.estimate` predicts the time of a step. Its inputs were measured in the same run: the time of a step
without communication, the time to move the model's bytes and nothing else, and the processor time that moving takes.
For another machine, give it that machine's figures. The ratio is predicted to measured time.
"""

MEMORY = """## Memory

Each variant runs in its own processes. Figures are MB on the rank with the highest peak. The columns "parameters" to
"other" are the bytes of tensors when `step()` is called and gradients exist; "together" is their sum. "Between steps"
is the same sum after `step()`. "Peak" adds the largest growth during a step to it, activations included, as torch's
memory profiler reports it. Resident size includes the profiler and the libraries. DeepSpeed runs with its defaults,
which reserve buckets of up to 2 GB that this model never fills: look at its resident size instead.
"""

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
Then the host time of `step()` on 2 ranks: ms of processor time of the calling thread, without waiting. In brackets is
the part outside of AdamW's own `step()`. There are as many tensors as in the real models, but every dimension of at
least 16 is divided by 16, so that arithmetic does not hide the host time. Before each measured step the contender
makes another step, and the caches are overwritten. Each figure is the least of many rounds. The first row is AdamW by
itself on every second tensor, about as many as one rank owns.
"""

WHY = """
Why: level 1 (`onecopy`, with or without bucket views) and the two overlap hooks all-reduce gradients and then send
parameters. That is 1.5 times the bytes that DDP sends, and as many as torch's class sends. With as many ranks as
cores, communication takes processor time from computing, on the link too, and overlap cannot gain more than the idle
time of the cores. Before anything is sent, `step()` of onecopy checks on every rank for moved parameters and missing
gradients. torch's class does not check this; without bucket views it sends every parameter in its own message.
"""


def page(rows: Sequence[Row], machine: str, pictures: Sequence[Path]) -> str:
    """Return the whole page as Markdown."""
    parts = [HEAD.format(machine=machine), *_times(rows), *_pictures(pictures, "frontier", "scaling")]
    parts += _losses(rows)
    parts += [MODEL, *_model(rows)]
    if select(rows, "memory"):
        parts += [MEMORY, *_memory(rows), *_pictures(pictures, "memory")]
    if select(rows, "size"):
        parts += [SIZES, markdown(SIZE_COLUMNS, size_rows(rows))]
    if select(rows, "save"):
        parts += [SAVING, markdown(("variant", "gather the state", "save"), save_rows(rows))]
    if select(rows, "planning"):
        parts += [GROWTH, *_growth(rows), *_pictures(pictures, "growth")]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _pictures(pictures: Sequence[Path], *kinds: str) -> Iterator[str]:
    """Yield links to the pictures of some kinds."""
    for picture in pictures:
        if any(kind in picture.stem for kind in kinds):
            yield f"![{picture.stem.removeprefix('bench-').replace('-', ' ')}]({picture.name})"


def _times(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table of step times for each run."""
    yield TIMES.format(yardstick=YARDSTICK, theirs=THEIRS)
    for run in runs_in(rows):
        rounds = len(next(row for row in select(rows, "time", run) if row["seconds"])["seconds"])
        yield f"### {title_of(run).capitalize()}, {rounds} rounds"
        yield markdown(TIME_COLUMNS, [time_cells(each) for each in summaries(rows, run)])
        yield (
            f"Lower bound: {1e3 * bound(rows, run):.1f} ms. It follows from primitives that were measured in the same "
            "run, for 1/N of the update and the least traffic. It is the longer of two times: moving the bytes, or "
            "computing plus the processor time that moving takes."
        )


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
