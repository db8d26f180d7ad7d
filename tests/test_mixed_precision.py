"""Master weights and mixed precision: training equals masters kept by hand, bit by bit, and so do its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from harness import distributed
from models import assert_equal, assert_replicas_equal, assert_same_tree, small_inputs, small_model, values
from onecopy import (
    MixedPrecision,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.step.master_weights import MasterWeightPolicy

HALF = torch.bfloat16
ROUNDING = 2e-2
"""Three ranks and another order of adding bf16 gradients up: a few units in the last place of bf16."""

MASTERS: dict[str, Any] = {"master_weights": True}
ELEMENT: dict[str, Any] = {"master_weights": True, "shard_by": "element"}
VIEW: dict[str, Any] = {"master_weights": True, "parameters_as_bucket_view": True}
POLICIES = pytest.mark.parametrize("ours", [MASTERS, ELEMENT, VIEW], ids=["parameter", "element", "bucket views"])
BF16 = MixedPrecision(param_dtype=HALF)


# Models and optimizers


class Mixed(nn.Module):
    """Two bf16 layers with a float32 gain between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (layer.to(HALF) for layer in (small_model()[0], small_model()[2]))
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 160))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last((self.gain * torch.tanh(self.first(inputs.to(HALF)))).to(HALF))
        return outputs


def loss_of(model: nn.Module, step: int) -> Tensor:
    """This rank's loss, of a model that may be in bf16."""
    loss: Tensor = model(small_inputs(dist.get_rank(), step)).float().square().mean()
    return loss


def everything(params: Sequence[Tensor]) -> list[Tensor]:
    return list(params)


def matrices(params: Sequence[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dim() == 2]


def vectors(params: Sequence[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dim() != 2]


@dataclass(frozen=True)
class Part:
    """One optimizer: its class and options, and which of the model's parameters it has."""

    optimizer: type[Optimizer]
    options: dict[str, Any]
    chosen: Callable[[Sequence[Tensor]], list[Tensor]] = everything


ADAMW = Part(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})
FUSED = Part(torch.optim.AdamW, {"lr": 1e-3, "fused": True})
SGD = Part(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})
ADAFACTOR = Part(torch.optim.Adafactor, {"lr": 1e-3})
MUON = Part(torch.optim.Muon, {"lr": 1e-3}, matrices)
RECIPES = pytest.mark.parametrize(
    "parts",
    [(ADAMW,), (FUSED,), (SGD,), (ADAFACTOR,), (MUON, Part(torch.optim.AdamW, {"lr": 1e-3}, vectors))],
    ids=["AdamW", "fused AdamW", "SGD", "Adafactor", "Muon and AdamW"],
)


