"""The page of results, written from the rows of a run: no figure that it writes is typed by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from onecopy.bench.growth import PEER
from onecopy.bench.report import (
    MB,
    MEMORY_COLUMNS,
    MEMORY_KINDS,
    SIZE_COLUMNS,
    TIME_COLUMNS,
    Row,
    bound,
    markdown,
    memory_rows,
    predictions,
    runs_in,
    save_rows,
    select,
    size_rows,
    summaries,
    time_cells,
    title_of,
)
from onecopy.bench.variants import THEIRS, YARDSTICK

NOISE = 0.02

HEAD = """# Benchmarks

Written by `onecopy bench page` from the rows of `make bench`, on one machine: {machine}. One thread per rank, gloo.
On a plain loopback communication is work for the same cores that compute, so it says little about clusters; the link,
a loopback shaped to its rate in a network namespace of its own (MTU 1500), is closer. The reference model is a GPT of
24M parameters, 69% of them in one embedding, batch 2 x 64 tokens; the deep one has 23M in 12 equal blocks, batch 4 x
64. AdamW in float32, the same seeds, data and flags everywhere. Peers: `make bench-setup`.
"""

TIMES = """## Step time and bytes on the wire

Variants take turns, three steps each, of which two are timed, in processes that are started anew every five
rounds; where memory does not hold all of a table at once, in heats, each with the variants that the others are
compared with. Ratios are medians of per-round ratios, with quartiles: "x DDP" to "{yardstick}", "x
torch" to "{theirs}". "backward" and "step" are its parts in ms (stepping inside the backward pass leaves
nothing for the second). "Idle" is how much of the time the machine's cores had nothing to do: with as many
ranks as cores, what more overlap could gain at most. "Wire" is what the loopback counted, headers included, in
units of the model's bytes times (N-1). "Difference" is the largest of any parameter from DDP's after 10 steps.
FSDP2 and DeepSpeed send 3 units and more here because gloo has no reduce-scatter of its own; on NCCL it is 2 (3
with resharding). What `sparse_embeddings` gains depends on how few of an embedding's rows a batch uses: here at most
128 of the reference model's 32,768 on each rank. On two cores a ratio can differ by 0.05 to 0.1 when a whole run is
repeated: smaller differences say nothing.
"""

MODEL = """## The time model

`onecopy.planning.estimate` predicts a step from what was measured without communication, the time of moving the model's
bytes by itself and the processor time that this takes, in the same run; for machines that are not here, give it theirs.
Ratios are predicted to measured.
"""

MEMORY = """## Memory

Every variant in processes of its own, MB on the rank with the highest peak. Parameters to "other" are what tensors
hold when `step()` is called, with gradients, and "together" is their sum; "between steps" is what is left after it;
"peak" adds to that the most that was alive during a step, from torch's memory profiler, activations included. Resident
size includes the profiler and the libraries. DeepSpeed runs with its defaults, which reserve buckets of up to 2 GB that
this model never fills: look at its resident size instead.
"""

SIZES = """### Models of several sizes

The reference model with more blocks, on 2 ranks: memory beside parameters, gradients and state, as it is between steps
and at the peak of a step (activations included).
"""

SAVING = """## Gathering the state, and saving

Seconds on 2 ranks, medians of 3. Saving is `checkpoint.save` for onecopy, `save_checkpoint` for DeepSpeed,
torch.distributed.checkpoint for FSDP2, and one `torch.save` file, flushed to the disk, for the others.
"""

GROWTH = """## Growth

