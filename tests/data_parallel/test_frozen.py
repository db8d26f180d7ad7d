"""Frozen parameters cost nothing, unfreezing them later trains as under DDP, and what is deleted is freed."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from onecopy import (
    MixedPrecision,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.comm.gloo import Pairs
from onecopy.data_parallel import bucket
from tests.support.data_parallel import Case, Layers, Run, Searched, hooked_run, inputs_of, layers_loss, side_of
from tests.support.failures import expect, failing, failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal

FROZEN = ("first.weight", "first.bias", "middle.weight")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class Decaying(SGD):
    """A class that is not known, and changes parameters without a gradient."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.99)
        return super().step(closure)


CASES: dict[str, tuple[type[Optimizer], dict[str, Any], dict[str, Any]]] = {
    "cut": (SGD, {"lr": 0.1, "momentum": 0.9}, {}),
    "AdamW, overlap_forward": (AdamW, {"lr": 1e-2}, {"overlap_forward": True}),
    "whole": (Adafactor, {"lr": 1e-2}, {}),
    "whole, many buckets": (Adafactor, {"lr": 1e-2}, {"bucket_bytes": 1, "overlap_forward": True}),
    "unknown class": (Decaying, {"lr": 0.1, "momentum": 0.9}, {}),
}
"""Optimizers, their options, and those of the wrapper."""


def unfreeze_in_turns(side: Run, step: int) -> None:
    """Frozen first, then unfrozen one after the other, once under ``no_sync()``, and one is frozen again."""
    side.optimizer.zero_grad()
    if step == 2:
        side.freeze("middle.weight", frozen=False)
    if step == 4:
        side.freeze("first.weight", "first.bias", frozen=False)
        with side.model.no_sync():
            side.loss(100 + step).backward()
    if step == 6:
        side.freeze("middle.weight")
    side.loss(step).backward()
    side.optimizer.step()


@pytest.mark.parametrize("name", CASES)
@distributed(2, 3, 4)
def test_unfreezing_trains_as_under_ddp(world_size: int, name: str) -> None:
    """Four ranks are a mesh."""
    optimizer, options, wrap = CASES[name]
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        wrap = {**wrap, "mesh": mesh, "group": mesh.get_group(1)}
    plain = side_of(False, Searched, optimizer, options, frozen=FROZEN)
    ours = side_of(True, Searched, optimizer, options, frozen=FROZEN, **wrap)
    for step in range(8):
        for side in (plain, ours):
            unfreeze_in_turns(side, step)
        assert_equal(ours.params, plain.params, f"step {step}", 0.0 if world_size == 2 else 1e-5)
    assert_replicas_equal(ours.params)


@distributed(2)
def test_frozen_parameters_have_no_bucket_and_are_not_sent(world_size: int) -> None:
    """Of any type, also those in which there are no gradients."""
    module = nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 20))
    module[0].requires_grad_(False)
    for number, dtype in enumerate((torch.int8, torch.bool, torch.float8_e5m2)):
        quantised = nn.Parameter(torch.arange(9).to(dtype), requires_grad=False)
        module.register_parameter(f"quantised{number}", quantised)
    frozen = [param for param in module.parameters() if not param.requires_grad]
    places = [param.data_ptr() for param in frozen]
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=1e-3)
    model = ShardedDataParallel(module, optimizer, mixed_precision=MixedPrecision(reduce_dtype=torch.float32))
    sent: list[int] = []
    send = Pairs.send

    def counted(self: Pairs, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.numel() * tensor.element_size())
        return send(self, tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pairs, "send", counted)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(2, 100)).square().mean().backward()
            optimizer.step()
    trained = sum(param.numel() * 4 for param in module[1].parameters())
    assert trained <= sum(sent) / 2 <= 1.1 * trained, "half of them in a reduce-scatter, and half in an all-gather"
    assert [param.data_ptr() for param in frozen] == places
    assert all(param.grad is None for param in frozen)
    held = sum(param.grad.local.numel() for param in module[1].parameters())  # type: ignore[union-attr]
    assert held <= trained / 4 / 2 + 64