class ByHand:
    """The reference: float32 masters of all parameters on every rank, under plain optimizers."""

    def __init__(self, params: Iterable[Tensor], parts: Sequence[Part], exact: Iterable[Tensor] | None = None) -> None:
        self.params = list(params)
        sources = self.params if exact is None else list(exact)
        self.masters = [source.detach().float().clone() for source in sources]
        self.optimizers = [part.optimizer(part.chosen(self.masters), **part.options) for part in parts]

    def step(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        given = [param.grad for param in self.params] if gradients is None else gradients
        for master, gradient in zip(self.masters, given, strict=True):
            master.grad = None if gradient is None else gradient.float()
        for optimizer in self.optimizers:
            optimizer.step()
        self.write_to_params()

    @torch.no_grad()
    def write_to_params(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


def zeros_for(params: Iterable[Tensor], parts: Sequence[Part], **ours: Any) -> list[ZeroRedundancyOptimizer]:
    """The same optimizers sharded; a class that needs whole parameters has them, whatever ``shard_by`` says."""
    held = list(params)
    whole = {key: value for key, value in ours.items() if key != "shard_by"}
    return [
        ZeroRedundancyOptimizer(
            part.chosen(held), part.optimizer, **(whole if part in (ADAFACTOR, MUON) else ours), **part.options
        )
        for part in parts
    ]


def adamw_for(model: nn.Module, **ours: Any) -> ZeroRedundancyOptimizer:
    (zero,) = zeros_for(model.parameters(), [ADAMW], **ours)
    return zero


def made_copies(zero: ZeroRedundancyOptimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """What the inner optimizer steps outside the parameters' memory."""
    homes = {param.untyped_storage().data_ptr() for param in params}
    stepped = [tensor for group in zero.optim.param_groups for tensor in group["params"]]
    return [tensor for tensor in stepped if tensor.untyped_storage().data_ptr() not in homes]


def set_gradients(params: Iterable[Tensor], step: int) -> None:
    """The same gradients on every rank, so that training does not depend on their number."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def train(params: Sequence[Tensor], optimizers: Sequence[Any], steps: Iterable[int]) -> None:
    for step in steps:
        set_gradients(params, step)
        for optimizer in optimizers:
            optimizer.step()


def saved(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The whole state dict, on every rank of the optimizer."""
    zero.consolidate_state_dict(to=0)
    box: list[Any] = [zero.state_dict() if zero.rank == 0 else None]
    dist.broadcast_object_list(box, src=0, group=zero.process_group)
    state: dict[str, Any] = box[0]
    return state


def masters_in(state: dict[str, Any]) -> dict[int, Tensor]:
    masters: dict[int, Tensor] = state.get("master_weights", {})
    return masters


def without_masters(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != "master_weights"}


# Level 1: under DDP


@POLICIES
@RECIPES
@distributed(2, 3)
def test_training_equals_masters_by_hand(world_size: int, parts: tuple[Part, ...], ours: dict[str, Any]) -> None:
    model, plain, coarse = (DistributedDataParallel(Mixed()) for _ in range(3))
    zeros = zeros_for(model.parameters(), parts, **ours)
    reference = ByHand(plain.parameters(), parts)
    rounded = [part.optimizer(part.chosen(list(coarse.parameters())), **part.options) for part in parts]
    for step in range(4):
        for each, optimizers in ((model, zeros), (plain, [reference]), (coarse, rounded)):
            each.zero_grad()
            loss_of(each, step).backward()
            for optimizer in optimizers:
                optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    assert_replicas_equal([param.detach().float() for param in model.parameters()])
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), coarse.parameters(), strict=True))


@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
@pytest.mark.parametrize("ours", [MASTERS, ELEMENT], ids=["parameter", "element"])
@distributed(2)
def test_updates_inside_the_backward_pass_equal_masters_by_hand(
    world_size: int, ours: dict[str, Any], make_hook: Callable[..., Any]
) -> None:
    model, plain = (DistributedDataParallel(Mixed(), bucket_cap_mb=0.001) for _ in range(2))
    zero = adamw_for(model, overlap_with_ddp=True, **ours)
    model.register_comm_hook(None, make_hook(allreduce_hook, model, zero))
    plain.register_comm_hook(None, allreduce_hook)
    reference = ByHand(plain.parameters(), [ADAMW])
    for step in range(6):
        for each, optimizer in ((model, zero), (plain, reference)):
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    state = saved(zero)
    assert_same_tree(without_masters(state), reference.optimizers[0].state_dict(), "state")


@POLICIES
@distributed(2, 3)
def test_the_reduce_scatter_hook_equals_masters_by_hand(world_size: int, ours: dict[str, Any]) -> None:
    model, plain = (DistributedDataParallel(Mixed()) for _ in range(2))
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    model.register_comm_hook(zero, reduce_scatter_hook)
    for step in range(5):
        for each, optimizer in ((model, zero), (plain, reference)):
            each.zero_grad()
            loss_of(each, step).backward()
            optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}", 0.0 if world_size == 2 else ROUNDING)


