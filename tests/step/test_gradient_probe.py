"""A warning if nothing averages the gradients, and none in any correct use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from onecopy import GradientsNotReducedWarning, ZeroRedundancyOptimizer
from onecopy.step.checks import STEPS
from tests.support.harness import distributed
from tests.support.models import assert_replicas_equal, small_model

LOOPS = 6
"""More steps than a warning needs."""


def inputs(step: int) -> Tensor:
    """Other inputs on every rank."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def step_with_alarm(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> None:
    """A step in which the warning is an error, whatever torch's modules have done with the filters."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GradientsNotReducedWarning)
        optimizer.step(closure)


def train(model: nn.Module, optimizer: Optimizer, steps: int = LOOPS) -> None:
    """Ordinary steps, in which the warning is an error."""
    for step in range(steps):
        optimizer.zero_grad()
        model(inputs(step)).square().sum().backward()
        step_with_alarm(optimizer)


def probing(optimizer: ZeroRedundancyOptimizer) -> bool:
    """Whether the next step would compare gradients."""
    probe: Any = optimizer.engine.gradient_probe
    probe.sample(optimizer.engine.params)
    return probe.take() is not None


def sgd(model: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.01, **options)


@distributed(2, 3)
def test_without_ddp_every_rank_is_warned_once_in_the_third_step(world_size: int) -> None:
    model = small_model()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            model(inputs(step)).square().sum().backward()
            optimizer.step()
            assert len(caught) == (step >= 2)
    (warning,) = caught
    assert warning.category is GradientsNotReducedWarning
    assert warning.filename == __file__
    text = str(warning.message)
    assert text.startswith(f"rank {dist.get_rank()}: nothing averages the gradients.")
    assert "Wrap the model in DistributedDataParallel" in text
    assert not probing(optimizer)


@pytest.mark.parametrize("closure", [False, True])
@distributed(2)
def test_a_call_of_the_module_inside_ddp_is_noticed_on_all_ranks_after_a_whole_step(
    world_size: int, closure: bool
) -> None:
    """Under ``.sum()`` the gradient of the last bias is the number of samples on every rank, which hides nothing."""
    model = DistributedDataParallel(small_model())
    optimizer = sgd(model)

    def evaluate() -> float:
        optimizer.zero_grad()
        loss = model.module(inputs(0)).sum()
        loss.backward()
        return float(loss.detach())

    with pytest.raises(GradientsNotReducedWarning, match=r"In 3 steps most of .*not the module inside"):  # noqa: PT012
        for _ in range(LOOPS):
            if not closure:
                evaluate()
            step_with_alarm(optimizer, evaluate if closure else None)
    assert_replicas_equal(model.parameters())
    train(model, optimizer)


# Correct uses. All tests that train have warnings as errors, so that only unusual ones are here.


def compressed(hook: Any, state: Any = None) -> Callable[[], Any]:
    """A hook of torch."""

    def make() -> Any:
        model = DistributedDataParallel(small_model())  # with several buckets PowerSGD may hang on gloo
        model.register_comm_hook(state and state(), hook)
        return model, sgd(model)

    return make


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=1)


def ignored_parameters() -> tuple[Any, ZeroRedundancyOptimizer]:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    ignored = [name for name, _ in layers.named_parameters() if name[0] in "0134"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layers, ignored)
    model = DistributedDataParallel(layers)
    return model, sgd(model)


def model_parallelism() -> tuple[Any, ZeroRedundancyOptimizer]:
    """Two replicas of a model of two parts: ranks 0 and 1 have the first part, ranks 2 and 3 the second."""
    part = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = DistributedDataParallel(small_model(seed=dist.get_rank() // 2), process_group=part)
    return model, sgd(model, process_group=part)


SETUPS: dict[str, Callable[[], tuple[Any, ZeroRedundancyOptimizer]]] = {
    "fp16": compressed(default_hooks.fp16_compress_hook),
    "PowerSGD": compressed(powerSGD_hook.powerSGD_hook, power_state),
    "ignored parameters": ignored_parameters,
    "model parallelism": model_parallelism,
}


@pytest.mark.parametrize("setup", SETUPS)
@distributed(4)
def test_correct_setups_are_no_mistake(world_size: int, setup: str) -> None:
    model, optimizer = SETUPS[setup]()
    train(model, optimizer)
    if setup in ("fp16", "PowerSGD"):  # also where the hook compresses already
        later = sgd(model)
        train(model, later)
        assert not probing(later)


GRADIENTS: dict[str, Callable[[Tensor, int], Tensor | None]] = {
    "zeros": lambda param, _: torch.zeros_like(param),
    "zeros on one rank": lambda param, rank: torch.zeros_like(param) if rank else torch.ones_like(param),
    "none": lambda *_: None,
    "sparse": lambda param, rank: torch.sparse_coo_tensor(
        torch.tensor([[rank]]), torch.ones(1, *param.shape[1:]), param.shape
    ),
    "infinite": lambda param, rank: torch.full_like(param, float("inf") if rank else float("nan")),
    "rounded differently": lambda param, rank: torch.full_like(param, 0.3) * (1 + 1e-7 * rank),
}


@pytest.mark.parametrize("case", GRADIENTS)
@distributed(2)
def test_gradients_that_tell_nothing_cause_no_alarm(world_size: int, case: str) -> None:
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch warns once in a process where this is not said
    params = [nn.Parameter(torch.ones(size, 5)) for size in (3, 4, 40)]
    optimizer = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    for _ in range(STEPS + 1):
        for param in params:
            param.grad = GRADIENTS[case](param, dist.get_rank())
        step_with_alarm(optimizer)
    assert not probing(optimizer)
