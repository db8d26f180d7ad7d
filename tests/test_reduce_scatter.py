"""The reduce-scatter hook: owners get their gradients, ``step()`` updates, and training equals plain DDP."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

import onecopy
from harness import distributed
from models import assert_equal, assert_replicas_equal, assert_same_tree, small_inputs, small_loss, small_model
from onecopy import ReduceScatter, ZeroRedundancyOptimizer, reduce_scatter_hook
from onecopy.comm import limits
from test_data_parallel import little_room

ROUNDING = 1e-6
"""More than two ranks, or another collective: the order in which gradients are added differs."""

TINY = 1e-5
"""A limit for DDP's buckets, in MiB, that gives every parameter one of its own."""

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
SGD: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
ELEMENT: dict[str, Any] = {"shard_by": "element"}
BUCKETS: dict[str, Any] = {"parameters_as_bucket_view": True}


# Models, optimizers, inputs


class Branching(nn.Module):
    """A branch that is never used, one that is used at will, and a layer that can be frozen without a loss of path."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 160)
        self.middle = nn.Linear(160, 16)
        self.sometimes = nn.Linear(160, 4)
        self.never = nn.Linear(8, 4)
        self.last = nn.Linear(16, 4)

    def forward(self, inputs: Tensor, take_branch: bool) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        outputs: Tensor = self.last(torch.tanh(self.middle(hidden)))
        return outputs + self.sometimes(hidden) if take_branch else outputs


def branching_loss(model: nn.Module, step: int) -> Tensor:
    """Rank 0 alone takes the branch, in every other step."""
    rank = dist.get_rank()
    loss: Tensor = model(small_inputs(rank, step), rank == 0 and step % 2 == 0).square().mean()
    return loss


def double_model() -> nn.Module:
    return small_model().double()


def double_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).double()).square().mean()
    return loss


def half_model() -> nn.Module:
    return small_model().to(torch.bfloat16)


def half_loss(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(small_inputs(dist.get_rank(), step).bfloat16()).square().mean()
    return loss


class Counting(Optimizer):
    """Gradient descent that counts: updates of a parameter in its state, its own steps in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["updates"] = self.state[param].get("updates", 0) + 1
                    param.add_(param.grad, alpha=-group["lr"])


@dataclass(frozen=True)
class Part:
    """One optimizer of a model: its class and options, what the sharded one gets on top, and its parameters."""

    optimizer: type[Optimizer] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    ours: dict[str, Any] = field(default_factory=lambda: dict(ELEMENT))
    params: Callable[[nn.Module], Iterable[Any]] = nn.Module.parameters


def matrices(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() == 2]


def vectors(model: nn.Module) -> list[Tensor]:
    return [param for param in model.parameters() if param.dim() < 2]


MUON_AND_ADAMW = (
    Part(torch.optim.Muon, {"lr": 1e-2}, {}, matrices),
    Part(torch.optim.AdamW, ADAMW, ELEMENT, vectors),
)

TWO_ADAMWS = (Part(params=matrices), Part(params=vectors, options={"lr": 1e-3}))


@dataclass(frozen=True)
class Case:
    """How to train.

    Attributes:
        name: how the test is called.
        parts: the optimizers.
        ddp: options of DDP.
        model: makes the model.
        loss: this rank's loss in one pass.
        passes: backward passes per step; all but the last are inside ``no_sync()``.
        scheduled: whether schedulers halve the learning rates.
        set_to_none: how gradients are reset.
        tolerance: how far more than two ranks may differ from the reference.
    """

    name: str = ""
    parts: tuple[Part, ...] = (Part(),)
    ddp: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": TINY})
    model: Callable[[], nn.Module] = small_model
    loss: Callable[[nn.Module, int], Tensor] = small_loss
    passes: int = 1
    scheduled: bool = False
    set_to_none: bool = True
    tolerance: float = ROUNDING


