"""The arguments of a save or a load as facts that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from onecopy.checkpoint.optimizer_view import OptimizerView, unwrapped
from onecopy.comm.agreement import Fact


def argument_facts(model: nn.Module | None, views: Sequence[OptimizerView]) -> list[Fact]:
    """Return facts about the arguments ``model`` and ``optimizer``, which must be equal on all ranks."""
    kinds = [f"{view.kind}{'' if view.zero is None else ' (sharded)'}" for view in views]
    return [
        Fact("model", "None" if model is None else "given"),
        Fact("optimizer", f"{len(kinds)} of them: {', '.join(kinds)}" if kinds else "None"),
    ]


def tensor_facts(model: nn.Module | None, views: Sequence[OptimizerView]) -> list[Fact]:
    """Return facts about the model's tensors and the optimizers' parameters, which must be equal on all ranks."""
    tensors = {} if model is None else unwrapped(model).state_dict()
    facts = [
        Fact(f"{name!r} of the model", f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else "data")
        for name, value in tensors.items()
    ]
    for number, view in enumerate(views):
        for place, (name, param) in enumerate(zip(view.names, view.params, strict=True)):
            facts.append(Fact(f"parameter {place} of optimizer {number}", f"{name!r}, {tuple(param.shape)}"))
    return facts


def trainable_facts(model: nn.Module) -> list[Fact]:
    """Return facts about which parameters of a model are trainable, which must be equal on all ranks."""
    params = unwrapped(model).named_parameters()
    return [Fact(f"parameter {name!r}", "trainable" if param.requires_grad else "frozen") for name, param in params]
