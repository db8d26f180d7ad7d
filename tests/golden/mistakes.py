"""Calls that must be refused: for each of them the types of the errors are recorded, rank by rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import AdamW

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint, hook_with_zero_step
from tests.golden.programs import Program
from tests.golden.running import Run


def zero(params: Any, kind: Any = AdamW, **options: Any) -> Any:
    """An optimizer of ours."""
    return ZeroRedundancyOptimizer(params, kind, **({"lr": 0.1} | options))


def trained(level: str = "1", steps: int = 2, **options: Any) -> Run:
    """A run after some steps."""
    run = Run(Program(level=level, **options))
    for step in range(steps):
        run.step(step)
    return run


def net(width: int = 40) -> nn.Module:
    """A small model."""
    return nn.Linear(width, 40)


def twice(level: str) -> None:
    """Two optimizers over the same parameters, in one wrapper or hook."""
    run = Run(Program(level="1"))
    pair = [run.optimizers[0], zero(run.module.parameters())]
    if level == "3":
        ShardedDataParallel(run.module, pair)
        return
    run.optimizers, run.program = pair, Program(level="2")
    run.model = run.wrap()
    run.loss(0, 0).backward()


def load_other(change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a state dict that is not this optimizer's."""
    run = trained()
    boxes = [copy.deepcopy(run.state())]
    dist.broadcast_object_list(boxes)
    state = boxes[0][0]
    change(state)
    run.optimizers[0].load_state_dict(state)


def saved(folder: str) -> Run:
    """A run that has a checkpoint."""
    run = trained()
    checkpoint.save(folder, 1, model=run.model, optimizer=run.optimizers)
    return run


def load_damaged(folder: str, name: str, content: bytes | None) -> None:
    """Load a checkpoint of which one file is another."""
    run = saved(folder)
    dist.barrier()
    path = os.path.join(folder, "step-00000001", name)
    if dist.get_rank() == 0:
        with open(path, "rb") as file:
            old = file.read()
        with open(path, "wb") as file:
            file.write(old[:-1] + bytes([old[-1] ^ 1]) if content is None else content)
    dist.barrier()
    checkpoint.load(os.path.join(folder, "step-00000001"), model=run.model, optimizer=run.optimizers)


def save_twice(folder: str) -> None:
    """Save a step that is there already."""
    run = saved(folder)
    checkpoint.save(folder, 1, model=run.model, optimizer=run.optimizers)


def load_other_model(folder: str, model: nn.Module) -> None:
    """Load a checkpoint into another model."""
    saved(folder)
    checkpoint.load(folder, model=model)


def missing_gradient(level: str) -> None:
    """One rank has no gradient for a parameter."""
    run = trained(level)
    run.optimizers[0].zero_grad()
    run.backward(2)
    if dist.get_rank() == 1:
        run.module.second.weight.grad = None
    run.optimizers[0].step()


def overlap(call: Callable[[Run], Any], backward: bool = True) -> None:
    """Something after a backward pass that has updated already."""
    run = trained("interleaved", 4)
    run.optimizers[0].zero_grad()
    if backward:
        run.backward(4)
    call(run)


def other_optimizer(level: str) -> None:
    """A hook or a wrapper for an optimizer that is no optimizer of ours."""
    run = Run(Program())
    run.program = Program(level=level)
    run.model = run.wrap()
    run.backward(0)


def unequal_steps() -> None:
    """Ranks with other numbers of the same option, in a step."""
    run = trained()
    run.optimizers[0].param_groups[0]["lr"] *= 1 + dist.get_rank()
    run.step(2)


def clip_after_update(run: Run) -> None:
    """Gradients that are changed after they were used."""
    nn.utils.clip_grad_norm_(run.module.parameters(), 1e-3)
    run.optimizers[0].step()