class Run:
    """A model under DDP and its optimizers."""

    def __init__(self, case: Case, ddp: DistributedDataParallel, optimizers: list[Optimizer]) -> None:
        self.case = case
        self.ddp = ddp
        self.optimizers = optimizers
        self.schedulers: list[LRScheduler] = (
            [StepLR(optimizer, step_size=2, gamma=0.5) for optimizer in optimizers] if case.scheduled else []
        )

    @property
    def params(self) -> list[Tensor]:
        return list(self.ddp.parameters())

    @property
    def zeros(self) -> list[ZeroRedundancyOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]

    @property
    def zero(self) -> ZeroRedundancyOptimizer:
        (zero,) = self.zeros
        return zero

    def backward(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(self.case.set_to_none)
        *accumulated, last = range(step * self.case.passes, (step + 1) * self.case.passes)
        with self.ddp.no_sync():
            for number in accumulated:
                self.case.loss(self.ddp, number).backward()
        self.case.loss(self.ddp, last).backward()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def iterate(self, step: int) -> None:
        self.backward(step)
        self.update()


def make_ddp(case: Case, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(5)
    return DistributedDataParallel(case.model(), **{**case.ddp, **options})


def plain_run(case: Case, **ddp_options: Any) -> Run:
    """The reference: plain DDP, the plain optimizers."""
    ddp = make_ddp(case, **ddp_options)
    return Run(case, ddp, [part.optimizer(part.params(ddp.module), **part.options) for part in case.parts])


def scattered_run(case: Case, reduce_dtype: torch.dtype | None = None, **ddp_options: Any) -> Run:
    """The same through the hook: with one optimizer, a list of them, or a :class:`ReduceScatter` as its state."""
    ddp = make_ddp(case, **ddp_options)
    zeros = [
        ZeroRedundancyOptimizer(
            part.params(ddp.module), part.optimizer, process_group=ddp.process_group, **part.ours, **part.options
        )
        for part in case.parts
    ]
    state: Any = zeros[0] if len(zeros) == 1 else zeros
    if reduce_dtype is not None or "process_group" in ddp_options:
        state = ReduceScatter(state, reduce_dtype=reduce_dtype, ddp=ddp)
    ddp.register_comm_hook(state, reduce_scatter_hook)
    return Run(case, ddp, [*zeros])


def tolerance_of(case: Case) -> float:
    return 0.0 if dist.get_world_size() <= 2 else case.tolerance


def assert_same_values(ours: Run, reference: Run, what: str) -> None:
    assert_equal(ours.params, reference.params, what, tolerance_of(ours.case))


def assert_same_state(ours: Run, reference: Run) -> None:
    """The consolidated states are the plain optimizers'."""
    for zero, plain in zip(ours.zeros, reference.optimizers, strict=True):
        zero.consolidate_state_dict(to=0)
        if zero.rank == 0:
            assert_same_tree(zero.state_dict(), plain.state_dict(), "state", tolerance_of(ours.case))


def train_both(ours: Run, reference: Run, steps: Iterable[int]) -> None:
    """Iterate both; they are equal after every iteration."""
    for step in steps:
        reference.iterate(step)
        ours.iterate(step)
        assert_same_values(ours, reference, f"iteration {step}")


def assert_parity(case: Case, iterations: int = 5) -> None:
    """Equal to plain DDP after every iteration; state and replicas are equal.

    All but the smallest stretches are sent from where they are, the longer ones in several messages, as in a model
    that is large. There is little room to receive them.
    """
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 200)
        patch.setattr(limits, "CHUNK_BYTES", 256)
        little_room(patch)
        train_both(ours, reference, range(iterations))
    assert_replicas_equal(ours.params)
    assert_same_state(ours, reference)


# Parity


UNUSED: dict[str, Any] = {
    "model": Branching,
    "loss": branching_loss,
    "ddp": {"find_unused_parameters": True, "bucket_cap_mb": TINY},
}
VIEW: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": TINY}

CASES = (
    Case("cut"),
    Case("cut, default buckets", ddp={}),
    Case("cut, in buckets", (Part(ours={**ELEMENT, **BUCKETS}),)),
    Case("cut, in buckets, gradients are views", (Part(ours={**ELEMENT, **BUCKETS}),), VIEW),
    Case("whole", (Part(ours={}),)),
    Case("whole, in buckets", (Part(torch.optim.SGD, SGD, BUCKETS),)),
    Case("whole, gradients are views", (Part(torch.optim.SGD, SGD, {}),), VIEW),
    Case("gradients are views, set to zero", ddp=VIEW, set_to_none=False),
    Case("fused", (Part(options={**ADAMW, "fused": True}),), scheduled=True),
    Case("static graph", ddp={"static_graph": True, "bucket_cap_mb": TINY}),
    Case("a list", MUON_AND_ADAMW, tolerance=1e-3),
    Case("a list, gradients are views", MUON_AND_ADAMW, VIEW, scheduled=True, tolerance=1e-3),
    Case("a list, all in one bucket", TWO_ADAMWS, {}),
    Case("some parameters are nobody's", (Part(params=matrices),)),
    Case("some parameters are nobody's, in one bucket", (Part(params=matrices),), {}),
    Case("unused parameters", **UNUSED),
    Case("unused parameters, whole", (Part(ours={}),), **UNUSED),
    Case("unused parameters, set to zero", **UNUSED, set_to_none=False),
    Case("accumulation", passes=3),
    Case("accumulation in bucket views", ddp=VIEW, passes=3),
    Case("accumulation, in one bucket, whole", (Part(ours={}),), ddp={}, passes=2),
    Case("accumulation with unused parameters", **UNUSED, passes=3),
    Case("double precision", model=double_model, loss=double_loss),
    Case("half precision", model=half_model, loss=half_loss, tolerance=2e-2),
    Case("counters", (Part(Counting, {"lr": 0.1}, {**ELEMENT, "elementwise": True}),)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(2)
def test_training_equals_plain_ddp(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case.name)
@distributed(3)
def test_three_ranks_equal_plain_ddp_within_rounding(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize("case", [Case("a list", TWO_ADAMWS), Case("unused", **UNUSED)], ids=lambda case: case.name)
@distributed(1, 4)
def test_one_and_four_ranks_equal_plain_ddp(world_size: int, case: Case) -> None:
    assert_parity(case)


@pytest.mark.parametrize(
    "case",
    [Case("cut"), Case("whole", (Part(ours={}),)), Case("a list", TWO_ADAMWS, {}), Case("unused", **UNUSED)],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_the_collective_of_other_backends_gives_the_same_within_rounding(world_size: int, case: Case) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    for zero in ours.zeros:
        zero.engine.collectives.is_pairwise = False
    for step in range(5):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)
    assert_replicas_equal(ours.params)


@distributed(4)
def test_a_subgroup_whose_ranks_are_numbered_otherwise_equals_plain_ddp(world_size: int) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    case = Case(parts=TWO_ADAMWS)
    ours, reference = scattered_run(case, process_group=group), plain_run(case, process_group=group)
    for step in range(4):
        reference.iterate(step)
        ours.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}")


@pytest.mark.parametrize("direct_bytes", [16, 1 << 18], ids=["large", "small"])
@distributed(2, 3)
def test_around_a_hook_that_compresses_buckets_gradients_are_scaled_once(world_size: int, direct_bytes: int) -> None:
    """torch's wrapper gives the hook a float16 buffer of float32 gradients."""
    case = Case("one")
    reference, compressed = plain_run(case), make_ddp(case)
    zero = ZeroRedundancyOptimizer(compressed.parameters(), torch.optim.SGD, lr=0.1)
    compressed.register_comm_hook(zero, fp16_compress_wrapper(reduce_scatter_hook))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", direct_bytes)
        small_loss(compressed, 0).backward()
    reference.backward(0)
    for param, plain in zip(zero.engine.params, reference.params, strict=True):
        shards = [shard for shard in zero.engine.layout.shards if zero.engine.params[shard.param] is param]
        for shard in shards:
            if shard.owner == zero.rank:
                assert param.grad is not None
                assert plain.grad is not None
                own, mean = (each.flatten()[shard.start : shard.stop] for each in (param.grad, plain.grad))
                torch.testing.assert_close(own, mean, rtol=5e-3, atol=1e-4)


@distributed(3)
def test_a_narrow_type_rounds_every_rank_once_whoever_owns_the_range(world_size: int) -> None:
    case = Case("one")
    run = scattered_run(case, reduce_dtype=torch.bfloat16)
    local = [grad.clone() for grad in torch.autograd.grad(small_loss(run.ddp.module, 0), run.params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 16)
        run.backward(0)
    checked = 0
    for shard in run.zero.engine.layout.shards:
        gradient = local[shard.param].flatten()[shard.start : shard.stop]
        rows = [torch.empty_like(gradient) for _ in range(world_size)]
        dist.all_gather(rows, gradient.clone())
        if shard.owner == run.zero.rank:
            sent = [row if rank == shard.owner else row.bfloat16().float() for rank, row in enumerate(rows)]
            expected = (sent[0] + sent[1] + sent[2]) / 3
            found = run.zero.engine.params[shard.param].grad
            assert found is not None
            torch.testing.assert_close(found.flatten()[shard.start : shard.stop], expected, rtol=1e-6, atol=1e-9)
            checked += shard.numel
    assert checked


@distributed(4)
def test_a_hook_that_cannot_see_which_ranks_ddp_is_on_is_refused(world_size: int) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (0, 2):
        return
    model = torch.nn.Linear(4, 4)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    with pytest.raises(ValueError, match=r"register ReduceScatter\(optimizer, ddp=ddp\)"):
        ReduceScatter(zero)


# What is in the gradients after backward


@pytest.mark.parametrize("ours", [{}, ELEMENT], ids=["whole", "cut"])
@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["one bucket", "bucket views"])
@distributed(2)
def test_owned_ranges_are_reduced_and_what_nobody_owns_too(
    world_size: int, ours: dict[str, Any], ddp: dict[str, Any]
) -> None:
    case = Case(parts=(Part(ours=ours, params=matrices),), ddp=ddp)
    scattered, reference = scattered_run(case), plain_run(case)
    for step in range(3):
        scattered.ddp.zero_grad()
        reference.ddp.zero_grad()
        for run in (scattered, reference):
            run.backward(step)
        zero = scattered.zero
        unowned = 0
        expected = dict(zip(scattered.params, reference.params, strict=True))
        for shard in zero.layout.shards:
            param = matrices(scattered.ddp.module)[shard.param]
            assert param.grad is not None
            other = expected[param].grad
            assert other is not None
            mine, theirs = (gradient.flatten()[shard.start : shard.stop] for gradient in (param.grad, other))
            if shard.owner == zero.rank:
                assert_equal([mine], [theirs], "an owned range")
            else:
                unowned += not torch.equal(mine, theirs)
        assert unowned, "nothing was left unreduced, so nothing was saved"
        for param in vectors(scattered.ddp.module):
            assert param.grad is not None
            gradient = expected[param].grad
            assert gradient is not None
            assert_equal([param.grad], [gradient], "a parameter that no optimizer owns")
        for run in (scattered, reference):
            run.update()


# Norms and clipping


NORM_TYPES = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])


@NORM_TYPES
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", (Part(torch.optim.SGD, SGD),)),
        Case("whole", (Part(torch.optim.SGD, SGD, {}),), VIEW),
        Case("a list", (Part(torch.optim.SGD, SGD, params=matrices), Part(torch.optim.SGD, SGD, params=vectors))),
        Case("unused", (Part(torch.optim.SGD, SGD),), **UNUSED),
        Case("accumulated", (Part(torch.optim.SGD, SGD),), passes=2),
    ],
    ids=lambda case: case.name,
)
@distributed(3)
def test_the_norm_is_that_of_all_gradients_and_clipping_equals_torchs(
    world_size: int, case: Case, norm_type: float
) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    clipped = 0
    for step in range(4):
        reference.backward(step)
        ours.backward(step)
        expected = torch.nn.utils.get_total_norm(
            [param.grad for param in reference.params if param.grad is not None], norm_type
        )
        max_norm = float(expected) * (0.5 if step % 2 else 2.0)
        torch.nn.utils.clip_grad_norm_(reference.params, max_norm, norm_type)
        if len(ours.zeros) > 1:
            found = onecopy.grad_norm(ours.zeros, norm_type)
            returned = onecopy.clip_grad_norm_(ours.zeros, max_norm, norm_type)
        else:
            found = ours.zero.grad_norm(norm_type)
            returned = ours.zero.clip_grad_norm_(max_norm, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(returned, expected, rtol=1e-6, atol=0)
        clipped += float(expected) > max_norm
        ours.update()
        reference.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)
    assert clipped == 2
    assert_replicas_equal(ours.params)