Seconds to plan who owns what, without processes: all owners for `parameter`, one rank's own shards for `element` and
`bucket`. Then ms of processor time that `step()` takes in whole, waiting left out, and in brackets what of it is not
spent in AdamW's own `step()`, for many parameters of 64 elements, each after a step of its own and with caches as cold
as after a backward pass. torch's class calls AdamW's with every parameter that a rank owns, onecopy with one tensor for
many of them. The first row is AdamW by itself, for as many parameters as one rank owns, each in memory of its own.
"""


def page(rows: Sequence[Row], machine: str, pictures: Sequence[Path]) -> str:
    """The whole page."""
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
    for picture in pictures:
        if any(kind in picture.stem for kind in kinds):
            yield f"![{picture.stem.removeprefix('bench-').replace('-', ' ')}]({picture.name})"


def _times(rows: Sequence[Row]) -> Iterator[str]:
    yield TIMES.format(yardstick=YARDSTICK, theirs=THEIRS)
    for run in runs_in(rows):
        rounds = len(next(row for row in select(rows, "time", run) if row["seconds"])["seconds"])
        yield f"### {title_of(run).capitalize()}, {rounds} rounds"
        yield markdown(TIME_COLUMNS, [time_cells(each) for each in summaries(rows, run)])
        yield (
            "Bound from primitives measured in the same run, for 1/N of the update and the least traffic (computing "
            "and what moving takes of the cores, or moving, whichever is slower): "
            f"{1e3 * bound(rows, run):.1f} ms."
        )


def _losses(rows: Sequence[Row]) -> Iterator[str]:
    """Every comparison that onecopy loses by more than noise."""
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
    overhead = [row for row in select(rows, "overhead") if "tensors" in row]
    theirs = {row["tensors"]: row for row in overhead if row["variant"] == PEER}
    for row in overhead:
        for key, what in {"whole": "`step()`", "seconds": "`step()` beside AdamW's own"}.items():
            peer = theirs[row["tensors"]][key]
            if row["variant"].startswith("onecopy") and row[key] > peer:
                lines.append(
                    f"- {what} with {row['tensors']:,} small parameters: {row['variant']} {1e3 * row[key]:.2f} ms, "
                    f"{PEER} {1e3 * peer:.2f} ms."
                )
    yield "\n".join(lines) if lines else "Nowhere beyond noise in this run."
    yield (
        "Why: level 1 (`onecopy`, with or without bucket views) and the two overlap hooks all-reduce gradients and "
        "then send parameters, 1.5 times what DDP sends, as torch's class does. With as many ranks as cores, what "
        "communication works is taken from computing, on the link too, and overlap can gain no more than the cores "
        "are idle. Beside AdamW's own, `step()` notices moved parameters and missing gradients on every rank before "
        "anything is sent; torch's class does not, and without bucket views sends every parameter by itself."
    )


def _memory_losses(rows: Sequence[Row], ranks: int) -> Iterator[str]:
    ours = "onecopy, ShardedDataParallel"
    for when, kinds in {
        "at the peak of a step": ("peak",),
        "when step() is called": MEMORY_KINDS,
        "between steps": ("between",),
    }.items():
        held: dict[str, float] = {}
        for row in select(rows, "memory"):
            if row["ranks"] == ranks and not row.get("error"):
                held[row["variant"]] = max(sum(row[kind] for kind in kinds), held.get(row["variant"], 0.0))
        for name, bytes_ in held.items():
            if ours in held and bytes_ < held[ours] and not name.startswith(ours):
                yield (
                    f"- Memory {when} with {ranks} ranks: ShardedDataParallel {held[ours] / MB:.0f} MB, {name} "
                    f"{bytes_ / MB:.0f} MB."
                )


def _model(rows: Sequence[Row]) -> Iterator[str]:
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
    for ranks in sorted({row["ranks"] for row in select(rows, "memory")}):
        yield f"### {ranks} ranks"
        yield markdown(MEMORY_COLUMNS, memory_rows(rows, ranks))


def _seconds(value: float | None) -> str:
    return "not run" if value is None else f"{value:.4f}"


def _growth(rows: Sequence[Row]) -> Iterator[str]:
    planning = select(rows, "planning")
    ranks = sorted({row["ranks"] for row in planning})
    seconds = {(row["policy"], row["parameters"], row["ranks"]): row["seconds"] for row in planning}
    cells = [
        [policy, f"{count:,}", *(_seconds(seconds.get((policy, count, number))) for number in ranks)]
        for policy, count in dict.fromkeys((row["policy"], row["parameters"]) for row in planning)
    ]
    yield markdown(("policy", "parameters", *(f"{number:,} ranks" for number in ranks)), cells)
    overhead = [row for row in select(rows, "overhead") if "tensors" in row]
    tensors = sorted({row["tensors"] for row in overhead})
    by_variant: dict[str, list[str]] = {}
    for row in sorted(select(rows, "alone"), key=lambda row: row["tensors"]):
        by_variant.setdefault(row["variant"], []).append(f"{1e3 * row['whole']:.2f}")
    for row in sorted(overhead, key=lambda row: row["tensors"]):
        text = f"{1e3 * row['whole']:.2f} ({1e3 * row['seconds']:.2f})"
        by_variant.setdefault(row["variant"], []).append(text)
    cells = [[variant, *texts] for variant, texts in by_variant.items()]
    yield markdown(("variant", *(f"{count:,} parameters" for count in tensors)), cells)
