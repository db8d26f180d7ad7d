"""What one iteration of each level asks of the simulated device, counted in steady state.

``python -m tests.accelerator.counting docs/accelerators.md`` writes the counts of that page: those of a model of 12
blocks at 2 and 3 ranks. Launches are those of the optimizer and of onecopy, not those of the model.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onecopy import MixedPrecision
from onecopy.comm.agreement import VOTE_BYTES
from tests.accelerator import device, programs
from tests.accelerator.counters import Step
from tests.accelerator.harness import SIMCCL, run, sim_pools
from tests.accelerator.training import (
    BUCKET,
    Blocks,
    Case,
    Training,
    adamw,
    after_backward,
    ddp,
    interleaved,
    level_1,
    level_2,
    level_3,
    on_device,
    one_pass,
    small_sizes,
)
from tests.planning.table import write
from tests.support import bf16_probe

WARM_UP = 4
"""Iterations before the counted one: from the third on the overlap hooks update inside backward."""

FORWARD = "onecopy/data_parallel/wrapper.py"
"""The file that calls the user's module, to whose lines the module's kernels are counted."""

LARGE = 64 << 20
"""A size of buckets with which all parameters are in one."""

BLOCKS = 12
HEADER = """| level | buckets | calls | operations | launches | waits of the host | peak KB, host in lockstep \
| peak KB, host far ahead |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def plain(training: Training) -> None:
    """The reference: nothing is sharded."""
    training.model = ddp(training)
    made: Any = torch.optim.AdamW(training.module.parameters(), lr=1e-2, foreach=True)
    made.optim, made.wait = made, lambda: None  # as a ZeroRedundancyOptimizer has them
    training.optimizers.append(made)


def counted(setup: Callable[[Training], None], iterate: Any = one_pass, **options: Any) -> tuple[Case, Any]:
    """A program of which one iteration is counted; its model and the size of its buckets are replaced."""
    return Case("", setup, **options), iterate


MASTERS: dict[str, Any] = {"parts": adamw(master_weights=True), "dtype": torch.bfloat16}
OVERLAP: dict[str, Any] = {"overlap_forward": True}
BF16: dict[str, Any] = {"wrap": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16), **OVERLAP}}

LEVELS = {
    "DDP, AdamW": counted(plain),
    "level 1": counted(level_1),
    "level 1 by parameter": counted(level_1, parts=adamw(shard_by="parameter")),
    "level 1 master weights": counted(level_1, **MASTERS),
    "level 2": counted(level_2),
    "after backward": counted(after_backward),
    "interleaved": counted(interleaved),
    "level 3": counted(level_3),
    "level 3 overlap": counted(level_3, wrap=OVERLAP),
    "level 3 bf16": counted(level_3, **BF16),
}
"""The rows of docs/accelerators.md."""

