"""Training programs that run on the CPU with gloo and on the simulated accelerator: models, places, set-ups, a case."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import (
    ReduceScatter,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.comm import collectives, limits
from onecopy.step import batched_copies

IN, WIDTH, HIDDEN, OUT = 8, 16, 48, 4
BUCKET = 6000
"""Bytes from which a bucket is full, and of one round of all-gathers: every model here has several."""

PASSES = 24
"""Number of batches that each rank has, on the device before training begins: a copy would make the host wait."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}
ROUNDING = 2e-6
"""More than two ranks, or another order of additions."""


# Places


@dataclass(frozen=True)
class Place:
    """Where a program runs: the device of the model, and the ranks (None for the default group)."""

    device: torch.device
    group: Any

    @property
    def simulated(self) -> bool:
        return self.device.type != "cpu"

    def mesh(self, *shape: int) -> DeviceMesh:
        """A mesh of (replicate, shard)."""
        names = ("replicate", "shard")
        if self.simulated:
            return init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        table = torch.arange(dist.get_world_size()).view(shape)
        groups = []
        for rows in (table.t(), table):
            made = {tuple(row): dist.new_group(row, backend="gloo") for row in rows.tolist()}
            groups.append(next(group for row, group in made.items() if dist.get_rank() in row))
        return DeviceMesh.from_group(groups, "cpu", mesh=table, mesh_dim_names=names)


def on_device() -> Place:
    """This rank's simulated accelerator, and the default group."""
    return Place(torch.device("sim", torch.accelerator.current_device_index()), None)


@contextlib.contextmanager
def small_sizes(
    bucket: int = BUCKET, padding: int = 64, batch: int = 1 << 24, averages: bool = False
) -> Iterator[None]:
    """Make a tiny model be treated as a large one: several rounds, segments and buckets are on their way at once.

    Args:
        bucket: bytes of a bucket and of a round of all-gathers.
        padding: bytes per rank up to which parts of different lengths are padded.
        batch: elements that are copied to or from the host at once.
        averages: whether the backend can average, as NCCL can.
    """
    sizes: dict[str, Any] = {
        "COLLECTIVE_BUCKET_BYTES": bucket,
        "COLLECTIVE_BUCKET_BYTES_PER_RANK": 64,
        "SEGMENT_GROWTH": 0,
    }
    averaging = {"simccl"} if averages else collectives.AVERAGING_BACKENDS
    with (
        mock.patch.multiple(limits, PADDING_BYTES_PER_RANK=padding, **sizes),
        mock.patch.object(batched_copies, "BATCH", batch),
        mock.patch.object(collectives, "AVERAGING_BACKENDS", averaging),
    ):
        yield


# Models


class Block(nn.Module):
    """A residual block of two layers behind a norm."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs + self.down(torch.tanh(self.up(self.norm(inputs))))
        return outputs


class Blocks(nn.Module):
    """A few blocks between two layers."""

    def __init__(self, number: int = 3, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.blocks = nn.ModuleList([Block(norm) for _ in range(number)])
        self.last = nn.Linear(WIDTH, OUT)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(
            functools.reduce(lambda hidden, block: block(hidden), self.blocks, self.first(inputs))
        )
        return outputs


class Partial(nn.Module):
    """A frozen layer, a layer that is never used, and one that rank 0 uses in every other forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.block = Block()
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUT)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.block(torch.tanh(self.frozen(self.first(inputs))))
        self.passes += 1
        if dist.get_rank() == 0 and self.passes % 2:
            hidden = hidden + self.sometimes(hidden)
        outputs: Tensor = self.last(hidden)
        return outputs


class TwoStreams(nn.Module):
    """Two layers, in one bucket, that run beside each other on streams of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(IN, WIDTH)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, OUT)
        self._streams: list[torch.Stream] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, sides = torch.tanh(self.first(inputs)), []
        if hidden.device.type == "cpu":
            sides = [self.left(hidden), self.right(hidden)]
        else:
            self._streams = self._streams or [torch.Stream(hidden.device) for _ in range(2)]
            main = torch.accelerator.current_stream()
            for stream, layer in zip(self._streams, (self.left, self.right), strict=True):
                stream.wait_stream(main)
                with stream:
                    hidden.record_stream(stream)
                    sides.append(layer(hidden))
            for stream, side in zip(self._streams, sides, strict=True):
                main.wait_stream(stream)
                side.record_stream(main)
        outputs: Tensor = self.last(sides[0] + sides[1])
        return outputs


class OneAfterAnother(TwoStreams):
    """The layers of :class:`TwoStreams` in a row, on the current stream."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.right(self.left(torch.tanh(self.first(inputs)))))
        return outputs


