"""``ShardedDataParallel`` trains like DDP with the plain optimizer: all optimizers, overlapped sharing, a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from harness import EVERYTHING, distributed
from models import Everything, assert_equal, assert_replicas_equal, everything_inputs, values
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm import limits
from test_parity import CASES, Case, Run, compare, make_plain, switch_mode

Model = ShardedDataParallel | DistributedDataParallel
Hook = Callable[[Any, Any], Future[Tensor]]

ROUNDING = 2e-6
"""More than two ranks, or several reductions that DDP adds up in another order."""

SMALL = 4000
"""A size of buckets, in bytes, with which every model here has several."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


# Both ways to train a model


def little_room(patch: pytest.MonkeyPatch) -> None:
    """Make messages short, and the room in which they are received so small that they take turns."""
    patch.setattr(limits, "SHORTEST_BYTES", 64)
    patch.setattr(limits, "LONGEST_BYTES", 256)
    patch.setattr(limits, "STAGED_BYTES", 600)


@contextlib.contextmanager
def as_if_large() -> Iterator[None]:
    """Make a tiny model be treated as a large one.

    Every bucket is updated and sent on its own, so that several are on their way at once; all but the smallest
    gradients are sent from where they are, the longer ones in several messages, for which there is little room.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "SEGMENT_BYTES", 1)
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        little_room(patch)
        yield


class Side:
    """A model and its optimizers, ours or the reference, made from the same seed."""

    def __init__(
        self,
        ours: bool,
        make: Callable[[], nn.Module],
        optimizer: type[Optimizer] = torch.optim.SGD,
        options: dict[str, Any] | None = None,
        group: Any = None,
        **wrap: Any,
    ) -> None:
        torch.manual_seed(5)
        self.ours = ours
        self.module = make()
        self.noted: list[Tensor] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.scheduler: LRScheduler | None = None
        self.model: Model
        self.optimizer: Optimizer
        if ours:
            self.optimizer = ZeroRedundancyOptimizer(
                self.module.parameters(), optimizer, process_group=group, **(options or SGD)
            )
            self.model = ShardedDataParallel(self.module, self.optimizer, **{"bucket_bytes": SMALL, **wrap})
        else:
            unused = any("never" in name for name, _ in self.module.named_modules())
            self.model = DistributedDataParallel(self.module, process_group=group, find_unused_parameters=unused)
            self.optimizer = optimizer(self.module.parameters(), **(options or SGD))

    @property
    def sharded(self) -> ShardedDataParallel:
        assert isinstance(self.model, ShardedDataParallel)
        return self.model

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        assert isinstance(self.optimizer, ZeroRedundancyOptimizer)
        return self.optimizer

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


# The table of optimizers


def zero_all(model: Model, params: Sequence[Tensor], optimizers: Sequence[Optimizer], step: int) -> None:
    """Let go of the gradients, in another way in every step."""
    if step % 4 == 0:
        model.zero_grad()
    elif step % 4 == 1:
        for optimizer in optimizers:
            optimizer.zero_grad()
    elif step % 4 == 2:
        model.module.zero_grad()
    else:
        for param in params:
            param.grad = None


def train(case: Case, steps: int, ours: bool, overlap: bool = False, hook: Hook | None = None) -> Run:
    """Train the model that has everything, from the same weights and on the same data every time."""
    torch.manual_seed(11)
    module = Everything()
    params: list[Tensor] = list(module.parameters())
    matrices = [param for param in params if param.dim() == 2]
    others = [param for param in params if param.dim() != 2]

    def make(params: list[Tensor], optimizer: type[Optimizer], options: dict[str, Any]) -> Optimizer:
        return ZeroRedundancyOptimizer(params, optimizer, elementwise=case.elementwise, **options)

    model: Model
    optimizers: list[Optimizer] = []
    parts = [(params, case.optimizer, case.options)]
    if case.rest is not None:
        parts = [(matrices, case.optimizer, case.options), (others, *case.rest)]
    if ours:
        zeros = [optimizer for part in parts if isinstance(optimizer := make(*part), ZeroRedundancyOptimizer)]
        model = ShardedDataParallel(module, zeros, bucket_bytes=SMALL, overlap_forward=overlap)
        optimizers += zeros
    else:
        model = DistributedDataParallel(module, find_unused_parameters=True)
        if hook is not None:
            # A lambda, because DDP compares annotations, which are strings here.
            model.register_comm_hook(None, lambda state, bucket: hook(state, bucket))
        optimizers += [make_plain(*part) for part in parts]
    history = []
    switch_mode(case, optimizers, "train")
    for step in range(steps):
        if step == steps // 2:
            module.frozen_later.weight.requires_grad_(False)
            switch_mode(case, optimizers, "eval")
            switch_mode(case, optimizers, "train")
        words, targets, take_branch = everything_inputs(dist.get_rank(), step)
        functional.cross_entropy(model(words, take_branch), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        zero_all(model, params, optimizers, step)
        if not overlap:
            history.append(values(params))
        elif step == steps - 1:
            history.append(values(model.parameters()))
    switch_mode(case, optimizers, "eval")
    return Run(history, values(model.parameters()), optimizers)


def in_rank_order(group: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook for DDP that adds gradients up in the order of ranks, whose result does not depend on the backend."""
    mine = bucket.buffer()
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    for row in rows[1:]:
        rows[0].add_(row)
    done: Future[Tensor] = Future()
    done.set_result(rows[0].mul_(1.0 / dist.get_world_size()))
    return done


