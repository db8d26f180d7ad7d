"""The DDP hooks on the simulated accelerator, under DDP's own reducer: numbers, orders of streams, and costs."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import PeerFailedError, ReduceScatter, ZeroRedundancyOptimizer
from onecopy.comm import collectives, limits
from tests.accelerator import device
from tests.accelerator.counters import Step
from tests.accelerator.harness import HYBRID, SIMCCL, simulated

LAYERS = 5
SIZE = 40
"""Width of a layer, which is large enough to be cut among ranks."""

ONE_LAYER = 4 * (SIZE * SIZE + SIZE) / 2**20
"""Size of a bucket, in MB, that a layer fills."""

OVERLAPS = {
    "after backward": onecopy.hook_with_zero_step,
    "interleaved": onecopy.hook_with_zero_step_interleaved,
}
HOOKS = pytest.mark.parametrize("hook", ["reduce-scatter", *OVERLAPS])
OVERLAP_HOOKS = pytest.mark.parametrize("hook", OVERLAPS)
AHEAD = pytest.mark.parametrize(("seed", "host_ahead"), [(0, 0), (1, 5), (2, "far"), (3, "far")])


def as_if_large() -> Any:
    """Pad parts of different lengths only where large ones would be padded."""
    return mock.patch.object(limits, "PADDING_BYTES_PER_RANK", 0)


class Model(nn.Module):
    """Some layers, and one that is used in every other iteration only."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(LAYERS))
        self.branch = nn.Linear(SIZE, SIZE) if branches else None

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        if self.branch is not None and (step + dist.get_rank()) % 4 == 0:
            inputs = self.branch(inputs)
        return inputs.pow(2).sum()


def make(where: str, group: Any = None, **ddp_options: Any) -> DistributedDataParallel:
    """Return a small model with a bucket for each layer."""
    torch.manual_seed(1)
    model = Model(ddp_options.get("find_unused_parameters", False)).to(where)
    return DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": ONE_LAYER, **ddp_options})


