"""The table of optimizers that training is compared over, and the runner that compares two runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from pytorch_optimizer import AdaBelief, Lion
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import ZeroRedundancyOptimizer
from tests.support.models import (
    Everything,
    assert_equal,
    assert_replicas_equal,
    assert_same_tree,
    everything_inputs,
    values,
)

STEPS = 20

WHOLE = ("parameter",)
BOTH = ("parameter", "element")

ROUNDING = 1e-6
"""What results may differ by with more than two ranks, relative to values of about 1.

Adding three or more floats depends on the order, which is the process group's affair; the update itself is exact. So
a gradient may be off by an ulp (6e-8), and weights of order 1 that move by about 1e-3 to 1e-2 in each of 20 steps may
be off by that much of their movement and one rounding of their own per step: 20 ulps, 1.2e-6, at the very worst.
"""


@dataclass(frozen=True)
class Case:
    """One optimizer to compare."""

    name: str
    optimizer: type[Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    policies: tuple[str, ...] = BOTH  # the values of shard_by to try
    elementwise: bool | None = None  # what the user declares of the class
    cuts: bool = True  # whether parameters are cut under shard_by="element"
    rest: tuple[type[Optimizer], dict[str, Any]] | None = None  # for what is not a matrix, if the class asks for those
    schedule_free: bool = False  # whether train() and eval() are part of its use
    tolerance: float = ROUNDING  # what more than two ranks may differ by
    magnifies: bool = False  # a rounding of the gradients, so that they must be added up in the same order


ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
MOMENTUM = {"lr": 0.1, "momentum": 0.9}
CENTERED = {"lr": 1e-3, "centered": True}
MUON: dict[str, Any] = {"cuts": False, "rest": (torch.optim.AdamW, ADAMW), "magnifies": True}

CASES = (
    Case("SGD with momentum", torch.optim.SGD, {**MOMENTUM, "weight_decay": 1e-3}),
    Case("SGD Nesterov", torch.optim.SGD, {**MOMENTUM, "nesterov": True}),
    Case("SGD fused", torch.optim.SGD, {**MOMENTUM, "weight_decay": 1e-3, "fused": True}),
    Case("Adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-3}),
    Case("AdamW", torch.optim.AdamW, ADAMW),
    Case("AdamW amsgrad", torch.optim.AdamW, {**ADAMW, "amsgrad": True}),
    Case("AdamW foreach", torch.optim.AdamW, {**ADAMW, "foreach": True}),
    Case("AdamW fused", torch.optim.AdamW, {**ADAMW, "fused": True}),
    Case("AdamW maximize", torch.optim.AdamW, {**ADAMW, "maximize": True}),
    Case("RMSprop", torch.optim.RMSprop, {"lr": 1e-3}),
    Case("RMSprop with momentum", torch.optim.RMSprop, {**CENTERED, "momentum": 0.9}, magnifies=True),
    Case("Adagrad", torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1}),
    Case("NAdam", torch.optim.NAdam, {"lr": 1e-2}),
    Case("RAdam", torch.optim.RAdam, {"lr": 1e-2}),
    Case("Adamax", torch.optim.Adamax, {"lr": 1e-2}),
    Case("Adadelta", torch.optim.Adadelta, {"lr": 1.0}),
    Case("ASGD", torch.optim.ASGD, {"lr": 1e-1, "t0": 5.0}),
    Case("Rprop", torch.optim.Rprop, {"lr": 1e-3}),
    Case("Adafactor", torch.optim.Adafactor, {"lr": 1e-2}, WHOLE, cuts=False),
    Case("Muon and AdamW", torch.optim.Muon, {"lr": 1e-2}, WHOLE, **MUON),
    Case("AdaBelief", AdaBelief, {"lr": 1e-3}, WHOLE, cuts=False),
    Case("Lion", Lion, {"lr": 1e-3, "weight_decay": 0.1}, WHOLE, cuts=False),
    Case("Lion declared element-wise", Lion, {"lr": 1e-3, "weight_decay": 0.1}, elementwise=True),
    Case("schedule-free", AdamWScheduleFree, {"lr": 1e-2, "warmup_steps": 5}, WHOLE, cuts=False, schedule_free=True),
    Case("schedule-free element-wise", AdamWScheduleFree, {"lr": 1e-2}, elementwise=True, schedule_free=True),
)

IN_ANY_ORDER = tuple(case for case in CASES if not case.magnifies)
"""Cases that may be compared with gradients that are added up in another order."""

Make = Callable[[list[Tensor], type[Optimizer], dict[str, Any]], Optimizer]


@dataclass(frozen=True)
class Run:
    """The result of training: the parameters after every step and in evaluation, and the optimizers."""

    steps: list[list[Tensor]]
    evaluation: list[Tensor]
    optimizers: list[Optimizer]


def train(case: Case, make: Make) -> Run:
    """Train the model for ``STEPS`` steps, from the same weights and on the same data every time."""
    torch.manual_seed(11)
    ddp = DistributedDataParallel(Everything(), find_unused_parameters=True)
    params: list[Tensor] = list(ddp.parameters())
    optimizers = [make(*part) for part in parts_of(case, params)]
    steps = []
    for _ in train_steps(case, ddp, optimizers, STEPS):
        ddp.zero_grad()
        steps.append(values(params))
    return Run(steps, values(params), optimizers)


def parts_of(case: Case, params: list[Tensor]) -> list[tuple[list[Tensor], type[Optimizer], dict[str, Any]]]:
    """Return the parameters, the class and the options of each optimizer of a case."""
    if case.rest is None:
        return [(params, case.optimizer, case.options)]
    return [
        ([param for param in params if param.dim() == 2], case.optimizer, case.options),
        ([param for param in params if param.dim() != 2], *case.rest),
    ]


def train_steps(case: Case, model: Any, optimizers: Sequence[Optimizer], steps: int) -> Iterator[int]:
    """Train a wrapped ``Everything``, half way with a frozen layer; yield after every step, for resetting gradients."""
    switch_mode(case, optimizers, "train")
    for step in range(steps):
        if step == steps // 2:
            model.module.frozen_later.weight.requires_grad_(False)
            switch_mode(case, optimizers, "eval")
            switch_mode(case, optimizers, "train")
        words, targets, take_branch = everything_inputs(dist.get_rank(), step)
        functional.cross_entropy(model(words, take_branch), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield step
    switch_mode(case, optimizers, "eval")


def switch_mode(case: Case, optimizers: Sequence[Optimizer], mode: str) -> None:
    """Call ``train()`` or ``eval()`` of schedule-free optimizers."""
    for optimizer in optimizers:
        if case.schedule_free:
            getattr(optimizer, mode)()


def make_plain(params: list[Tensor], optimizer: type[Optimizer], options: dict[str, Any]) -> Optimizer:
    return optimizer(params, **options)


def compare(ours: Run, plain: Run, what: str, tolerance: float) -> None:
    """Parameters at every step, then the whole state dict."""
    for step, (mine, theirs) in enumerate(zip(ours.steps, plain.steps, strict=True)):
        assert_equal(mine, theirs, f"{what}, step {step}", tolerance)
    assert_equal(ours.evaluation, plain.evaluation, f"{what}, evaluation", tolerance)
    assert_replicas_equal(ours.evaluation)
    for sharded, whole in zip(ours.optimizers, plain.optimizers, strict=True):
        assert isinstance(sharded, ZeroRedundancyOptimizer)
        sharded.consolidate_state_dict(to=1)
        if dist.get_rank() == 1:
            gathered, expected = sharded.state_dict(), whole.state_dict()
            assert_same_tree(gathered["param_groups"], expected["param_groups"], f"{what}, param_groups")
            assert_same_tree(gathered["state"], expected["state"], f"{what}, state", tolerance)