@distributed(2, 3)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("policy", ["parameter", "element"])
def test_clipping_with_torchs_function_is_an_error_that_says_what_to_use(
    world_size: int, policy: str, bucket_view: bool
) -> None:
    ddp = {"bucket_cap_mb": TINY, "gradient_as_bucket_view": bucket_view}
    ours = scattered_run(Case(parts=(Part(ours={"shard_by": policy}),), ddp=ddp))
    ours.iterate(0)
    ours.backward(1)
    torch.nn.utils.clip_grad_norm_(ours.params, 1e-3)
    with pytest.raises(onecopy.RanksDisagreeError, match=r"different factors.*optimizer\.clip_grad_norm_\(\)"):
        ours.update()


def scale_all(params: list[Tensor]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.mul_(0.5)


def scale_one(params: list[Tensor]) -> None:
    assert params[0].grad is not None
    params[0].grad.mul_(0.25)


def scale_a_part(params: list[Tensor]) -> None:
    scale_all(params[: len(params) // 2])


@distributed(2, 3)
@pytest.mark.parametrize("policy", ["parameter", "element"])
@pytest.mark.parametrize("scale", [scale_all, scale_one, scale_a_part])
def test_scaling_gradients_alike_on_all_ranks_is_no_error(
    world_size: int, scale: Callable[[list[Tensor]], None], policy: str
) -> None:
    case = Case(parts=(Part(ours={"shard_by": policy}),))
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(3):
        for run in (ours, reference):
            run.backward(step)
            scale(run.params)
            run.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


@distributed(2)
def test_clipping_that_changes_nothing_keeps_every_bit(world_size: int) -> None:
    ours, reference = scattered_run(Case()), plain_run(Case())
    for step in range(4):
        reference.iterate(step)
        ours.backward(step)
        ours.zero.clip_grad_norm_(1e6)
        ours.update()
        assert_same_values(ours, reference, f"iteration {step}")


@distributed(2)
def test_the_norm_of_double_gradients_has_their_precision(world_size: int) -> None:
    case = Case(model=double_model, loss=double_loss)
    ours, reference = scattered_run(case), plain_run(case)
    ours.backward(0)
    reference.backward(0)
    expected = torch.nn.utils.clip_grad_norm_(reference.params, 0.01)
    assert expected.dtype == torch.float64
    torch.testing.assert_close(ours.zero.clip_grad_norm_(0.01), expected, rtol=1e-12, atol=0)
    ours.update()
    reference.update()
    assert_equal(ours.params, reference.params, "after clipping", 1e-12)


@distributed(2)
def test_a_norm_that_is_not_finite_raises_on_request(world_size: int) -> None:
    ours = scattered_run(Case())
    ours.ddp.zero_grad()
    (small_loss(ours.ddp, 0) * (math.inf if dist.get_rank() == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 .* not finite"):
        ours.zero.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not torch.isfinite(ours.zero.grad_norm())


@NORM_TYPES
@distributed(2)
def test_without_the_hook_clipping_equals_torchs_too(world_size: int, norm_type: float) -> None:
    case = Case(parts=(Part(torch.optim.SGD, SGD),))
    reference, ddp = plain_run(case), make_ddp(case)
    ours = Run(case, ddp, [ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, shard_by="element", **SGD)])
    for step in range(2):
        reference.backward(step)
        ours.backward(step)
        expected = torch.nn.utils.clip_grad_norm_(reference.params, 0.01, norm_type)
        torch.testing.assert_close(ours.zero.clip_grad_norm_(0.01, norm_type), expected, rtol=1e-6, atol=0)
        reference.update()
        ours.update()
        assert_equal(ours.params, reference.params, f"iteration {step}", ROUNDING)


# Gradient scaling


def scaled_step(run: Run, scaler: torch.amp.GradScaler, step: int, factor: float, clip: bool = False) -> bool:
    """One iteration; the loss of one rank is multiplied by ``factor``. Returns whether parameters changed."""
    before = [param.detach().clone() for param in run.params]
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    loss = run.case.loss(run.ddp, step)
    scaler.scale(loss * factor if dist.get_rank() == dist.get_world_size() - 1 else loss).backward()
    if clip:
        for optimizer in run.optimizers:
            scaler.unscale_(optimizer)
        if run.zeros:
            onecopy.clip_grad_norm_(run.zeros, 0.05)
        else:
            torch.nn.utils.clip_grad_norm_(run.params, 0.05)
    for optimizer in run.optimizers:
        scaler.step(optimizer)
    scaler.update()
    return any(not torch.equal(new, old) for new, old in zip(run.params, before, strict=True))


def make_scaler(scale: float = 1024.0) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


@pytest.mark.parametrize(
    ("bad", "clip"), [(math.inf, False), (math.nan, True)], ids=["infinite", "not a number, and clipped"]
)
@pytest.mark.parametrize(
    "case",
    [
        Case("whole", (Part(ours={}),), VIEW),
        Case("a list", TWO_ADAMWS),
        Case("unused", **UNUSED),
        Case("in buckets", (Part(ours={**ELEMENT, **BUCKETS}),), {}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3)
def test_a_gradient_scaler_skips_alike_on_all_ranks_and_equals_plain_ddp(
    world_size: int, case: Case, bad: float, clip: bool
) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    skipped = {0, 4, 5, 9}
    for step in range(12):
        factor = bad if step in skipped else 1.0
        assert scaled_step(reference, scalers[0], step, factor, clip) == (step not in skipped)
        assert scaled_step(ours, scalers[1], step, factor, clip) == (step not in skipped)
        assert scalers[1].get_scale() == scalers[0].get_scale(), f"step {step}"
        assert_equal(ours.params, reference.params, f"step {step}", ROUNDING if clip else tolerance_of(case))
    assert_replicas_equal(ours.params)


class Split(nn.Module):
    """Two parameters whose gradients are given, one for each of two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(40, 40))
        self.vector = nn.Parameter(torch.ones(3))

    def forward(self, of_matrix: float, of_vector: float) -> Tensor:
        return (self.matrix * of_matrix).sum() + (self.vector * of_vector).sum()


@distributed(2, 3)
def test_each_of_several_optimizers_skips_its_own_gradients_only(world_size: int) -> None:
    """As with plain DDP. A parameter as small as the vector is owned by one rank, which sees nothing of the others."""
    case = Case(model=Split, parts=(Part(params=matrices), Part(params=vectors)))
    ours, reference = scattered_run(case), plain_run(case)
    scalers = make_scaler(), make_scaler()
    for bad_matrix, bad_vector in ((math.inf, 1.0), (1.0, math.nan), (1.0, 1.0), (math.inf, math.inf)):
        for run, scaler in zip((ours, reference), scalers, strict=True):
            run.ddp.zero_grad()
            scaler.scale(run.ddp(bad_matrix, bad_vector)).backward()
            for optimizer in run.optimizers:
                scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_values(ours, reference, f"gradients {bad_matrix} and {bad_vector}")


@distributed(2)
def test_large_gradients_that_are_finite_are_not_taken_for_infinite(world_size: int) -> None:
    case = Case(model=Split, parts=(Part(torch.optim.SGD, {"lr": 1e-39}),))
    ours, reference = scattered_run(case), plain_run(case)
    for run in (ours, reference):
        scaler = make_scaler(1.0)
        run.ddp.zero_grad()
        scaler.scale(run.ddp(1.5e38, 1.0)).backward()
        scaler.step(run.optimizers[0])
        scaler.update()
        assert scaler.get_scale() == 1.0
        assert float(run.ddp.module.get_parameter("matrix").detach().max()) < 0.9
    assert_same_values(ours, reference, "large gradients")


class Rows(nn.Module):
    """Each element has a gradient of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2048))
        self.other = nn.Parameter(torch.ones(10))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum() + self.other.sum()


@pytest.mark.parametrize("ours", [{}, ELEMENT], ids=["whole", "cut"])
@distributed(2, 3)
def test_without_a_scaler_an_infinite_gradient_stays_where_it_is(world_size: int, ours: dict[str, Any]) -> None:
    case = Case(model=Rows, parts=(Part(torch.optim.SGD, {"lr": 0.1}, ours),))
    scattered, reference = scattered_run(case), plain_run(case)
    for position in (0, 700, 2047):
        gradient = torch.full((2048,), 0.5)
        gradient[position] = math.inf if dist.get_rank() == 0 else 0.5
        for run in (scattered, reference):
            run.ddp.zero_grad()
            run.ddp(gradient).backward()
            run.update()
        assert_equal(scattered.params, reference.params, f"infinite at {position}")
    weight = scattered.ddp.module.get_parameter("weight").detach()
    assert torch.isinf(weight).nonzero().flatten().tolist() == [0, 700, 2047]


@distributed(2, 3)
def test_updates_are_counted_with_skipped_steps_and_accumulation(world_size: int) -> None:
    case = Case(parts=(Part(Counting, {"lr": 0.1}, {**ELEMENT, "elementwise": True}),), **UNUSED)
    ours = scattered_run(case)
    scaler = make_scaler()
    for step in range(8):
        ours.zero.zero_grad()
        with ours.ddp.no_sync():
            scaler.scale(branching_loss(ours.ddp, 100 + 2 * step + 1)).backward()
        loss = branching_loss(ours.ddp, step)
        scaler.scale(loss * math.inf if step in (1, 4) and dist.get_rank() == 0 else loss).backward()
        scaler.step(ours.zero)
        scaler.update()
    expected = {"first": 6, "middle": 6, "last": 6, "sometimes": 3, "never": 0}
    assert ours.zero.param_groups[0]["steps"] == 6
    ours.zero.consolidate_state_dict(to=0)
    if ours.zero.rank == 0:
        state = ours.zero.state_dict()["state"]
        for index, (name, _) in enumerate(ours.ddp.module.named_parameters()):
            assert state.get(index, {}).get("updates", 0) == expected[name.split(".")[0]], name


# Unused and frozen parameters


@distributed(2, 3)
def test_a_parameter_without_a_gradient_anywhere_is_left_alone(world_size: int) -> None:
    case = Case(**UNUSED)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(4))
    module = ours.ddp.module
    assert isinstance(module, Branching)
    untouched = make_ddp(case).module.get_parameter("never.weight")
    assert torch.equal(module.never.weight, untouched), "weight decay alone must not move it"
    assert module.never.weight not in ours.zero.state
    assert_same_state(ours, reference)


@distributed(2, 3)
def test_a_layer_frozen_half_way_stays_equal_to_plain_ddp(world_size: int) -> None:
    case = Case(**UNUSED)
    ours, reference = scattered_run(case), plain_run(case)
    train_both(ours, reference, range(3))
    for trainable, steps in ((False, range(3, 6)), (True, range(6, 8))):
        for run in (ours, reference):
            run.ddp.module.get_submodule("middle").requires_grad_(trainable)
        train_both(ours, reference, steps)
    assert_same_state(ours, reference)


# Several passes before one step()


@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["one bucket", "bucket views"])
@distributed(2)
def test_a_second_synchronising_pass_before_step_raises(world_size: int, ddp: dict[str, Any]) -> None:
    ours = scattered_run(Case(ddp=ddp))
    for step in range(3):
        ours.iterate(step)
    ours.backward(3)
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        small_loss(ours.ddp, 4).backward()


@distributed(2)
def test_a_second_pass_of_the_first_iteration_raises_too(world_size: int) -> None:
    ours = scattered_run(Case())
    ours.backward(0)
    with pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        small_loss(ours.ddp, 1).backward()


@distributed(2)
def test_a_pass_inside_no_sync_after_the_synchronising_one_raises(world_size: int) -> None:
    ours = scattered_run(Case())
    ours.backward(0)
    with ours.ddp.no_sync(), pytest.raises(RuntimeError, match=r"no_sync\(\)"):
        small_loss(ours.ddp, 1).backward()


def forget_through_the_optimizer(run: Run) -> None:
    run.optimizers[0].zero_grad()


def forget_through_the_model(run: Run) -> None:
    run.ddp.zero_grad()


def zero_through_the_optimizer(run: Run) -> None:
    run.optimizers[0].zero_grad(set_to_none=False)


def zero_through_the_model(run: Run) -> None:
    run.ddp.zero_grad(set_to_none=False)


def forget_by_hand(run: Run) -> None:
    for param in run.params:
        param.grad = None


RESETS = pytest.mark.parametrize(
    "reset",
    [
        forget_through_the_optimizer,
        forget_through_the_model,
        zero_through_the_optimizer,
        zero_through_the_model,
        forget_by_hand,
    ],
)


@RESETS
@pytest.mark.parametrize("ddp", [{}, VIEW], ids=["one bucket", "bucket views"])
@distributed(2)
def test_gradients_that_were_thrown_away_may_be_computed_again(
    world_size: int, reset: Callable[[Run], None], ddp: dict[str, Any]
) -> None:
    ours, reference = scattered_run(Case(ddp=ddp)), plain_run(Case(ddp=ddp))
    for step in range(4):
        for run in (ours, reference):
            reset(run)
            small_loss(run.ddp, 50 + step).backward()  # thrown away, as by a person who skips a step
            reset(run)
            small_loss(run.ddp, step).backward()
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")


def _fail(gradient: Tensor) -> None:
    raise LookupError("a hook of the user's")


@distributed(2, 3)
def test_a_pass_that_failed_on_all_ranks_with_messages_on_their_way_leaves_nothing_behind(world_size: int) -> None:
    """What they have sent is not taken for a later pass's gradients."""
    case = Case(ddp={"bucket_cap_mb": 1e-4})
    ours, reference = scattered_run(case), plain_run(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", 16)
        little_room(patch)
        train_both(ours, reference, range(2))  # DDP makes its buckets anew after the first
        ours.ddp.zero_grad()
        handle = ours.params[0].register_hook(_fail)
        with pytest.raises(LookupError):
            small_loss(ours.ddp, 50).backward()
        handle.remove()
        ours.ddp.zero_grad()
        # DDP itself cannot go on after that; another one can.
        ours.ddp = DistributedDataParallel(ours.ddp.module, **case.ddp)
        ours.ddp.register_comm_hook(ours.zero, reduce_scatter_hook)
        train_both(ours, reference, range(2, 5))
    assert_replicas_equal(ours.params)


@distributed(2)
def test_adding_to_gradients_that_step_has_used_is_an_error(world_size: int) -> None:
    """Plain DDP would add to the mean of all ranks; here most of that mean is on other ranks."""
    ours = scattered_run(Case())
    ours.iterate(0)
    with pytest.raises(RuntimeError, match=r"no_sync|zero_grad"):
        small_loss(ours.ddp, 1).backward()


# Uneven inputs


def more_for_later_ranks(rank: int) -> int:
    return 1 + 2 * rank


def more_for_earlier_ranks(rank: int) -> int:
    return 8 - 2 * rank


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@pytest.mark.parametrize(
    "case",
    [
        Case("cut", (Part(torch.optim.SGD, SGD),), scheduled=True),
        Case("whole, in buckets", (Part(ours=BUCKETS),), VIEW, scheduled=True),
        Case("a list", TWO_ADAMWS),
        Case("some are nobody's", (Part(params=matrices),), {}),
    ],
    ids=lambda case: case.name,
)
@distributed(2, 3, 4)
def test_uneven_inputs_equal_plain_ddp(world_size: int, case: Case, counts: Callable[[int], int]) -> None:
    ours, reference = scattered_run(case), plain_run(case)
    count = counts(dist.get_rank())
    for run in (reference, ours):
        with Join([run.ddp, *run.zeros]):
            for step in range(count):
                run.iterate(step)
    assert_same_values(ours, reference, "after uneven inputs")
    assert_replicas_equal(ours.params)
    last = max(range(world_size), key=counts)
    for zero, plain in zip(ours.zeros, reference.optimizers, strict=True):
        zero.consolidate_state_dict(to=last)
        if dist.get_rank() == last:
            assert_same_tree(zero.state_dict(), plain.state_dict(), "state", tolerance_of(case))


# The type in which gradients travel


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, ROUNDING)]
)
@distributed(2, 3)
def test_gradients_travel_in_the_type_that_was_chosen(world_size: int, dtype: torch.dtype, tolerance: float) -> None:
    case = Case(parts=(Part(torch.optim.SGD, SGD),))
    ours, reference = scattered_run(case, dtype), plain_run(case)
    for step in range(4):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", tolerance)
    assert_replicas_equal(ours.params)
    different = any(not torch.equal(a, b) for a, b in zip(ours.params, reference.params, strict=True))
    if world_size == 2:
        assert different == (dtype is not torch.float32)


