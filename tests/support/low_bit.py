"""Checks of optimizer classes with quantised state: state dicts and checkpoints, compared with the plain class."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint
from onecopy.common.nested_tensors import map_tensors

WIDTH = 64
WRAPPED = "__bnb_optimizer_quant_state__"


def model_of() -> nn.Module:
    """A model with two large weights and small other parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.Linear(WIDTH, 3))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Make steps on data that is equal on all ranks."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def values_of(model: nn.Module) -> list[Any]:
    """The values of all parameters."""
    return [param.tolist() for param in model.parameters()]


def gathered(optimizer: ZeroRedundancyOptimizer, to: int) -> dict[str, Any]:
    """The consolidated state dict on every rank."""
    optimizer.consolidate_state_dict(to=to)
    buffer = io.BytesIO()  # torch's pickling between ranks cannot read fp8 tensors, torch.save can
    if optimizer.rank == to:
        torch.save(optimizer.state_dict(), buffer)
    found = [buffer.getvalue()]
    dist.broadcast_object_list(found, src=to)
    result: dict[str, Any] = torch.load(io.BytesIO(found[0]), weights_only=True)
    return result


def comparable(value: Any) -> Any:
    """A state dict with lists in place of tensors, and the class and parts of a tensor that consists of others."""

    def as_lists(tensor: Tensor) -> Any:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return type(tensor).__name__, repr(context), [as_lists(getattr(tensor, name)) for name in names]
        return str(tensor.dtype), tuple(tensor.shape), tensor.detach().float().tolist()

    if isinstance(value, dict) and "state" in value:
        value = {**value, "state": {key: unwrapped(values) for key, values in value["state"].items()}}
    return map_tensors(value, as_lists)


def unwrapped(values: dict[str, Any]) -> dict[str, Any]:
    """State of one parameter without the inner dict into which bitsandbytes' ``state_dict`` puts some of it."""
    found = {key: value for key, value in values.items() if key != WRAPPED}
    return dict(sorted({**found, **values.get(WRAPPED, {})}.items()))


def check_both_directions(optimizer_class: Any, wrapper: type[nn.Module], to: int) -> dict[str, Any]:
    """Train with the plain and the sharded class; each goes on from the other's state dict. Return the sharded one's.

    All ranks have the same data, so that gradients are equal with any number of ranks, except for rounding.
    """
    plain_model, inner = model_of(), model_of()
    plain = optimizer_class(plain_model.parameters())
    optimizer = ZeroRedundancyOptimizer(inner.parameters(), optimizer_class)
    model = wrapper(inner, optimizer) if wrapper is ShardedDataParallel else wrapper(inner)
    assert optimizer.layout.cut_params == ()
    exact = dist.get_world_size() == 2  # a mean of three equal gradients is rounded
    train(plain_model, plain, range(3))
    train(model, optimizer, range(3))
    ours, theirs = gathered(optimizer, to), plain.state_dict()
    before = comparable(theirs)
    if exact:
        assert comparable(ours) == before
        assert values_of(inner) == values_of(plain_model)
    plain.load_state_dict(ours)
    assert comparable(plain.state_dict()) == comparable(ours)
    optimizer.load_state_dict(theirs)
    assert comparable(gathered(optimizer, 0)["state"]) == before["state"]
    train(plain_model, plain, range(3, 5))
    train(model, optimizer, range(3, 5))
    assert comparable(theirs) == before, "the loaded dict shares memory with the optimizer"
    if exact:
        assert values_of(inner) == values_of(plain_model)
    return ours


def check_other_numbers_of_ranks(optimizer_class: Any, root: Path) -> None:
    """Save with all ranks; load with two ranks and into a plain optimizer, which saves for all ranks again."""
    model = model_of()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class)
    train(model, optimizer, range(3))
    state = comparable(gathered(optimizer, 0))
    assert checkpoint.verify(checkpoint.save(root, 1, model=model, optimizer=optimizer))
    group = dist.new_group([0, 1])
    on_two = model_of()
    if dist.get_rank() < 2:
        fewer = ZeroRedundancyOptimizer(on_two.parameters(), optimizer_class, process_group=group)
        train(on_two, fewer, range(9, 10))
        checkpoint.load(root, model=on_two, optimizer=fewer, process_group=group)
        fewer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            assert comparable(fewer.state_dict()) == state
        train(on_two, fewer, range(3, 5))
    plain_model = model_of()
    plain = optimizer_class(plain_model.parameters())
    checkpoint.load(root, model=plain_model, optimizer=plain)
    assert comparable(plain.state_dict()) == state
    train(plain_model, plain, range(3, 5))
    train(model, optimizer, range(3, 5))
    assert values_of(plain_model) == values_of(model)
    if dist.get_rank() < 2:
        assert values_of(on_two) == values_of(model)
    checkpoint.save(root, 2, model=plain_model, optimizer=plain)
    checkpoint.load(root, model=model, optimizer=optimizer)
    assert comparable(gathered(optimizer, 0)) == comparable(plain.state_dict())