def register(ddp: DistributedDataParallel, hook: str, optimizer: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Construct the sharded optimizer and register a hook for it."""
    dtype = options.pop("reduce_dtype", None)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer, lr=0.01, overlap_with_ddp=hook in OVERLAPS, **options)
    if hook in OVERLAPS:
        ddp.register_comm_hook(None, OVERLAPS[hook](allreduce_hook, ddp, zero))
    else:
        ddp.register_comm_hook(ReduceScatter(zero, dtype), onecopy.reduce_scatter_hook)
    return zero


def backward(ddp: DistributedDataParallel, step: int, factor: float = 1.0) -> None:
    torch.manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(4, SIZE)
    where = next(ddp.parameters()).device
    if where.type != "cpu":
        inputs = inputs.pin_memory().to(where, non_blocking=True)
    (ddp(inputs, step) * factor).backward()


def iterate(ddp: DistributedDataParallel, optimizer: Any, step: int, zero_by: str = "optimizer") -> None:
    """Run one iteration; ``zero_by`` says how the gradients are zeroed before it."""
    if zero_by == "in place":
        ddp.zero_grad(set_to_none=False)
    elif zero_by != "nothing":
        (optimizer if zero_by == "optimizer" else ddp).zero_grad()
    backward(ddp, step)
    optimizer.step()


def trained_plainly(steps: int = 6, zero_by: str = "optimizer", **ddp_options: Any) -> list[Tensor]:
    """Return the parameters after training on the CPU with DDP and a plain optimizer."""
    plain = make("cpu", dist.new_group(backend="gloo"), **ddp_options)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for step in range(steps):
        iterate(plain, reference, step, zero_by)
    return [param.detach() for param in plain.parameters()]


def assert_trained_alike(
    hook: str, ddp_options: dict[str, Any], options: dict[str, Any], seed: int, host_ahead: Any, tolerance: float
) -> None:
    expected = trained_plainly(**ddp_options)
    with as_if_large(), device.simulate(seed=seed, host_ahead=host_ahead) as run:
        ddp = make("sim", **ddp_options)
        zero = register(ddp, hook, **options)
        for step in range(6):
            iterate(ddp, zero, step)
        actual = [param.detach().cpu() for param in ddp.parameters()]
    assert run.reports == []
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@AHEAD
@HOOKS
@pytest.mark.parametrize("shard_by", ["parameter", "element"])
@simulated(2, 3)
def test_training_equals_plain_ddp(world_size: int, hook: str, shard_by: str, seed: int, host_ahead: Any) -> None:
    views = {"gradient_as_bucket_view": seed % 2 == 0}
    assert_trained_alike(hook, views, {"shard_by": shard_by}, seed, host_ahead, 0.0 if world_size == 2 else 1e-4)


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@HOOKS
@simulated(2, 3)
def test_a_parameter_without_a_gradient_is_not_updated(world_size: int, hook: str, backend: str) -> None:
    assert_trained_alike(hook, {"find_unused_parameters": True}, {}, 1, "far", 0.0 if world_size == 2 else 1e-4)


@OVERLAP_HOOKS
@simulated(2)
def test_a_static_graph_equals_plain_ddp(world_size: int, hook: str) -> None:
    assert_trained_alike(hook, {"static_graph": True}, {}, 1, "far", 0.0)


@simulated(2, 3)
def test_uneven_inputs_equal_plain_ddp(world_size: int) -> None:
    plain = make("cpu", dist.new_group(backend="gloo"))
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    steps = 4 + dist.get_rank()
    with Join([plain]):
        for step in range(steps):
            iterate(plain, reference, step)
    with device.simulate(seed=1, host_ahead="far") as run:
        ddp = make("sim")
        zero = register(ddp, "reduce-scatter")
        with Join([ddp, zero], model=ddp):
            for step in range(steps):
                iterate(ddp, zero, step)
        actual = [param.detach().cpu() for param in ddp.parameters()]
    assert run.reports == []
    if dist.get_rank() == world_size - 1:  # plain optimizers of ranks without inputs do not step
        for ours, theirs in zip(actual, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shard_by", ["parameter", "element"])
@simulated(2, 3)
def test_a_backend_that_averages_gives_the_same(world_size: int, shard_by: str) -> None:
    with mock.patch.object(collectives, "AVERAGING_BACKENDS", {"simccl"}):
        assert_trained_alike("reduce-scatter", {}, {"shard_by": shard_by}, 1, "far", 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@simulated(2)
def test_gradients_are_sent_in_another_type(world_size: int, dtype: torch.dtype) -> None:
    assert_trained_alike("reduce-scatter", {}, {"reduce_dtype": dtype}, 1, "far", 3e-2)


def steady_step(hook: str, zero_by: str = "optimizer", shard_by: str = "element") -> Step:
    """Train, and return the counts of the last iteration."""
    with as_if_large(), device.simulate(seed=1, host_ahead="far") as run:
        ddp = make("sim")
        zero = register(ddp, hook, shard_by=shard_by)
        for step in range(6):
            with run.step():
                iterate(ddp, zero, step, zero_by)
    assert run.reports == []
    return run.last


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@pytest.mark.parametrize("zero_by", ["optimizer", "model", "in place"])
@HOOKS
@simulated(2, 3)
def test_the_host_waits_for_flags_of_the_last_step_only(world_size: int, hook: str, backend: str, zero_by: str) -> None:
    step = steady_step(hook, zero_by)
    assert all(each.kind == "event" and each.age == 1 for each in step.synchronizations), step.summary()
    assert not [name for name, _ in step.copies if "pageable" in name], step.summary()


@pytest.mark.parametrize("shard_by", ["parameter", "element"])
@simulated(2, 3)
def test_a_bucket_costs_one_reduce_scatter_and_no_kernel_per_parameter(world_size: int, shard_by: str) -> None:
    step = steady_step("reduce-scatter", shard_by=shard_by)
    names = [each.name for each in step.collectives]
    buckets = sum("reduce_scatter" in name for name in names)
    assert buckets == LAYERS
    assert sum("all_reduce" in name for name in names) == 1
    assert len(names) == buckets + 2, step.summary()  # the vote, and the updated parameters
    ours = sum(n for (_, where), n in step.kernels.items() if "reduce_scatter.py" in where or "reduction.py" in where)
    assert ours <= 8 * buckets + 16, step.summary()
    sent = sum(each.size for each in step.collectives if "reduce_scatter" in each.name)
    assert sent <= 4 * LAYERS * (SIZE * SIZE + SIZE) * 17 / 16, step.summary()


@OVERLAP_HOOKS
@simulated(2, 3)
def test_an_overlapped_bucket_is_shared_by_one_collective_of_the_same_group(world_size: int, hook: str) -> None:
    step = steady_step(hook)
    names = [each.name for each in step.collectives]
    assert sum("all_reduce" in name for name in names) == LAYERS + 1, step.summary()  # and the vote
    assert sum("all_gather" in name for name in names) == LAYERS
    assert len({each.group for each in step.collectives}) == 1
    order = ["all_reduce" in name for name in names[:-1]]
    # An interleaved bucket is shared when the next one is reduced.
    interleaved = [True, *[True, False] * (LAYERS - 1), False]
    assert order == (interleaved if hook == "interleaved" else [True] * LAYERS + [False] * LAYERS)


class FailsOnce(torch.optim.SGD):
    """An optimizer whose update raises on one rank when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if FailsOnce.fails and dist.get_rank() == 1:
            raise LookupError("no update today")
        return super().step(closure)


@OVERLAP_HOOKS
@simulated(2, 3)
def test_a_failed_update_raises_at_once_there_and_in_the_next_pass_elsewhere(world_size: int, hook: str) -> None:
    with device.simulate(seed=1) as run:
        ddp = make("sim")
        zero = register(ddp, hook, FailsOnce)
        for step in range(3):
            iterate(ddp, zero, step)
        FailsOnce.fails = True
        try:
            if dist.get_rank() == 1:
                with pytest.raises(LookupError, match="no update today"):
                    backward(ddp, 3)
            else:
                backward(ddp, 3)
                zero.step()
        finally:
            FailsOnce.fails = False
        zero.zero_grad()
        if dist.get_rank() != 1:
            with pytest.raises(PeerFailedError, match=r"previous update inside backward\(\) failed on global rank 1"):
                backward(ddp, 4)
    assert run.reports == []


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("zero_by", ["in place", "nothing"])
@simulated(2, 3)
def test_gradients_that_are_kept_equal_plain_ddp(world_size: int, zero_by: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    expected = trained_plainly(zero_by=zero_by, **options)
    with device.simulate(seed=1, host_ahead="far") as run:
        ddp = make("sim", **options)
        zero = register(ddp, "reduce-scatter")
        for step in range(6):
            iterate(ddp, zero, step, zero_by)
        actual = [param.detach().cpu() for param in ddp.parameters()]
    assert run.reports == []
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