@distributed(2)
def test_half_precision_gradients_can_travel_in_single_precision(world_size: int) -> None:
    case = Case(model=half_model, loss=half_loss, parts=(Part(torch.optim.SGD, SGD),))
    ours, reference = scattered_run(case, torch.float32), plain_run(case)
    for step in range(3):
        ours.iterate(step)
        reference.iterate(step)
        assert_equal(ours.params, reference.params, f"iteration {step}", 2e-2)


@distributed(2)
def test_too_large_for_the_chosen_type_is_seen_by_a_scaler(world_size: int) -> None:
    case = Case(model=Split, parts=(Part(torch.optim.SGD, SGD),))
    ours = scattered_run(case, torch.float16)
    scaler = make_scaler()
    scaler.scale(ours.ddp(1000.0, 1.0)).backward()
    scaler.step(ours.zero)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(ours.params, [torch.ones(40, 40), torch.ones(3)], "a skipped step")


# Groups that come later, and lifetime


@pytest.mark.parametrize("iterations", [0, 1, 3])
@distributed(2, 3)
def test_a_group_can_be_added_later(world_size: int, iterations: int) -> None:
    case = Case(parts=(Part(params=matrices),), ddp={})
    ours, reference = scattered_run(case), plain_run(case)
    for step in range(iterations + 4):
        for run in (ours, reference):
            if step == iterations:
                run.optimizers[0].add_param_group({"params": vectors(run.ddp.module), "lr": 0.05})
            run.ddp.zero_grad()
            small_loss(run.ddp, step).backward()
            run.update()
        assert_same_values(ours, reference, f"iteration {step}")
    assert_same_state(ours, reference)