@distributed(2)
def test_a_rank_without_memory_for_a_new_bucket_changes_nothing(world_size: int) -> None:
    plain, ours = (side_of(which, Searched, frozen=FROZEN) for which in (False, True))
    for side in (plain, ours):
        side.iterate(0)
        side.freeze(*FROZEN, frozen=False)
    places = [param.data_ptr() for param in ours.params]
    with failing(bucket, "_flat_bucket", 1, calls=1):
        failure_of(ours.loss(1).backward)
    assert [param.data_ptr() for param in ours.params] == places
    for step in range(2, 4):
        for side in (plain, ours):
            side.iterate(step)
    assert_equal(ours.params, plain.params, "parameters")


class Opaque(Layers):
    """Returns an object of its own."""

    class Output:
        """Has the outputs in an attribute."""

        def __init__(self, outputs: Tensor) -> None:
            self.outputs = outputs

    def forward(self, inputs: Tensor) -> Any:
        return self.Output(super().forward(inputs))


@distributed(2)
def test_an_output_in_which_no_tensor_is_found(world_size: int) -> None:
    """It trains if every rank reaches parameters; if no gradient arrives, the step says what may be the cause."""
    ours = side_of(True, Opaque)
    for step in range(2):
        ours.optimizer.zero_grad()
        ours.model(inputs_of(dist.get_rank(), step)).outputs.square().mean().backward()
        ours.optimizer.step()
        assert_replicas_equal(ours.params)
        ours.optimizer.zero_grad()
        ours.model(inputs_of(dist.get_rank(), 1))
        text = "forward.. returned a .*Output, in which .* finds no tensor"
        expect(failure_of(ours.optimizer.step), RuntimeError, text)


def level_3(**options: Any) -> Run:
    return side_of(True, Layers, AdamW, {"lr": 1e-2}, **options)


LIVES: dict[str, Callable[[], Run]] = {
    "": level_3,
    "overlap_forward": lambda: level_3(overlap_forward=True),
    "mixed precision": lambda: level_3(mixed_precision=BF16),
    "unfrozen": lambda: level_3(frozen=FROZEN),
    "unfrozen, overlap_forward": lambda: level_3(frozen=FROZEN, overlap_forward=True),
    "reduce_scatter_hook": lambda: hooked_run(Case(model=Layers, loss=layers_loss), reduce_scatter_hook),
    "after backward": lambda: hooked_run(Case(model=Layers, loss=layers_loss), hook_with_zero_step),
    "interleaved": lambda: hooked_run(Case(model=Layers, loss=layers_loss), hook_with_zero_step_interleaved),
}


def live(name: str, steps: int = 3) -> None:
    """Construct, train, delete; with ``overlap_forward`` the last step's messages are in flight then."""
    run = LIVES[name]()
    for step in range(steps):
        if step == 1:
            run.freeze(*FROZEN, frozen=False)
        run.iterate(step)


def alive() -> tuple[int, int, int]:
    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/fd")), threading.active_count()


@pytest.mark.parametrize("name", LIVES)
@distributed(2)
def test_deleting_it_frees_everything_by_counting_alone(world_size: int, name: str) -> None:
    """At any time, while another one goes on."""
    other = LIVES[name]()
    for _ in range(3):
        live(name)
    dist.barrier()
    gc.collect()
    gc.disable()
    try:
        before = alive()
        for steps in (0, 1, 3, 3, 4):
            live(name, steps)
        dist.barrier()
        deadline = time.monotonic() + 5.0
        while alive() > before and time.monotonic() < deadline:
            time.sleep(0.01)  # gloo's threads let go of a message after it has arrived
        assert alive() <= before, "tensors, descriptors and threads"
    finally:
        gc.enable()
    other.iterate(0)