@pytest.mark.parametrize("hook", [False, True], ids=["all-reduce", "reduce-scatter"])
@pytest.mark.parametrize("ours", [MASTERS, ELEMENT], ids=["parameter", "element"])
@distributed(2, 3)
def test_uneven_inputs_equal_masters_by_hand(world_size: int, ours: dict[str, Any], hook: bool) -> None:
    model, plain = (DistributedDataParallel(Mixed()) for _ in range(2))
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    if hook:
        model.register_comm_hook(zero, reduce_scatter_hook)
    for each, optimizer, joined in ((plain, reference, [plain]), (model, zero, [model, zero])):
        with Join(joined):  # type: ignore[arg-type]
            for step in range(2 + 2 * dist.get_rank()):
                each.zero_grad()
                loss_of(each, step).backward()
                optimizer.step()
    assert_equal(model.parameters(), plain.parameters(), "end", ROUNDING if hook and world_size > 2 else 0.0)
    assert_replicas_equal([param.detach().float() for param in model.parameters()])


@POLICIES
@distributed(2, 3)
def test_a_copy_exists_on_its_owner_only_and_only_of_what_is_coarse(world_size: int, ours: dict[str, Any]) -> None:
    model = Mixed()
    zero = adamw_for(model, **ours)
    train(list(model.parameters()), [zero], range(1))
    copies = made_copies(zero, model.parameters())
    assert all(copy.dtype == torch.float32 for copy in copies)
    elements = [param.numel() for param in model.parameters() if param.dtype == HALF]
    total = torch.tensor(sum(copy.untyped_storage().nbytes() for copy in copies))
    assert total <= 4 * (sum(elements) / world_size + max(elements)), "this rank has more than it can own"
    dist.all_reduce(total)
    assert total == 4 * sum(elements)


@distributed(2)
def test_schedule_free_averages_reach_the_parameters(world_size: int) -> None:
    part = Part(AdamWScheduleFree, {"lr": 1e-2, "foreach": False})
    model, plain = Mixed(), Mixed()
    (zero,), reference = zeros_for(model.parameters(), [part], **MASTERS), ByHand(plain.parameters(), [part])
    inner: Any = reference.optimizers[0]
    for mode in ("train", "eval", "train"):
        getattr(zero, mode)()
        getattr(inner, mode)()
        reference.write_to_params()
        assert_equal(model.parameters(), plain.parameters(), f"after {mode}()")
        if mode == "train":
            train(list(model.parameters()), [zero], range(3))
            train(list(plain.parameters()), [reference], range(3))
            assert_equal(model.parameters(), plain.parameters(), "trained")


@distributed(2)
def test_a_model_converted_before_the_first_step_gets_masters_or_an_error(world_size: int) -> None:
    model, plain = small_model(), small_model().to(HALF)
    zero = adamw_for(model, **MASTERS)
    model.to(HALF)
    reference = ByHand(plain.parameters(), [ADAMW])
    train(list(plain.parameters()), [reference], range(3))
    try:
        train(list(model.parameters()), [zero], range(3))
    except RuntimeError:
        return
    assert_equal(model.parameters(), plain.parameters(), "converted after construction")


# ShardedDataParallel


class Normalised(nn.Module):
    """A convolution with batch statistics, whose running averages stay in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve, self.normalise, self.last = nn.Conv2d(1, 24, 3), nn.BatchNorm2d(24), nn.Linear(24, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.normalise(self.convolve(inputs.reshape(-1, 1, 4, 6)))
        outputs: Tensor = self.last(torch.relu(hidden).mean((2, 3)))
        return outputs


def wrap(model: nn.Module, parts: Sequence[Part], policy: MixedPrecision, **options: Any) -> ShardedDataParallel:
    return ShardedDataParallel(model, zeros_for(model.parameters(), parts), mixed_precision=policy, **options)


def optimizers_of(model: ShardedDataParallel) -> list[ZeroRedundancyOptimizer]:
    return [optimizer for optimizer, _ in model._pipelines]


def reduced(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The mean of all ranks' gradients, added up in rank order and in this type, or their own."""
    means = []
    for param in params:
        assert param.grad is not None
        mine = param.grad.to(dtype or param.dtype)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        total = everyone[0]
        for other in everyone[1:]:
            total = total + other
        means.append(total * (1.0 / len(everyone)))
    return means