@pytest.mark.parametrize("parts", [(Part(),), TWO_ADAMWS], ids=["one", "a list"])
@distributed(2)
def test_nothing_is_left_behind_when_model_and_optimizers_go_away(world_size: int, parts: tuple[Part, ...]) -> None:
    ours = scattered_run(Case(parts=parts))
    for step in range(3):
        ours.iterate(step)
    remains: list[Any] = [weakref.ref(ours.ddp), weakref.ref(ours.params[0])]
    remains += [weakref.ref(optimizer) for optimizer in ours.optimizers]
    del ours
    gc.collect()
    assert [reference() for reference in remains] == [None] * len(remains)


# Wrong use


@distributed(2)
def test_a_state_that_is_no_optimizer_of_ours_is_refused(world_size: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    ddp = make_ddp(Case())
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for wrong in (None, plain, [plain], TorchZero(ddp.parameters(), torch.optim.SGD, lr=0.1)):
        with pytest.raises(TypeError, match=r"onecopy\.ZeroRedundancyOptimizer"):
            ReduceScatter(wrong)  # type: ignore[arg-type]
    ddp.register_comm_hook(plain, reduce_scatter_hook)
    with pytest.raises(TypeError, match=r"onecopy\.ZeroRedundancyOptimizer, got torch\.optim\.sgd\.SGD"):
        small_loss(ddp, 0).backward()


@distributed(2)
def test_an_empty_list_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="optimizer"):
        ReduceScatter([])