PLACED = tuple((case, place % 2 == 0) for place, case in enumerate(CASES))
"""Every case, and whether it shares behind the next forward with two ranks."""

FEWER = PLACED if EVERYTHING else PLACED[1::6]


@pytest.mark.parametrize(("case", "overlap"), PLACED, ids=[case.name for case in CASES])
@distributed(2)
def test_training_equals_ddp_with_the_plain_optimizer(world_size: int, case: Case, overlap: bool) -> None:
    """20 steps (or 50) with two ranks, bit by bit."""
    compare_runs(case, 50 if EVERYTHING else 20, overlap, in_order=False, tolerance=0.0)


@pytest.mark.parametrize(("case", "overlap"), FEWER, ids=[case.name for case, _ in FEWER])
@distributed(3)
def test_training_with_three_ranks(world_size: int, case: Case, overlap: bool) -> None:
    """10 steps (or 50), against DDP with gradients added up in the same order: bit by bit."""
    compare_runs(case, 50 if EVERYTHING else 10, not overlap, in_order=True, tolerance=0.0)


@pytest.mark.parametrize(
    ("case", "in_order"),
    [*((case, True) for case in (CASES if EVERYTHING else CASES[::5])), *((case, False) for case in CASES[:5])],
    ids=lambda value: getattr(value, "name", "in order" if value else "plain"),
)
@distributed(4)
def test_training_with_four_ranks(world_size: int, case: Case, in_order: bool) -> None:
    """10 steps (or 50): bit by bit if DDP adds up in the same order; 10 within rounding if it adds up in its own."""
    steps = 50 if EVERYTHING and in_order else 10
    compare_runs(case, steps, overlap=not in_order, in_order=in_order, tolerance=0.0 if in_order else case.tolerance)


def compare_runs(case: Case, steps: int, overlap: bool, in_order: bool, tolerance: float) -> None:
    plain = train(case, steps, ours=False, hook=in_rank_order if in_order else None)
    assert not torch.equal(plain.steps[0][0], plain.steps[-1][0]), "the reference does not train"
    with as_if_large():
        ours = train(case, steps, ours=True, overlap=overlap)
    first = ours.optimizers[0]
    assert isinstance(first, ZeroRedundancyOptimizer)
    assert bool(first.layout.cut_params) == case.cuts, f"cut parameters are {first.layout.cut_params}"
    if overlap:
        plain = Run(plain.steps[-1:], plain.evaluation, plain.optimizers)
    compare(ours, plain, f"{case.name}, overlap_forward={overlap}", tolerance)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("set_to_none", [True, False])
@distributed(2)
def test_gradients_are_let_go_alike(world_size: int, optimizer: type[Optimizer], set_to_none: bool) -> None:
    """Zeros left behind are stepped on (momentum, decay), None is not; the branch is taken in every other step."""
    plain, ours = (Side(which, Everything, optimizer, {"lr": 1e-2, "weight_decay": 0.1}) for which in (False, True))
    for step in range(8):
        for side in (plain, ours):
            for who in (side.optimizer, side.model, side.module):
                who.zero_grad(set_to_none)
            words, targets, take_branch = everything_inputs(dist.get_rank(), step)
            functional.cross_entropy(side.model(words, take_branch), targets).backward()
            side.optimizer.step()
        assert_equal(ours.params, plain.params, f"step {step}")
    have = [[param.grad is not None for param in side.params] for side in (plain, ours)]
    assert have[0] == have[1]
    assert have[0].count(False) == (4 if set_to_none else 2), "the branch, and what is never used"


# Sharing behind the next forward


