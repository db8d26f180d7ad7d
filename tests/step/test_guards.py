"""``nonfinite`` and ``check_replicas_every``: all ranks raise or skip the step, and nothing has changed."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from onecopy import (
    NonfiniteError,
    PeerFailedError,
    RanksDisagreeError,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    reduce_scatter_hook,
)
from tests.support.as_on_accelerators import as_on_accelerators
from tests.support.failures import check_pool, expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import (
    assert_replicas_equal,
    assert_same_tree,
    more_for_earlier_ranks,
    more_for_later_ranks,
    small_inputs,
    small_model,
)

NAME, INDEX = "2.weight", 2
"""The parameter of the small model that is spoiled, and its position among all."""

LEVELS: dict[str, dict[str, Any]] = {
    "level 1": {"shard_by": "parameter"},
    "level 1 by element": {"shard_by": "element"},
    "level 1 master weights": {"master_weights": True},
    "level 1 closure": {},
    "level 2": {},
    "level 3": {},
    "level 3 overlap": {},
}
"""The further arguments of the optimizer at each level."""

ACCELERATED = [level for level in LEVELS if level not in ("level 1 master weights", "level 1 closure")]


class Training:
    """A small model, wrapped as a level needs it, and its optimizer with guards."""

    def __init__(self, level: str, mesh: Any = None, **guards: Any) -> None:
        self.closure = "closure" in level
        self.dtype = torch.bfloat16 if "master weights" in level else torch.float32
        self.module = small_model().to(self.dtype)
        options = {"overlap_with_ddp": True} if level == "overlap hook" else LEVELS[level]
        self.zero = ZeroRedundancyOptimizer(
            self.module.named_parameters(),
            torch.optim.AdamW,
            process_group=None if mesh is None else mesh.get_group(1),
            lr=0.01,
            **options,
            **guards,
        )
        self.model: Any
        if "level 3" in level:
            overlap = "overlap" in level
            self.model = ShardedDataParallel(
                self.module, self.zero, bucket_bytes=1000, overlap_forward=overlap, mesh=mesh
            )
        else:
            self.model = DistributedDataParallel(self.module)
        if level == "level 2":
            self.model.register_comm_hook(self.zero, reduce_scatter_hook)
        if level == "overlap hook":
            self.model.register_comm_hook(None, hook_with_zero_step(allreduce_hook, self.model, self.zero))

    @property
    def param(self) -> Tensor:
        """The parameter that is spoiled."""
        self.zero.wait()
        return self.module.get_parameter(NAME)

    @property
    def owner(self) -> int:
        """The group rank that owns the last element of this parameter."""
        return max((shard for shard in self.zero.layout.shards_of(INDEX)), key=lambda shard: shard.stop).owner

    def loss(self, step: int) -> Tensor:
        """This rank's loss in one step."""
        loss: Tensor = self.model(small_inputs(dist.get_rank(), step).to(self.dtype)).float().square().mean()
        return loss

    def backward(self, step: int) -> Tensor:
        self.zero.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def step(self, step: int) -> Any:
        """Make a step after a backward pass, which a closure repeats."""
        return self.zero.step(lambda: self.backward(step).item()) if self.closure else self.zero.step()

    def step_at(self, step: int) -> Callable[[], object]:
        """A step after its backward pass, in which ranks wait for each other anyway."""
        self.backward(step)
        return lambda: self.step(step)

    def iterate(self, *steps: int) -> None:
        for step in steps:
            self.backward(step)
            self.step(step)

    def values(self) -> list[Tensor]:
        self.zero.wait()
        return [bits(param) for param in self.module.parameters()]

    def snapshot(self) -> list[Any]:
        """Everything that a step which is not made must leave alone."""
        gradients = [getattr(param.grad, "local", param.grad) for param in self.module.parameters()]
        state = [
            (name, bits(value) if isinstance(value, Tensor) else value)
            for param in self.module.parameters()
            for name, value in self.zero.state[param].items()
        ]
        masters = [bits(owned.tensor) for owned in self.zero.engine.inner.owned]
        groups = [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in (*self.zero.param_groups, *self.zero.optim.param_groups)
        ]
        return [self.values(), [bits(each) for each in gradients if each is not None], state, masters, groups]

    def nudge(self) -> None:
        """Change two elements by the smallest amount, in opposite directions."""
        memory = self.param.detach().view(torch.int32)
        memory[0, 0] += 1
        memory[3, 7] -= 1