@distributed(2)
def test_two_optimizers_over_one_parameter_are_refused_by_its_name(world_size: int) -> None:
    ddp = make_ddp(Case())
    both = [ZeroRedundancyOptimizer(ddp.named_parameters(), torch.optim.SGD, lr=0.1) for _ in range(2)]
    with pytest.raises(ValueError, match=r"module\.0\.weight"):
        ReduceScatter(both)


@distributed(2)
def test_an_optimizer_that_steps_inside_backward_is_refused(world_size: int) -> None:
    ddp = make_ddp(Case())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        ReduceScatter(zero)
    ddp.register_comm_hook(zero, reduce_scatter_hook)
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        small_loss(ddp, 0).backward()


@distributed(2)
def test_optimizers_on_different_process_groups_are_refused(world_size: int) -> None:
    ddp = make_ddp(Case())
    other = dist.new_group([0, 1])
    zeros = [
        ZeroRedundancyOptimizer(params, torch.optim.SGD, process_group=group, lr=0.1)
        for params, group in ((matrices(ddp.module), None), (vectors(ddp.module), other))
    ]
    with pytest.raises(ValueError, match="same process group"):
        ReduceScatter(zeros)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
@distributed(2)
def test_a_type_that_cannot_hold_gradients_is_refused(world_size: int, dtype: torch.dtype) -> None:
    zero = ZeroRedundancyOptimizer(small_model().parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=f"reduce_dtype must be a floating-point type, got {dtype}"):
        ReduceScatter(zero, reduce_dtype=dtype)