class Layers(nn.Module):
    """A few linear layers; one of them is run, or has its weight read by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(inputs)))))
        return outputs


class Borrower(nn.Module):
    """Runs its own layer, and reads the weight of another one that has not run yet."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self._other = [other]

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(self.own(inputs), self._other[0].weight[:8, :8])


class Borrowing(nn.Module):
    """The first module to run reads the weight of the last one."""

    def __init__(self, layer_runs: bool = True) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 64, bias=False)  # first, and so in the last bucket
        self.layers = Layers()
        self.borrower = Borrower(self.extra)
        self.layer_runs = layer_runs

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(self.borrower(inputs))
        outputs: Tensor = self.extra(hidden) if self.layer_runs else hidden
        return outputs


def borrowing_unrun() -> Borrowing:
    return Borrowing(layer_runs=False)


class Attention(nn.Module):
    """Modules of torch that read their children's parameters themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs).unsqueeze(0)
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        outputs: Tensor = self.out(self.encoder(hidden))
        return outputs


class Counted(nn.Module):
    """A parameter of its own beside children, and one submodule that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layers = Layers()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(self.layers(inputs * self.scale))
        return outputs


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def one_step(side: Side, step: int) -> None:
    side.optimizer.zero_grad()
    side.model(inputs_of(dist.get_rank(), step)).square().mean().backward()
    side.optimizer.step()


def several_steps(side: Side) -> None:
    for step in range(6):
        one_step(side, step)


OVERLAPPED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "layers": (Layers, {}),
    "a parameter beside children": (Counted, {}),
    "attention": (Attention, {}),
    "a layer that is read and not run": (borrowing_unrun, {}),
    "uses names a parameter": (Borrowing, {"uses": {"borrower": ["extra.weight"]}}),
    "uses names a submodule": (Borrowing, {"uses": {"borrower": ["extra"], "": ["layers.first.bias"]}}),
}


@pytest.mark.parametrize("case", OVERLAPPED)
@distributed(2, 3)
def test_overlapped_sharing_trains_alike(world_size: int, case: str) -> None:
    make, options = OVERLAPPED[case]
    with as_if_large():
        plain, ours = Side(False, make, torch.optim.SGD), Side(True, make, overlap_forward=True, **options)
        for step in range(12):
            for side in (plain, ours):
                one_step(side, step)
        tolerance = 0.0 if world_size == 2 else ROUNDING
        assert_equal(ours.params, plain.params, case, tolerance)
        assert_replicas_equal(ours.params)


@pytest.mark.parametrize("reader", ["parameters", "state_dict", "module.state_dict", "eval", "train", "wait", "zero"])
@distributed(2, 3)
def test_reading_parameters_waits_for_them(world_size: int, reader: str) -> None:
    read: dict[str, Callable[[Side], object]] = {
        "parameters": lambda side: list(side.model.parameters()),
        "state_dict": lambda side: side.model.state_dict(),
        "module.state_dict": lambda side: side.module.state_dict(),
        "eval": lambda side: side.model.eval(),
        "train": lambda side: side.model.train(),
        "wait": lambda side: side.sharded.wait(),
        "zero": lambda side: side.zero.wait(),
    }
    plain, ours = Side(False, Layers, torch.optim.SGD), Side(True, Layers, overlap_forward=True)
    for step in range(3):
        one_step(plain, step)
        one_step(ours, step)
        pipelines = [each for _, each in ours.sharded._pipelines]
        assert any(each.in_flight for each in pipelines), "nothing was under way"
        read[reader](ours)
        assert not any(each.in_flight for each in pipelines)
        assert_equal(ours.module.parameters(), plain.params, reader, 0.0 if world_size == 2 else ROUNDING)


@distributed(2, 3)
def test_a_value_read_before_it_arrived_is_noticed(world_size: int) -> None:
    """Nothing says that the borrower reads another's weight: autograd has saved a value that then changed."""
    with as_if_large():
        ours = Side(True, Borrowing, overlap_forward=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            several_steps(ours)


@distributed(2)
def test_evaluation_between_overlapped_steps(world_size: int) -> None:
    """A forward pass without gradients also waits, and does not disturb what comes after it."""
    with as_if_large():
        plain, ours = Side(False, Attention), Side(True, Attention, overlap_forward=True)
        for step in range(6):
            for side in (plain, ours):
                one_step(side, step)
            with torch.no_grad():
                mine, theirs = (side.model(inputs_of(0, 99)) for side in (ours, plain))
            assert torch.equal(mine, theirs)
        assert_equal(ours.params, plain.params, "parameters")


def different_layers() -> nn.Module:
    """The seeded values on rank 0, others elsewhere."""
    model = Layers()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(float(dist.get_rank()))
    return model