def bits(tensor: Tensor) -> Tensor:
    """A copy of a tensor as bytes, of which NaN are equal, too."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


@contextlib.contextmanager
def spoiled(training: Training, value: float) -> Iterator[None]:
    """Inside, a backward pass on the last rank writes a value into the last elements of two parameters' gradients."""

    def spoil(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[-1] = value
        return changed

    params = [training.module.get_parameter(name) for name in (NAME, "2.bias")]
    handles = [param.register_hook(spoil) for param in params] if dist.get_rank() == dist.get_world_size() - 1 else []
    yield
    for handle in handles:
        handle.remove()


def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


# Gradients that are not finite


def found_on(global_rank: int) -> str:
    """What the error or the log says."""
    return f"the gradient of parameter {NAME!r} (owned by global rank {global_rank}) has an infinity or a NaN"


def check_spoiled_step(level: str, mode: str, value: float, mesh: Any = None) -> None:
    """All ranks raise or skip a step, nothing has changed, and training goes on as if it had never been made."""
    training = Training(level, mesh, nonfinite=mode)
    training.iterate(0, 1)
    with spoiled(training, value):
        training.backward(2)
        before = training.snapshot()
        found = found_on(training.owner)  # in the first replica of a mesh
        with logged(logging.WARNING) as messages:
            if mode == "raise":
                error = failure_of(lambda: training.step(2))
                expect(error, NonfiniteError, re.escape(f"{found}. step() has changed nothing"))
            else:
                loss = training.step(2)
                assert loss is None or math.isfinite(loss)
                told = [f"step() is skipped on all ranks: {found}"]
                assert messages == (told if training.zero.rank == 0 else [])
    assert_same_tree(training.snapshot(), before, "after the step")
    training.iterate(3, 4)
    plain = Training(level, mesh)
    plain.iterate(0, 1, 3, 4)
    assert_same_tree(training.values(), plain.values(), "in the end")


@pytest.mark.parametrize(("mode", "value"), [("raise", math.nan), ("skip", -math.inf)])
@pytest.mark.parametrize("level", LEVELS)
@distributed(1, 2, 3)
def test_nothing_changes_and_training_goes_on(world_size: int, level: str, mode: str, value: float) -> None:
    check_spoiled_step(level, mode, value)


@pytest.mark.parametrize("mode", ["raise", "skip"])
@distributed(4)
def test_all_replicas_of_a_mesh_do_the_same(world_size: int, mode: str) -> None:
    check_spoiled_step("level 3", mode, math.inf, mesh_of_four())


@pytest.mark.parametrize("level", ACCELERATED)
@distributed(2)
def test_on_an_accelerator_an_error_comes_one_step_later(world_size: int, level: str) -> None:
    with as_on_accelerators():
        training = Training(level, nonfinite="raise")
        training.iterate(0, 1)
        with spoiled(training, math.nan):
            training.iterate(2)
        error = failure_of(training.step_at(3))
        expect(error, NonfiniteError, re.escape(f"in the previous step() {found_on(training.owner)}"))
    check_pool()


@pytest.mark.parametrize("level", ["level 1", "level 3"])
@distributed(2, 3)
def test_a_rank_that_fails_in_the_update_is_an_error_on_all(world_size: int, level: str) -> None:
    training = Training(level, nonfinite="raise")
    training.iterate(0)
    training.backward(1)

    def fail(*_: Any) -> None:
        raise ArithmeticError("the tank is empty")

    if dist.get_rank() == 1:
        training.zero.optim.register_step_pre_hook(fail)
    expect_failure_of([1], training.zero.step, ArithmeticError, "the tank is empty")
    check_pool()


@pytest.mark.parametrize("level", ["level 1", "level 2", "level 3"])
@distributed(2)
def test_a_gradscaler_skips_before_the_guard_looks(world_size: int, level: str) -> None:
    ends: list[Any] = []
    settings: list[dict[str, Any]] = [{}, {"nonfinite": "raise"}]
    for guards in settings:
        training = Training(level, **guards)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            training.zero.zero_grad()
            with spoiled(training, math.inf) if step == 2 else contextlib.nullcontext():
                scaler.scale(training.loss(step)).backward()
            scaler.step(training.zero)
            scaler.update()
        ends.append([training.values(), scaler.get_scale()])
    assert_same_tree(ends[1], ends[0], "in the end")
    assert ends[1][1] == 512.0


@distributed(2)
def test_sparse_and_complex_gradients(world_size: int) -> None:
    words = nn.Embedding(64, 32, sparse=True)
    zero = ZeroRedundancyOptimizer(words.named_parameters(), SGD, lr=0.1, elementwise=False, nonfinite="raise")
    before = words.weight.detach().clone()
    (words(torch.tensor([1, 2, 2])).sum() * math.nan).backward()
    expect(failure_of(zero.step), NonfiniteError, r"parameter 'weight' \(owned by global rank 0\) has an infinity")
    assert torch.equal(words.weight, before)
    words.weight.grad = None
    words(torch.tensor([1, 2, 2])).sum().backward()
    zero.step()
    torch.testing.assert_close(words.weight[2], before[2] - 0.2)

    wave = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    zero = ZeroRedundancyOptimizer([wave], SGD, lr=1.0, nonfinite="raise")
    wave.grad = torch.full((4,), complex(3e38, 3e38), dtype=torch.complex64)  # its absolute value is an infinity
    zero.step()
    assert wave[0].item() == complex(-wave.grad[0].real, -wave.grad[0].imag)
    wave.grad = torch.full((4,), complex(1.0, math.nan), dtype=torch.complex64)
    expect(failure_of(zero.step), NonfiniteError, "has an infinity or a NaN")


class Twice(SGD):
    """Evaluates its closure two times."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


@distributed(2)
def test_a_class_that_evaluates_the_closure_several_times_and_a_join_context_are_refused(world_size: int) -> None:
    layer = nn.Linear(3, 2)
    zero = ZeroRedundancyOptimizer(layer.named_parameters(), Twice, lr=0.1, nonfinite="skip")

    def closure() -> float:
        layer.zero_grad()
        loss: Tensor = layer(torch.ones(1, 3)).sum()
        loss.backward()
        return loss.item()

    error = failure_of(lambda: zero.step(closure))
    expect(error, RuntimeError, r"Twice\.step\(\) evaluates the closure several times")
    check_pool()
    training = Training("level 1", nonfinite="skip")
    with pytest.raises(ValueError, match="nonfinite cannot be combined with Join"):
        Join([training.model, training.zero])


# Parameters that differ between ranks

DIFFERENT = f"parameter {NAME!r}: checksum"


@pytest.mark.parametrize("level", [level for level in LEVELS if level != "level 1 master weights"])
@distributed(2, 3)
def test_all_ranks_raise_before_the_step_in_which_the_comparison_is_due(world_size: int, level: str) -> None:
    odd = world_size - 1
    training, plain = Training(level, check_replicas_every=3), Training(level)
    for each in (training, plain):
        each.iterate(0, 1, 2)
    assert_same_tree(training.values(), plain.values(), "after three steps")
    if dist.get_rank() == odd:
        training.nudge()
    expect_disagreement(odd, training.step_at(3), DIFFERENT, DIFFERENT)
    dist.broadcast(training.param.detach(), 0)
    for each in (training, plain):
        each.iterate(3, 4, 5)
    assert_same_tree(training.values(), plain.values(), "in the end")


@pytest.mark.parametrize("level", ["level 1", "level 3", "level 3 overlap"])
@distributed(2)
def test_on_an_accelerator_parameters_are_compared_too(world_size: int, level: str) -> None:
    with as_on_accelerators():
        training = Training(level, check_replicas_every=2)
        training.iterate(0, 1)
        if dist.get_rank() == 1:
            training.nudge()
        expect_disagreement(1, training.step_at(2), DIFFERENT, DIFFERENT)


@distributed(2)
def test_with_an_overlap_hook_the_comparison_comes_after_the_update(world_size: int) -> None:
    training, plain = Training("overlap hook", check_replicas_every=1), Training("overlap hook")
    for each in (training, plain):
        each.iterate(*range(5))
    assert_same_tree(training.values(), plain.values(), "in the end")
    training.backward(5)
    if dist.get_rank() == 1:
        training.nudge()
    expect_disagreement(1, lambda: training.step(5), DIFFERENT, DIFFERENT)


@pytest.mark.parametrize("counts", [more_for_later_ranks, more_for_earlier_ranks])
@distributed(2)
def test_ranks_without_inputs_take_part(world_size: int, counts: Callable[[int], int]) -> None:
    training = Training("level 1", check_replicas_every=1)
    with Join([training.model, training.zero]):
        training.iterate(*range(counts(dist.get_rank())))
    assert_replicas_equal(training.module.parameters())


@distributed(4)
def test_the_replicas_of_a_mesh_are_compared(world_size: int) -> None:
    training = Training("level 3", mesh_of_four(), check_replicas_every=1)
    training.iterate(0, 1)
    if dist.get_rank() >= 2:  # a whole replica
        training.nudge()
    error = failure_of(training.step_at(2))
    expect(error, RanksDisagreeError, f"between replicas of the mesh.*rank 0: {DIFFERENT}.*rank 1: {DIFFERENT}")
    dist.broadcast(training.param.detach(), 0)
    training.iterate(2)
    if dist.get_rank() == 3:
        training.nudge()
    error = failure_of(training.step_at(3))
    expect(error, PeerFailedError if dist.get_rank() < 2 else RanksDisagreeError, DIFFERENT)