def scaled_overlap(run: Run) -> None:
    """A step of a scaler."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(run.loss(5, 0)).backward()
    scaler.step(run.optimizers[0])


def not_finite(level: str) -> None:
    """A gradient that is infinite on one rank."""
    trained(level, 3, overflow=True, zero={"nonfinite": "raise"})


def other_replica() -> None:
    """A parameter that another rank has otherwise."""
    run = trained(zero={"check_replicas_every": 1})
    with torch.no_grad():
        run.module.second.bias.add_(dist.get_rank())
    run.optimizers[0].step()


class FailsOnOne(AdamW):
    """Raises on one rank."""

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise LookupError("mine")
        return super().step(closure)


def fails_on_one() -> None:
    """The inner optimizer raises on one rank."""
    run = Run(Program())
    run.optimizers = [zero(run.module.parameters(), FailsOnOne)]
    run.step(0)


def rank() -> int:
    """This rank."""
    return dist.get_rank()


MISTAKES: dict[str, Callable[[str], Any]] = {
    "unequal lr": lambda _: zero(net().parameters(), lr=0.1 * (1 + rank())),
    "unequal lr in a step": lambda _: unequal_steps(),
    "unequal class": lambda _: zero(net().parameters(), AdamW if rank() else torch.optim.Adam),
    "unequal shape": lambda _: zero(net(40 + rank()).parameters()),
    "unequal dtype": lambda _: zero(net().to(torch.float64 if rank() else torch.float32).parameters()),
    "unequal number of parameters": lambda _: zero(list(net().parameters())[: 1 + rank()]),
    "unequal masters": lambda _: zero(net().bfloat16().parameters(), master_weights=bool(rank())),
    "no parameters": lambda _: zero([]),
    "no parameters on one rank": lambda _: zero([] if rank() else net().parameters()),
    "a parameter twice": lambda _: zero([*(params := list(net().parameters())), params[0]]),
    "not a leaf": lambda _: zero([param * 2 for param in net().parameters()]),
    "not a tensor": lambda _: zero(["weight"]),
    "no class": lambda _: ZeroRedundancyOptimizer(net().parameters(), lr=0.1),
    "an instance": lambda _: zero(net().parameters(), AdamW(net().parameters())),
    "LBFGS": lambda _: zero(net().parameters(), torch.optim.LBFGS),
    "unknown option": lambda _: zero(net().parameters(), nonsense=1),
    "negative lr": lambda _: zero(net().parameters(), lr=-1.0),
    "bad nonfinite": lambda _: zero(net().parameters(), nonfinite="maybe"),
    "bad offload": lambda _: zero(net().parameters(), offload="disk"),
    "consolidation to no rank": lambda _: trained().optimizers[0].consolidate_state_dict(to=7),
    "state_dict without consolidation": lambda _: trained().optimizers[0].state_dict(),
    "group with a known parameter": lambda _: (
        (run := trained()).optimizers[0].add_param_group({"params": [run.module.scale]})
    ),
    "unequal group": lambda _: (
        trained().optimizers[0].add_param_group({"params": [("new", nn.Parameter(torch.ones(3 + rank())))]})
    ),
    "load another shape": lambda _: load_other(lambda state: state["state"][1].update(exp_avg=torch.ones(3))),
    "load fewer parameters": lambda _: load_other(lambda state: state["param_groups"][0]["params"].pop()),
    "load more groups": lambda _: load_other(lambda state: state["param_groups"].append({"params": []})),
    "load no dict": lambda _: trained().optimizers[0].load_state_dict({}),
    "gradient missing on one rank": lambda _: missing_gradient("1"),
    "gradient missing on one rank, level 2": lambda _: missing_gradient("2"),
    "infinite gradient": lambda _: not_finite("1"),
    "infinite gradient, level 2": lambda _: not_finite("2"),
    "infinite gradient, level 3": lambda _: not_finite("3"),
    "replicas differ": lambda _: other_replica(),
    "inner step fails on one rank": lambda _: fails_on_one(),
    "two optimizers over one parameter, level 2": lambda _: twice("2"),
    "two optimizers over one parameter, level 3": lambda _: twice("3"),
    "not our optimizer, level 2": lambda _: other_optimizer("2"),
    "not our optimizer, level 3": lambda _: other_optimizer("3"),
    "parameter of no optimizer, level 3": lambda _: ShardedDataParallel(module := net(), zero([module.weight])),
    "clipping under overlap": lambda _: overlap(clip_after_update),
    "closure under overlap": lambda _: overlap(lambda run: run.optimizers[0].step(lambda: 1.0)),
    "two passes under overlap": lambda _: overlap(lambda run: run.backward(5)),
    "scaler under overlap": lambda _: overlap(scaled_overlap, backward=False),
    "hook without overlap_with_ddp": lambda _: hook_with_zero_step(
        allreduce_hook, (run := trained()).model, run.optimizers[0]
    ),
    "group after wrapping, level 3": lambda _: (
        trained("3").optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    ),
    "deepcopy": lambda _: copy.deepcopy(trained().optimizers[0]),
    "save twice": save_twice,
    "save what cannot be saved": lambda folder: checkpoint.save(folder, 1, model=net(), extra={"x": object()}),
    "save different steps": lambda folder: checkpoint.save(folder, 1 + rank(), model=net()),
    "load nothing": lambda folder: checkpoint.load(folder, model=net()),
    "load into another model": lambda folder: load_other_model(folder, net()),
    "load a damaged file": lambda folder: load_damaged(folder, "rank-00001.safetensors", None),
    "load a cut file": lambda folder: load_damaged(folder, "rank-00000.safetensors", b"1234"),
    "load a damaged manifest": lambda folder: load_damaged(folder, "manifest.json", b"{}"),
}


def made(name: str, folder: str) -> dict[str, Any]:
    """Make a mistake; return the type of the error."""
    try:
        MISTAKES[name](folder)
    except Exception as error:
        return {"errors": type(error).__name__, "text": str(error).replace(folder, "FOLDER")[:300]}
    return {"errors": "none"}