COUNTED = LEVELS | {
    "level 1 clipped": counted(level_1, programs.clipped),
    "level 1 clipped master weights": counted(level_1, programs.clipped, **MASTERS),
    "level 1 offload": counted(level_1, parts=adamw(offload="cpu", master_weights=True), dtype=torch.bfloat16),
    "level 1 refusing infinities": counted(level_1, parts=adamw(nonfinite="raise")),
    "level 2 clipped": counted(level_2, programs.clipped),
    "level 2 zeroed in place": counted(level_2, programs.zeroed_in_place),
    "level 2 refusing infinities": counted(level_2, parts=adamw(nonfinite="raise")),
    "interleaved zeroed in place": counted(interleaved, programs.zeroed_in_place),
    "level 3 clipped": counted(level_3, programs.clipped, **BF16),
    "level 3 averaging": counted(level_3, averages=True),
    "level 3 offload": counted(level_3, parts=adamw(offload="cpu")),
}
"""Programs whose costs are bounded by tests."""


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of one iteration on one rank."""

    names: list[str]  # of the collectives, in order
    operations: int  # collectives as NCCL would run them
    groups: int  # number of communicators that they use
    bytes: tuple[int, int]  # of all collectives, and those of the parameters
    launches: int  # kernels of the optimizer, and of code of onecopy anywhere
    synchronizations: list[tuple[str, str, int]]  # where the host has waited: kind, source line, age in steps
    peak: int  # device memory beyond the parameters and the state, with memory that other streams keep
    buckets: int  # of DDP or ShardedDataParallel
    rounds: int  # all-gathers that share parameters, at levels 1 and 2

    @property
    def calls(self) -> int:
        """Number of collectives."""
        return len(self.names)


def count(name: str, blocks: int, bucket: int = BUCKET, host_ahead: int | str = "far") -> Counts:
    """In a worker: train and count the iteration after the warm-up."""
    case, iterate = COUNTED[name]
    case = dataclasses.replace(case, model=functools.partial(Blocks, blocks), bucket=bucket)
    gc.collect()  # the memory of an earlier training would count as long as nobody has collected it
    # Padded as in proportion a large model is, whose parameters are cut into equal parts.
    with (
        small_sizes(bucket, padding=bucket, averages=case.averages),
        device.simulate(seed=dist.get_rank(), host_ahead=host_ahead) as run,
    ):
        training = Training(case, on_device())
        for step in range(WARM_UP):
            with run.step():
                iterate(training, step)
        with run.step() as iteration:
            iterate(training, WARM_UP)
            peak = run.core.memory()[3]
        training.results()
        sharded: list[Any] = [each.engine for each in training.optimizers if hasattr(each, "engine")]
        buckets, rounds = _reductions(iteration), sum(each.sharing.messages for each in sharded)
        if case.setup is level_3:
            buckets, rounds = sum(len(each.storage.buckets) for each in sharded), 0
        training.zero_grad()
        run.collect()
        lasting = run.core.memory()[0]
    assert run.reports == [], run.reports[:3]
    return Counts(
        [each.name for each in iteration.collectives],
        sum(each.operations for each in iteration.collectives),
        len({each.group for each in iteration.collectives}),
        (sum(each.size for each in iteration.collectives), sum(param.nbytes for param in training.module.parameters())),
        _launches(iteration, of_reference=case.setup is plain),
        [(each.kind, each.site, each.age) for each in iteration.synchronizations],
        peak - lasting,
        buckets,
        rounds,
    )


def _launches(iteration: Step, of_reference: bool) -> int:
    """Number of kernels of the optimizer, and of those that onecopy's own lines have launched."""
    return sum(
        times
        for (name, where), times in iteration.kernels.items()
        if (where.startswith("onecopy/") and not where.startswith(FORWARD))
        or (of_reference and name.startswith("_foreach_"))
    )


def _reductions(iteration: Step) -> int:
    """Number of DDP's buckets, by their reductions."""
    names = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
    return sum(each.name in names and each.size != VOTE_BYTES for each in iteration.collectives)


@functools.cache
def counts(level: str, ranks: int = 2, backend: str = SIMCCL, blocks: int = 6, **options: Any) -> Counts:
    """The counts of rank 0."""
    found: Counts = run(count, ranks, {"name": level, "blocks": blocks, **options}, backend)[0]
    return found


def row(level: str) -> str:
    """Count one level; numbers that differ between 2 and 3 ranks are separated by a slash."""
    columns = []
    for ranks in (2, 3):
        lockstep, far = (counts(level, ranks, blocks=BLOCKS, host_ahead=ahead) for ahead in (0, "far"))
        numbers = (far.buckets, far.calls, far.operations, far.launches, len(far.synchronizations))
        columns.append((*numbers, lockstep.peak // 1000, far.peak // 1000))
    cells = [" / ".join(map(str, dict.fromkeys(each))) for each in zip(*columns, strict=True)]
    return f"| {' | '.join([level, *cells])} |"


def main() -> None:
    """Count all levels, and write."""
    bf16_probe.protect()
    try:
        write(Path(sys.argv[1]), "counts", "\n".join([HEADER, *map(row, LEVELS)]))
    finally:
        sim_pools.close()


if __name__ == "__main__":
    main()
