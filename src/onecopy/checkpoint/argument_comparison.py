"""The arguments of a save or a load as facts that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from onecopy.checkpoint.optimizer_view import OptimizerView, unwrapped
from onecopy.comm.agreement import Fact
from onecopy.common.digests import tensor_checksums
from onecopy.common.flat_views import flat_views
from onecopy.common.tensor_subclasses import leaves_of


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


def replica_facts(view: OptimizerView) -> list[Fact]:
    """Return checksums of an optimizer's parameters, which must be equal on all ranks that save one model."""
    flats = flat_views([leaf for param in view.params for leaf in leaves_of(param.detach())])
    names = [name for name, param in zip(view.names, view.params, strict=True) for _ in leaves_of(param)]
    checksums = zip(names, tensor_checksums(flats), strict=True)
    return [Fact(f"parameter {name!r}", f"checksum {checksum}") for name, checksum in checksums]


def trainable_facts(model: nn.Module) -> list[Fact]:
    """Return facts about which parameters of a model are trainable, which must be equal on all ranks."""
    params = unwrapped(model).named_parameters()
    return [Fact(f"parameter {name!r}", "trainable" if param.requires_grad else "frozen") for name, param in params]
