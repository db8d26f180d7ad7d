"""Master weights and offloaded state on an accelerator: the bits of the CPU, few launches, no needless waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from onecopy import (
    MixedPrecision,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    reduce_scatter_hook,
)
from onecopy.step import batched_copies
from onecopy.step.master_weights import MasterWeight, MasterWeights
from tests.accelerator import device
from tests.accelerator.counters import Step
from tests.accelerator.harness import simulated
from tests.support.master_weights import HALF, set_gradients
from tests.support.models import assert_equal

AHEAD = pytest.mark.parametrize("host_ahead", [0, 5, "far"])
MASTERS: dict[str, Any] = {"master_weights": True}
OFFLOAD: dict[str, Any] = {"offload": "cpu"}
BOTH = MASTERS | OFFLOAD
KINDS = pytest.mark.parametrize("ours", [MASTERS, OFFLOAD, BOTH], ids=["masters", "offload", "both"])


def model_on(where: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8)).to(where, dtype)


def train(where: str, ours: dict[str, Any], level: str, group: Any = None) -> tuple[list[Tensor], list[Tensor]]:
    """Train a small model for some steps; return its parameters and this rank's stepped tensors, on the CPU."""
    dtype = HALF if "master_weights" in ours and level != "wrapper" else torch.float32
    inner = model_on(where, dtype)
    offload = {key: value for key, value in ours.items() if key != "master_weights"} if level == "wrapper" else ours
    zero = ZeroRedundancyOptimizer(
        inner.parameters(),
        torch.optim.AdamW,
        lr=1e-2,
        process_group=group,
        shard_by="element",
        overlap_with_ddp=level == "overlap",
        **offload,
    )
    model: nn.Module
    if level == "wrapper":
        precision = MixedPrecision(param_dtype=HALF) if "master_weights" in ours else None
        model = ShardedDataParallel(inner, zero, mixed_precision=precision)
    else:
        model = ddp = DistributedDataParallel(inner, process_group=group)
        if level == "scatter":
            ddp.register_comm_hook(zero, reduce_scatter_hook)
        elif level == "overlap":
            ddp.register_comm_hook(group, hook_with_zero_step(allreduce_hook, ddp, zero))
    for step in range(5):
        zero.zero_grad()
        torch.manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 24).to(where, dtype)).float().square().mean().backward()
        zero.step()
    return on_cpu(inner.parameters()), stepped_by(zero)


def on_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in tensors]


def stepped_by(zero: ZeroRedundancyOptimizer) -> list[Tensor]:
    """The tensors that this rank's inner optimizer steps: master weights, where it has them."""
    return on_cpu(tensor for group in zero.optim.param_groups for tensor in group["params"])


@KINDS
@AHEAD
@pytest.mark.parametrize("level", ["plain", "scatter", "overlap", "wrapper"])
@simulated(2)
def test_training_has_the_bits_of_the_cpu(world_size: int, level: str, host_ahead: Any, ours: dict[str, Any]) -> None:
    expected, expected_stepped = train("cpu", ours, level, dist.new_group(backend="gloo"))
    with device.simulate(seed=2, host_ahead=host_ahead) as run:
        params, stepped = train("sim", ours, level)
    assert run.reports == []
    assert_equal(params, expected, "parameters")
    assert_equal(stepped, expected_stepped, "stepped tensors")


@AHEAD
@simulated(2)
def test_offloaded_tensors_larger_than_a_batch_arrive_whole(world_size: int, host_ahead: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_copies, "BATCH", 100)
        expected, _ = train("cpu", BOTH, "plain", dist.new_group(backend="gloo"))
        with device.simulate(seed=4, host_ahead=host_ahead) as run:
            params, _ = train("sim", BOTH, "plain")
    assert run.reports == []
    assert_equal(params, expected, "parameters")


# Launches and waiting


def params_on_device(count: int, dtype: torch.dtype = HALF) -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(4 + index % 3, 16).to("sim", dtype)) for index in range(count)]


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    host = [torch.empty(param.shape, dtype=param.dtype) for param in params]
    set_gradients(host, step)
    for param, each in zip(params, host, strict=True):
        param.grad = None if each.grad is None else each.grad.to("sim")


def in_step_room(step: Step) -> Counter[str]:
    """Kernels and copies by file, of the files that this concerns."""
    found: Counter[str] = Counter()
    for (name, where), times in (step.kernels + step.copies).items():
        if where.startswith(("onecopy/step/", "onecopy/common/")):
            found[f"{name} at {where}"] += times
    return found


def count_step(count: int, ours: dict[str, Any]) -> tuple[Step, Step]:
    """The counts of one step and of one clipping, after others."""
    with device.simulate(seed=1) as run:
        params = params_on_device(count)
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-2, foreach=True, **ours)
        for step in range(3):
            give_gradients(params, step)
            with run.step() as clipping:
                zero.clip_grad_norm_(0.5)
            with run.step() as stepping:
                zero.step()
    assert run.reports == []
    return stepping, clipping


@pytest.mark.parametrize("ours", [{}, MASTERS, BOTH], ids=["plain", "masters", "offload"])
@simulated(2)
def test_launches_do_not_grow_with_the_number_of_parameters(world_size: int, ours: dict[str, Any]) -> None:
    (few, few_clipping), (many, many_clipping) = (count_step(count, ours) for count in (6, 60))
    assert in_step_room(few) == in_step_room(many)
    assert in_step_room(few_clipping) == in_step_room(many_clipping)
    assert few_clipping.launches == many_clipping.launches <= 14, many_clipping.summary()