def compare_with_masters_by_hand(
    make: Callable[[], nn.Module], parts: Sequence[Part], policy: MixedPrecision, steps: int = 4, **options: Any
) -> tuple[ShardedDataParallel, ByHand]:
    torch.manual_seed(4)
    plain = make()
    model = wrap(deepcopy(plain), parts, policy, **options)
    exact = values(plain.parameters())
    for param, ours in zip(plain.parameters(), model.parameters(), strict=True):
        param.data = param.data.to(ours.dtype)
    reference = ByHand(plain.parameters(), parts, exact)
    assert any(not torch.equal(a, b) for a, b in zip(exact, plain.parameters(), strict=True))
    for step in range(steps):
        for optimizer in optimizers_of(model):
            optimizer.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers_of(model):
            optimizer.step()
        plain.zero_grad()
        plain(small_inputs(dist.get_rank(), step).to(HALF)).float().square().mean().backward()
        reference.step(reduced(plain.parameters(), policy.reduce_dtype))
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    return model, reference


@pytest.mark.parametrize("reduce_dtype", [None, HALF, torch.float32])
@RECIPES
@distributed(2, 3)
def test_sharded_training_equals_masters_of_the_values_before_conversion(
    world_size: int, parts: tuple[Part, ...], reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecision(param_dtype=HALF, reduce_dtype=reduce_dtype)
    model, _ = compare_with_masters_by_hand(small_model, parts, policy, bucket_bytes=2000)
    assert {param.dtype for param in model.parameters()} == {HALF}
    kept = {param.grad.local.dtype for param in model.parameters()}  # type: ignore[union-attr]
    assert kept == {reduce_dtype or HALF}


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}], ids=["", "overlapping the forward"])
@distributed(2, 3)
def test_running_averages_keep_their_type(world_size: int, options: dict[str, Any]) -> None:
    model, _ = compare_with_masters_by_hand(Normalised, [ADAMW], BF16, **options)
    assert isinstance(model.module, Normalised)
    mean = model.module.normalise.running_mean
    assert mean is not None
    assert model.module.convolve.weight.dtype == HALF
    assert mean.dtype == torch.float32
    assert mean.any()


@distributed(2, 3)
def test_without_masters_bf16_itself_is_stepped(world_size: int) -> None:
    model = wrap(small_model(), [ADAMW], MixedPrecision(param_dtype=HALF, master_weights=False))
    plain = small_model().to(HALF)
    optimizer, (zero,) = torch.optim.AdamW(plain.parameters(), **ADAMW.options), optimizers_of(model)
    for step in range(4):
        zero.zero_grad()
        loss_of(model, step).backward()
        zero.step()
        plain.zero_grad()
        plain(small_inputs(dist.get_rank(), step).to(HALF)).float().square().mean().backward()
        for param, gradient in zip(plain.parameters(), reduced(plain.parameters()), strict=True):
            param.grad = gradient
        optimizer.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    assert not made_copies(zero, model.parameters())