def half_frozen(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model whose layer ``right`` is frozen at first, and whose first bucket is complete when ``left`` is."""

    def make() -> nn.Module:
        made = model()
        made.add_module("left", made._modules.pop("left"))
        made.get_submodule("right").requires_grad_(False)
        return made

    return make


# Optimizers


@dataclass(frozen=True)
class Part:
    """One optimizer: its class and options, and which parameters it has."""

    optimizer: type[Optimizer]
    options: dict[str, Any]
    chosen: Callable[[Tensor], bool] = lambda _: True


def adamw(**ours: Any) -> tuple[Part, ...]:
    return (Part(torch.optim.AdamW, {**ADAMW, **ours}),)


MUON = (
    Part(torch.optim.Muon, {"lr": 1e-2}, lambda param: param.dim() == 2),
    Part(torch.optim.AdamW, {"lr": 1e-3, "foreach": True}, lambda param: param.dim() != 2),
)
"""One optimizer that needs whole parameters, and one for the others."""


# Set-ups: what wraps the module


class Training:
    """A model with its optimizers at a place, this rank's batches, and tensors that the program has noted."""

    def __init__(self, case: Case, place: Place) -> None:
        self.case, self.place = case, place
        torch.manual_seed(5)
        self.module = case.model().to(case.dtype).to(place.device)
        self.scaler: Any = None
        self.noted: list[Tensor] = []
        drawn = torch.randn(PASSES, 3, IN, generator=torch.Generator().manual_seed(17 + dist.get_rank()))
        self.batches = list(drawn.to(case.dtype).to(place.device).unbind())
        self.model: Any = None
        self.optimizers: list[ZeroRedundancyOptimizer] = []
        case.setup(self)

    @property
    def optimizer(self) -> ZeroRedundancyOptimizer:
        (optimizer,) = self.optimizers
        return optimizer

    def add_optimizers(self, **ours: Any) -> None:
        for part in self.case.parts:
            params = list(filter(part.chosen, self.module.parameters()))
            options = {"process_group": self.place.group, **ours, **part.options}
            self.optimizers.append(ZeroRedundancyOptimizer(params, part.optimizer, **options))

    def one_or_all(self) -> Any:
        """The optimizer, or the list of several."""
        return self.optimizers[0] if len(self.optimizers) == 1 else self.optimizers

    def loss(self, number: int) -> Tensor:
        """This rank's loss for one of its batches."""
        value: Tensor = self.model(self.batches[number % PASSES]).float().square().mean()
        return value

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def note(self, *tensors: Tensor) -> None:
        """Remember tensors, without making the host wait."""
        self.noted += [tensor.detach().clone() for tensor in tensors]

    def results(self) -> list[Tensor]:
        """The noted tensors, what this rank's optimizers step, the parameters and the buffers, on the CPU."""
        for optimizer in self.optimizers:
            optimizer.wait()
        groups = [group for each in self.optimizers for group in each.optim.param_groups]
        stepped = [tensor for group in groups for tensor in group["params"]]
        found = (*self.noted, *stepped, *self.module.state_dict().values())
        return [tensor.detach().cpu().clone() for tensor in found]


def ddp(training: Training) -> DistributedDataParallel:
    size = training.case.bucket / (1 << 20)
    return DistributedDataParallel(
        training.module, bucket_cap_mb=size, process_group=training.place.group, **training.case.wrap
    )


def level_1(training: Training) -> None:
    training.model = ddp(training)
    training.add_optimizers()


def level_2(training: Training) -> None:
    level_1(training)
    training.model.register_comm_hook(training.one_or_all(), reduce_scatter_hook)


def sent_as_fp16(training: Training) -> None:
    level_1(training)
    training.model.register_comm_hook(ReduceScatter(training.optimizer, torch.float16), reduce_scatter_hook)


def after_backward(training: Training, make_hook: Callable[..., Any] = hook_with_zero_step) -> None:
    training.model = ddp(training)
    training.add_optimizers(overlap_with_ddp=True)
    hook = make_hook(allreduce_hook, training.model, training.optimizer)
    training.model.register_comm_hook(training.model.process_group, hook)


def interleaved(training: Training) -> None:
    after_backward(training, hook_with_zero_step_interleaved)


def level_3(training: Training) -> None:
    options = {"bucket_bytes": training.case.bucket, **training.case.wrap}
    if "mesh" in options:
        options["mesh"] = training.place.mesh(*options["mesh"])
        training.add_optimizers(process_group=options["mesh"].get_group(1))
    else:
        training.add_optimizers()
    training.model = ShardedDataParallel(training.module, training.one_or_all(), **options)


# Cases


def one_pass(training: Training, step: int) -> None:
    """An ordinary iteration."""
    training.zero_grad()
    training.loss(step).backward()
    training.step()


def loop(iterate: Callable[[Training, int], None] = one_pass, steps: int = 5) -> Callable[[Training], None]:
    """A program that iterates."""

    def program(training: Training) -> None:
        for step in range(steps):
            iterate(training, step)

    return program


@dataclass(frozen=True)
class Case:
    """A training program."""

    name: str  # how the test is called
    setup: Callable[[Training], None]  # wraps the module and makes the optimizers
    program: Callable[[Training], None] = field(default_factory=lambda: loop())  # trains
    _: KW_ONLY
    model: Callable[[], nn.Module] = Blocks
    dtype: torch.dtype = torch.float32  # of the module and its inputs
    parts: Sequence[Part] = field(default_factory=lambda: adamw())  # the optimizers
    wrap: dict[str, Any] = field(default_factory=dict)  # options of DDP or ShardedDataParallel
    bucket: int = BUCKET  # bytes of a bucket
    worlds: tuple[int, ...] = (2, 3)  # numbers of ranks
    tolerance: float = 0.0  # how far two ranks may differ from the CPU; more may differ by ``ROUNDING`` at least
    averages: bool = False  # whether the backend can average, as NCCL can

    def run(self, place: Place) -> list[Tensor]:
        """Train at a place and return this rank's results on the CPU."""
        with small_sizes(self.bucket, batch=1000, averages=self.averages):
            training = Training(self, place)
            self.program(training)
            return training.results()