class Sum(nn.Module):
    """The sum of the squares of many parameters."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params_on_device(count, torch.float32))

    def forward(self, factor: Tensor) -> Tensor:
        total = factor * 0
        for weight in self.weights:
            total = total + (weight * factor).square().sum()
        return total


def count_sharded_step(count: int, ours: dict[str, Any]) -> tuple[Step, Step]:
    """The counts of one step under ``ShardedDataParallel``, and of scaling all sharded gradients."""
    with device.simulate(seed=1) as run:
        module = Sum(count)
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-2, foreach=True, **ours)
        model = ShardedDataParallel(module, zero, mixed_precision=MixedPrecision(param_dtype=HALF))
        for _ in range(3):
            zero.zero_grad()
            model(torch.ones((), device="sim", dtype=HALF)).backward()
            gradients = [param.grad for param in module.parameters() if param.grad is not None]
            with run.step() as scaling:
                torch._foreach_mul_(gradients, 0.5)
            with run.step() as stepping:
                zero.step()
    assert run.reports == []
    return stepping, scaling


@pytest.mark.parametrize("ours", [{}, OFFLOAD], ids=["masters", "offload"])
@simulated(2)
def test_launches_of_a_sharded_step_do_not_grow_with_the_parameters(world_size: int, ours: dict[str, Any]) -> None:
    (few, _), (many, scaling) = (count_sharded_step(count, ours) for count in (6, 60))
    assert in_step_room(few) == in_step_room(many)
    assert [name for (name, _), times in scaling.kernels.items() for _ in range(times)] == ["_foreach_mul_"]


@KINDS
@simulated(2)
def test_the_host_waits_for_nothing_but_offloaded_gradients(world_size: int, ours: dict[str, Any]) -> None:
    stepping, clipping = count_step(20, ours)
    assert clipping.synchronizations == []
    in_step = [each for each in stepping.synchronizations if "onecopy/step/" in each.site]
    assert len(in_step) == ("offload" in ours), stepping.summary()
    assert all("batched_copies" in each.site for each in in_step)


@simulated(2)
def test_the_norm_is_read_only_where_the_caller_asks_for_an_error(world_size: int) -> None:
    with device.simulate(seed=1) as run:
        params = params_on_device(3)
        zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, lr=0.1)
        give_gradients(params, 0)
        params[1].grad.mul_(torch.inf)  # type: ignore[union-attr]
        with run.step() as counts:
            zero.clip_grad_norm_(1.0)
        assert counts.synchronizations == []
        give_gradients(params, 0)
        params[1].grad.mul_(torch.inf)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="is inf, not finite"):
            zero.clip_grad_norm_(1.0, error_if_nonfinite=True)


# Writing into parameters


@torch.no_grad()
def write_copy(params: list[nn.Parameter], _zero: ZeroRedundancyOptimizer) -> None:
    for param in params:
        param[::2] = 0.625


def write_data_and_refresh(params: list[nn.Parameter], zero: ZeroRedundancyOptimizer) -> None:
    for param in params:
        param.data[::2] = 0.625
    zero.refresh_master_weights()


def replace_data(params: list[nn.Parameter], _zero: ZeroRedundancyOptimizer) -> None:
    for param in params:
        values = param.detach().clone()
        values[::2] = 0.625
        param.data = values


@KINDS
@pytest.mark.parametrize("write", [write_copy, write_data_and_refresh, replace_data])
@simulated(2)
def test_a_written_value_wins_and_the_others_stay_precise(
    world_size: int, write: Callable[..., None], ours: dict[str, Any]
) -> None:
    def run_steps(where: str, group: Any = None) -> tuple[list[Tensor], list[Tensor]]:
        model = model_on(where, HALF if "master_weights" in ours else torch.float32)
        params = list(model.parameters())
        zero = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3, process_group=group, **ours)
        for step in range(5):
            host = [torch.empty(param.shape, dtype=param.dtype) for param in params]
            set_gradients(host, step)
            for param, each in zip(params, host, strict=True):
                param.grad = None if each.grad is None else each.grad.to(where)
            zero.step()
            if step % 2:
                write(params, zero)
        return on_cpu(params), stepped_by(zero)

    expected, expected_stepped = run_steps("cpu", dist.new_group(backend="gloo"))
    with device.simulate(seed=5) as run:
        params, stepped = run_steps("sim")
    assert run.reports == []
    assert_equal(params, expected, "parameters")
    assert_equal(stepped, expected_stepped, "stepped tensors")


@simulated(1)
def test_a_write_before_the_end_of_a_transfer_is_noticed(world_size: int) -> None:
    """A step may increment the version counter later than it wrote, when its transfers have ended."""
    with device.simulate(seed=1):
        param = nn.Parameter(torch.ones(20, device="sim", dtype=HALF))
        copy = torch.ones(20, device="sim")
        masters = MasterWeights([MasterWeight(param, copy, param.detach())])
        masters.refresh_from_params()
        with torch.no_grad():
            param.fill_(2.0)
        masters.increment_versions([param])
        masters.refresh_from_params()
        assert_equal([copy.cpu()], [torch.full((20,), 2.0)], "written value")
        copy.fill_(3.0)
        masters.increment_versions([param])
        masters.refresh_from_params()
        assert_equal([copy.cpu()], [torch.full((20,), 3.0)], "own value")
