"""What one iteration of each level asks of the simulated device, counted in steady state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from onecopy import MixedPrecision
from onecopy.comm.agreement import VOTE_BYTES
from tests.accelerator import device, programs
from tests.accelerator.counters import Step
from tests.accelerator.process_group import Communicator
from tests.accelerator.training import (
    BUCKET,
    Blocks,
    Case,
    Place,
    Training,
    adamw,
    after_backward,
    ddp,
    interleaved,
    level_1,
    level_2,
    level_3,
    one_pass,
    small_sizes,
)

HALF = torch.bfloat16
OVERLAP = {"overlap_forward": True}
WARM_UP = 4
"""Iterations before the counted one: from the third on the overlap hooks update inside backward."""

FORWARD = "onecopy/data_parallel/wrapper.py"
"""The file that calls the user's module, to whose lines the module's kernels are counted."""

LARGE = 64 << 20
"""A size of buckets with which all parameters are in one."""


def plain(training: Training) -> None:
    """The reference: nothing is sharded."""
    training.model = ddp(training)
    made: Any = torch.optim.AdamW(training.module.parameters(), lr=1e-2, foreach=True)
    made.optim, made.wait = made, lambda: None  # as a ZeroRedundancyOptimizer has them
    training.optimizers.append(made)


MASTERS: dict[str, Any] = {"master_weights": True}
BF16 = {"mixed_precision": MixedPrecision(param_dtype=HALF), **OVERLAP}


@dataclasses.dataclass(frozen=True)
class Counted:
    """A training program of which one iteration is counted; its model and the size of its buckets are replaced."""

    case: Case
    iterate: Callable[[Training, int], None] = one_pass


LEVELS = {
    "DDP, AdamW": Counted(Case("", plain)),
    "level 1": Counted(Case("", level_1)),
    "level 1 by parameter": Counted(Case("", level_1, parts=adamw(shard_by="parameter"))),
    "level 1 master weights": Counted(Case("", level_1, parts=adamw(**MASTERS), dtype=HALF)),
    "level 2": Counted(Case("", level_2)),
    "after backward": Counted(Case("", after_backward)),
    "interleaved": Counted(Case("", interleaved)),
    "level 3": Counted(Case("", level_3)),
    "level 3 overlap": Counted(Case("", level_3, wrap=OVERLAP)),
    "level 3 bf16": Counted(Case("", level_3, wrap=BF16)),
}
"""The rows of docs/accelerators.md."""

COUNTED = LEVELS | {
    "level 1 clipped": Counted(Case("", level_1), programs.clipped),
    "level 1 clipped master weights": Counted(Case("", level_1, parts=adamw(**MASTERS), dtype=HALF), programs.clipped),
    "level 1 offload": Counted(Case("", level_1, parts=adamw(offload="cpu", **MASTERS), dtype=HALF)),
    "level 1 refusing infinities": Counted(Case("", level_1, parts=adamw(nonfinite="raise"))),
    "level 2 clipped": Counted(Case("", level_2), programs.clipped),
    "level 2 zeroed in place": Counted(Case("", level_2), programs.zeroed_in_place),
    "level 2 refusing infinities": Counted(Case("", level_2, parts=adamw(nonfinite="raise"))),
    "interleaved zeroed in place": Counted(Case("", interleaved), programs.zeroed_in_place),
    "level 3 clipped": Counted(Case("", level_3, wrap=BF16), programs.clipped),
    "level 3 averaging": Counted(Case("", level_3, averages=True)),
    "level 3 offload": Counted(Case("", level_3, parts=adamw(offload="cpu"))),
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
    counted = COUNTED[name]
    case = dataclasses.replace(counted.case, model=functools.partial(Blocks, blocks), bucket=bucket)
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    gc.collect()  # the memory of an earlier training would count as long as nobody has collected it
    # Padded as in proportion a large model is, whose parameters are cut into equal parts.
    with (
        small_sizes(bucket, padding=bucket, averages=case.averages),
        device.simulate(seed=dist.get_rank(), host_ahead=host_ahead) as run,
    ):
        training = Training(case, place)
        for step in range(WARM_UP):
            with run.step():
                counted.iterate(training, step)
        with run.step() as iteration:
            counted.iterate(training, WARM_UP)
            peak = run.core.memory()[3]
        training.results()
        buckets, rounds = _buckets(training, iteration), _rounds(training)
        training.zero_grad()
        run.collect()
        lasting = run.core.memory()[0]
    assert run.reports == [], run.reports[:3]
    return Counts(
        [each.name for each in iteration.collectives],
        iteration.operations,
        len({each.group for each in iteration.collectives}),
        (iteration.collective_bytes, sum(param.nbytes for param in training.module.parameters())),
        _launches(training, iteration),
        [(each.kind, each.site, each.age) for each in iteration.synchronizations],
        peak - lasting,
        buckets,
        rounds,
    )


def _launches(training: Training, iteration: Step) -> int:
    """Number of kernels of the optimizer, and of those that onecopy's own lines have launched."""
    reference = training.case.setup is plain
    return sum(
        times
        for (name, where), times in iteration.kernels.items()
        if (where.startswith("onecopy/") and not where.startswith(FORWARD))
        or (reference and name.startswith("_foreach_"))
    )


def _buckets(training: Training, iteration: Step) -> int:
    """Number of buckets of gradients: ShardedDataParallel's own, or DDP's by its reductions."""
    if training.case.setup is level_3:
        storages: list[Any] = [optimizer.engine.storage for optimizer in training.optimizers]
        return sum(len(storage.buckets) for storage in storages)
    reductions = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")
    return sum(each.name in reductions and each.size != VOTE_BYTES for each in iteration.collectives)


def _rounds(training: Training) -> int:
    sharded = [optimizer for optimizer in training.optimizers if hasattr(optimizer, "engine")]
    return 0 if training.case.setup is level_3 else sum(each.engine.sharing.messages for each in sharded)


# Which collectives the compute stream waits for


@dataclasses.dataclass
class Launch:
    """A collective: its name, and its place on the stream of the communicator."""

    name: str
    stream: int
    epoch: int


@contextlib.contextmanager
def noted_launches() -> Iterator[list[Launch]]:
    """Note every collective with its place on its stream."""
    noted: list[Launch] = []

    def note(_: Communicator, name: str, stream: int) -> None:
        noted.append(Launch(name, stream, device.load().scheduler.races.clock(stream)[stream]))

    Communicator.observers.append(note)
    try:
        yield noted
    finally:
        Communicator.observers.remove(note)


def waited_for(launch: Launch) -> bool:
    """Whether the current stream's next kernel is known to come after a collective."""
    loaded = device.load()
    scheduler, current = loaded.scheduler, loaded.core.current_stream()
    with scheduler.lock:
        scheduler._read_log()
        return scheduler.races.clock(current).get(launch.stream, 0) >= launch.epoch
