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
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import MixedPrecision
from onecopy.comm.agreement import VOTE_BYTES
from tests.accelerator import device
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


class PlainAdamW:
    """DDP and torch's own AdamW, behind the names of :class:`ZeroRedundancyOptimizer` that a training uses."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.zero_grad, self.step = optimizer.zero_grad, optimizer.step

    def wait(self) -> None:
        """Do nothing: nothing is in flight after ``step()``."""


def plain(training: Training) -> None:
    """The reference: nothing is sharded."""
    cap = training.case.bucket / (1 << 20)
    training.model = DistributedDataParallel(training.module, process_group=training.place.group, bucket_cap_mb=cap)
    made: Any = PlainAdamW(torch.optim.AdamW(training.module.parameters(), lr=1e-2, foreach=True))
    training.optimizers.append(made)


LEVELS = {
    "DDP, AdamW": Case("DDP, AdamW", plain),
    "level 1": Case("level 1", level_1),
    "level 1 by parameter": Case("level 1 by parameter", level_1, parts=adamw(shard_by="parameter")),
    "level 1 master weights": Case("level 1 master weights", level_1, parts=adamw(master_weights=True), dtype=HALF),
    "level 2": Case("level 2", level_2),
    "level 2 by parameter": Case("level 2 by parameter", level_2, parts=adamw(shard_by="parameter")),
    "after backward": Case("after backward", after_backward),
    "interleaved": Case("interleaved", interleaved),
    "level 3": Case("level 3", level_3),
    "level 3 overlap": Case("level 3 overlap", level_3, wrap=OVERLAP),
    "level 3 bf16": Case(
        "level 3 bf16", level_3, wrap={"mixed_precision": MixedPrecision(param_dtype=HALF), **OVERLAP}
    ),
}


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of one iteration on one rank.

    Attributes:
        calls, operations: collectives, as called and as NCCL would run them.
        by_name: calls by name of the collective.
        bytes: of all collectives.
        launches: kernels that the optimizer, or code of onecopy anywhere, has launched.
        synchronizations: where the host has waited: kind, source line, age in steps.
        peak: device memory beyond the parameters and the state, with memory that other streams keep from being reused.
        buckets: number of DDP's or ShardedDataParallel's buckets.
        rounds: number of all-gathers that share parameters, at levels 1 and 2.
    """

    calls: int
    operations: int
    by_name: dict[str, int]
    bytes: int
    launches: int
    synchronizations: list[tuple[str, str, int]]
    peak: int
    buckets: int
    rounds: int


def count(name: str, blocks: int, bucket: int = BUCKET, host_ahead: int | str = "far") -> Counts:
    """In a worker: train and count the iteration after the warm-up."""
    case = dataclasses.replace(LEVELS[name], model=functools.partial(Blocks, blocks), bucket=bucket)
    place = Place(torch.device("sim", torch.accelerator.current_device_index()), None)
    gc.collect()  # the memory of an earlier training would count as long as nobody has collected it
    # Padded as in proportion a large model is, whose parameters are cut into equal parts.
    with small_sizes(bucket, padding=bucket), device.simulate(seed=dist.get_rank(), host_ahead=host_ahead) as run:
        training = Training(case, place)
        for step in range(WARM_UP):
            with run.step():
                one_pass(training, step)
        with run.step() as iteration, _optimizer_launches(training) as in_step:
            one_pass(training, WARM_UP)
            peak = run.core.memory()[3]
        training.results()
        buckets, rounds = _buckets(training, iteration), _rounds(training)
        training.zero_grad()
        run.collect()
        lasting = run.core.memory()[0]
    assert run.reports == [], run.reports[:3]
    names = [each.name for each in iteration.collectives]
    return Counts(
        len(iteration.collectives),
        iteration.operations,
        {each: names.count(each) for each in sorted(set(names))},
        iteration.collective_bytes,
        sum(in_step),
        [(each.kind, each.site, each.age) for each in iteration.synchronizations],
        peak - lasting,
        buckets,
        rounds,
    )


@contextlib.contextmanager
def _optimizer_launches(training: Training) -> Iterator[list[int]]:
    """Count kernels inside ``step()`` and, outside of it, those that onecopy's own lines have launched."""
    counted: list[int] = []
    kernel = Step.kernel
    inside = [False]

    def counting(self: Step, name: str, where: str, tensors: int = 0) -> None:
        before = self.batched_launches
        kernel(self, name, where, tensors)
        if inside[0] or (where.startswith("onecopy/") and not where.startswith(FORWARD)):
            counted.append(self.batched_launches - before or 1)

    def wrap(call: Callable[[], Any]) -> Callable[[], Any]:
        def inside_step() -> Any:
            inside[0] = True
            try:
                return call()
            finally:
                inside[0] = False

        return inside_step

    originals = [optimizer.step for optimizer in training.optimizers]
    for optimizer in training.optimizers:
        setattr(optimizer, "step", wrap(optimizer.step))  # noqa: B010
    Step.kernel = counting  # type: ignore[method-assign]
    try:
        yield counted
    finally:
        Step.kernel = kernel  # type: ignore[method-assign]
        for optimizer, original in zip(training.optimizers, originals, strict=True):
            setattr(optimizer, "step", original)  # noqa: B010


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
    launch = Communicator._launch

    def noting(self: Communicator, kept: Any, calls: Any, peer: int | None = None) -> int:
        name = calls[0].name
        stream = launch(self, kept, calls, peer)
        noted.append(Launch(name, stream, device.load().scheduler.races.clock(stream)[stream]))
        return stream

    Communicator._launch = noting  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        Communicator._launch = launch  # type: ignore[method-assign]


def waited_for(launch: Launch) -> bool:
    """Whether the current stream's next kernel is known to come after a collective."""
    loaded = device.load()
    scheduler, current = loaded.scheduler, loaded.core.current_stream()
    with scheduler.lock:
        scheduler._read_log()
        return scheduler.races.clock(current).get(launch.stream, 0) >= launch.epoch


def first_module(model: nn.Module) -> nn.Module:
    first: nn.Module = model.get_submodule("first")
    return first