class Inputs(nn.Module):
    """Remembers the types it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, inputs: Tensor, more: dict[str, list[Tensor]], scale: Tensor) -> Tensor:
        self.seen = [inputs.dtype, *(tensor.dtype for tensor in more["list"]), scale.dtype]
        outputs: Tensor = self.layer(inputs.to(HALF))
        return outputs


@pytest.mark.parametrize("cast", [True, False])
@distributed(2)
def test_floating_point_inputs_are_converted_on_request(world_size: int, cast: bool) -> None:
    inner = Inputs()
    model = wrap(inner, [ADAMW], MixedPrecision(param_dtype=HALF, cast_inputs=cast))
    model(torch.randn(3, 8), {"list": [torch.ones(2), torch.arange(2)]}, scale=torch.ones((), dtype=torch.double))
    expected = [HALF, HALF, torch.int64, HALF] if cast else [torch.float32, torch.float32, torch.int64, torch.double]
    assert inner.seen == expected


@distributed(2)
def test_frozen_parameters_outside_the_optimizer_are_converted_too(world_size: int) -> None:
    inner = small_model()
    inner[0].requires_grad_(False)
    model = ShardedDataParallel(inner, adamw_for(inner[2]), mixed_precision=BF16)
    assert {param.dtype for param in model.parameters()} == {HALF}
    loss_of(model, 0).backward()


@distributed(2)
def test_bytes_per_rank_are_those_of_the_documentation(world_size: int) -> None:
    inner = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))
    model = wrap(inner, [Part(torch.optim.Adam, {"lr": 1e-3})], BF16)
    (zero,) = optimizers_of(model)
    loss_of(model, 0).backward()
    zero.step()
    tensors = [*model.parameters(), *made_copies(zero, model.parameters())]
    tensors += [param.grad.local for param in model.parameters()]  # type: ignore[union-attr]
    tensors += [value for entry in zero.optim.state.values() for value in entry.values()]
    measured = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    count = sum(param.numel() for param in model.parameters())
    assert measured == pytest.approx(2 * count + (2 * count + 12 * count) / world_size, rel=0.05)


# Checkpoints


@POLICIES
@distributed(2, 3)
def test_a_checkpoint_has_whole_masters_beside_the_plain_state(world_size: int, ours: dict[str, Any]) -> None:
    model, plain = Mixed(), Mixed()
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    train(list(model.parameters()), [zero], range(3))
    train(list(plain.parameters()), [reference], range(3))
    state = saved(zero)
    coarse = {index: master for index, master in enumerate(reference.masters) if reference.params[index].dtype == HALF}
    assert_same_tree(masters_in(state), coarse, "masters")
    assert_same_tree(without_masters(state), reference.optimizers[0].state_dict(), "state")


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "before", "after"),
    [(2, 3, MASTERS, ELEMENT), (3, 2, ELEMENT, MASTERS), (2, 2, VIEW, ELEMENT), (3, 3, MASTERS, MASTERS)],
    ids=["2 to 3", "3 to 2", "2", "3"],
)
@distributed(3)
def test_a_saved_run_goes_on_bit_by_bit_with_other_ranks_and_policies(
    world_size: int,
    saved_by: int,
    loaded_by: int,
    before: dict[str, Any],
    after: dict[str, Any],
    weights_first: bool,
    steps: int,
) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3)}
    plain = Mixed()
    reference = ByHand(plain.parameters(), [ADAMW])
    train(list(plain.parameters()), [reference], range(steps + 3))
    box: list[Any] = [None, None]
    if dist.get_rank() < saved_by:
        model = Mixed()
        zero = adamw_for(model, process_group=groups[saved_by], **before)
        train(list(model.parameters()), [zero], range(steps))
        box = [model.state_dict(), saved(zero)]
    dist.broadcast_object_list(box, src=0)
    if dist.get_rank() < loaded_by:
        weights, state = box
        model = Mixed()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(0.25)
        zero = adamw_for(model, process_group=groups[loaded_by], **after)
        if weights_first:
            model.load_state_dict(weights)
        zero.load_state_dict(state)
        if not weights_first:
            model.load_state_dict(weights)
        train(list(model.parameters()), [zero], range(steps, steps + 3))
        assert_equal(model.parameters(), plain.parameters(), "weights")
        assert_equal(masters_in(saved(zero)).values(), [reference.masters[i] for i in masters_in(state)], "masters")
    dist.barrier()


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@distributed(2)
def test_a_saved_sharded_run_goes_on_bit_by_bit(world_size: int, steps: int, weights_first: bool) -> None:
    whole, reference = compare_with_masters_by_hand(small_model, [ADAMW], BF16, steps=6)
    model, _ = compare_with_masters_by_hand(small_model, [ADAMW], BF16, steps=steps)
    weights, state = deepcopy(model.state_dict()), saved(optimizers_of(model)[0])
    model = wrap(small_model(seed=8), [ADAMW], BF16)
    (zero,) = optimizers_of(model)
    if weights_first:
        model.load_state_dict(weights)
    zero.load_state_dict(state)
    if not weights_first:
        model.load_state_dict(weights)
    for step in range(steps, 6):
        zero.zero_grad()
        loss_of(model, step).backward()
        zero.step()
    assert_equal(model.parameters(), whole.parameters(), "weights")
    assert_equal(masters_in(saved(zero)).values(), reference.masters, "masters")


@distributed(2)
def test_state_from_before_the_first_step_must_be_consolidated(world_size: int) -> None:
    for zero in (adamw_for(Mixed(), **MASTERS), *optimizers_of(wrap(small_model(), [ADAMW], BF16))):
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            zero.state_dict()  # it would lack the masters, which here are finer than the parameters


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "after steps"])
@distributed(2)
def test_without_masters_in_the_dict_they_begin_with_the_parameters(world_size: int, stepped: bool) -> None:
    model, plain, source = Mixed(), Mixed(), Mixed()
    optimizer = torch.optim.AdamW(source.parameters(), **ADAMW.options)
    train(list(source.parameters()), [optimizer], range(2))
    zero = adamw_for(model, **ELEMENT)
    if stepped:
        train(list(model.parameters()), [zero], range(1))
    else:
        model.load_state_dict(source.state_dict())
    plain.load_state_dict(model.state_dict())
    zero.load_state_dict(optimizer.state_dict())
    reference = ByHand(plain.parameters(), [ADAMW])
    reference.optimizers[0].load_state_dict(optimizer.state_dict())
    train(list(model.parameters()), [zero], range(2, 5))
    train(list(plain.parameters()), [reference], range(2, 5))
    assert_equal(model.parameters(), plain.parameters(), "weights")
    assert_equal(masters_in(saved(zero)).values(), [reference.masters[i] for i in (1, 2, 3, 4)], "masters")


@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "later"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sharded", [True, False], ids=["ours", "torch's"])
@distributed(2)
def test_optimizers_without_masters_load_a_dict_that_has_them(
    world_size: int, sharded: bool, dtype: torch.dtype, steps: int
) -> None:
    model, target, plain = Mixed(), Mixed().to(dtype), Mixed().to(dtype)
    zero = adamw_for(model, **ELEMENT)
    train(list(model.parameters()), [zero], range(steps))
    state = saved(zero)
    optimizer: Optimizer = adamw_for(target) if sharded else torch.optim.AdamW(target.parameters(), **ADAMW.options)
    reference = torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    optimizer.load_state_dict(deepcopy(state))  # torch's own go on with the tensors they are given
    reference.load_state_dict(without_masters(state))
    train(list(target.parameters()), [optimizer], range(3))
    train(list(plain.parameters()), [reference], range(3))
    assert_equal(target.parameters(), plain.parameters(), "weights")


# Writing into parameters


@torch.no_grad()
def write_rows(params: Sequence[Tensor]) -> None:
    for param in params:
        param[::2] = 0.625


def load_rows(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    write_rows(list(state.values()))
    model.load_state_dict(state)


def write_in_place(model: nn.Module) -> None:
    write_rows(list(model.parameters()))


@pytest.mark.parametrize("write", [load_rows, write_in_place])
@POLICIES
@distributed(2)
def test_a_written_value_wins_and_the_others_stay_precise(
    world_size: int, ours: dict[str, Any], write: Callable[[nn.Module], None]
) -> None:
    model, plain = Mixed(), Mixed()
    zero, reference = adamw_for(model, **ours), ByHand(plain.parameters(), [ADAMW])
    for _ in range(2):
        train(list(model.parameters()), [zero], range(3))
        train(list(plain.parameters()), [reference], range(3))
        assert_equal(model.parameters(), plain.parameters(), "weights")
        write(model)
        write_rows(reference.masters)
        reference.write_to_params()
    assert any(not torch.equal(a, b) for a, b in zip(reference.masters, values(plain.parameters()), strict=True))


@distributed(2)
def test_a_written_value_wins_under_sharding_too(world_size: int) -> None:
    model, reference = compare_with_masters_by_hand(small_model, [ADAMW], BF16)
    (zero,) = optimizers_of(model)
    load_rows(model.module)
    write_rows(reference.masters)
    zero.zero_grad()
    loss_of(model, 9).backward()
    gradients = [torch.zeros_like(master) for master in reference.masters]
    for param in model.parameters():
        param.grad.zero_()  # type: ignore[union-attr]
    zero.step()
    reference.step(gradients)
    assert_equal(model.parameters(), reference.params, "weights")
    assert_equal(masters_in(saved(zero)).values(), reference.masters, "masters")


@distributed(2)
def test_a_write_through_data_is_respected(world_size: int) -> None:
    model, plain = Mixed(), Mixed()
    zero, reference = adamw_for(model, **MASTERS), ByHand(plain.parameters(), [ADAMW])
    for step in range(2):
        train(list(model.parameters()), [zero], [step])
        train(list(plain.parameters()), [reference], [step])
        assert_equal(model.parameters(), plain.parameters(), "weights")
        write_rows([param.data for param in model.parameters()])
        write_rows(reference.masters)


# State in CPU memory


@distributed(2, 3)
def test_offloading_to_where_parameters_are_changes_nothing(world_size: int) -> None:
    model, plain = small_model(), small_model()
    zero, optimizer = adamw_for(model, offload="cpu"), torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    train(list(model.parameters()), [zero], range(3))
    train(list(plain.parameters()), [optimizer], range(3))
    assert_equal(model.parameters(), plain.parameters(), "weights")
    assert not made_copies(zero, model.parameters())
    assert_same_tree(saved(zero), optimizer.state_dict(), "state")


@distributed(2, 3)
def test_an_unknown_place_is_refused_on_all_ranks(world_size: int) -> None:
    with pytest.raises(ValueError, match="offload must be None or 'cpu', got 'disk'"):
        adamw_for(small_model(), offload="disk")
    last = dist.get_rank() == world_size - 1
    with pytest.raises(ValueError if last else PeerFailedError, match="offload" if last else str(world_size - 1)):
        adamw_for(small_model(), offload="disk" if last else None)
    for options in ({"offload": "cpu"}, MASTERS):
        with pytest.raises(RanksDisagreeError, match=r"offload|master_weights"):
            adamw_for(small_model(), **(options if last else {}))


@pytest.mark.parametrize("hook", [None, "scatter", "overlap", "wrapper"])
@distributed(2)
def test_stepping_a_copy_of_equal_precision_equals_plain_training(world_size: int, hook: str | None) -> None:
    """The way of offloaded state, run with parameters that are where the copies are."""
    plain = DistributedDataParallel(small_model())
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW.options)
    inner = small_model()
    model: nn.Module = inner
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MasterWeightPolicy, "applies_to", lambda self, _param: self.offload)
        zero = adamw_for(inner, offload="cpu", shard_by="element", overlap_with_ddp=hook == "overlap")
        if hook == "wrapper":
            model = ShardedDataParallel(inner, zero)
        else:
            model = ddp = DistributedDataParallel(inner)
            if hook == "scatter":
                ddp.register_comm_hook(zero, reduce_scatter_hook)
            elif hook == "overlap":
                ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    assert made_copies(zero, model.parameters())
    for step in range(5):
        for each, stepping in ((model, zero), (plain, optimizer)):
            each.zero_grad()
            loss_of(each, step).backward()
            stepping.step()
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
