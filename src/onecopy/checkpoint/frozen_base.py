"""The frozen parameters of a model, which a checkpoint with ``trainable_only`` has as digests only.

In a save each rank computes a part of the digests. In a load each rank compares all of its own parameters, so that a
rank that was given another base is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from onecopy.checkpoint.manifest import FrozenParam, Manifest
from onecopy.common.digests import tensor_digest
from onecopy.common.tagged_json import dtype_name
from onecopy.errors import CheckpointMismatchError
from onecopy.state_dict.shards import unwrapped

_ANYWAY = "pass check_base=False to load what the checkpoint has"


def frozen_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters of a model by name; a tied parameter has several names.

    Raises:
        ValueError: if no parameter is trainable.
    """
    params = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    frozen: dict[str, Tensor] = {name: param for name, param in params.items() if not param.requires_grad}
    if len(frozen) == len(params):
        raise ValueError(
            "trainable_only=True would save no parameter, because none of the model's parameters has "
            "requires_grad=True: save before the parameters are frozen, or without trainable_only"
        )
    return frozen


def describe_frozen(frozen: Mapping[str, Tensor], group_rank: int, world_size: int) -> dict[str, FrozenParam]:
    """Return the descriptions that one rank computes; all ranks together describe every parameter."""
    names: dict[int, list[str]] = {}
    for name, param in frozen.items():
        names.setdefault(id(param), []).append(name)
    different = {id(param): param for param in frozen.values()}
    by_size = sorted(different.values(), key=lambda param: -param.numel() * param.element_size())
    found = {}
    for param in by_size[group_rank::world_size]:
        description = _describe(param, names[id(param)][0])
        found.update(dict.fromkeys(names[id(param)], description))
    return found


def compare_base(manifest: Manifest, model: nn.Module) -> None:
    """Raise unless the model has the frozen parameters with which the checkpoint was saved.

    Names that only one of both has are not considered; ``strict`` is for these.
    """
    base, saved = manifest.base or {}, manifest.model or {}
    params = dict(unwrapped(model).named_parameters(remove_duplicate=False))
    for name, param in params.items():
        if name in saved and not param.requires_grad:
            raise CheckpointMismatchError(
                f"parameter {name!r} was trainable when the checkpoint was saved with trainable_only, and is frozen "
                f"now: call requires_grad_(True) for it, load, and freeze it afterwards, or {_ANYWAY}"
            )
        if name in base and param.requires_grad:
            raise CheckpointMismatchError(
                f"parameter {name!r} was frozen when the checkpoint was saved with trainable_only, so the checkpoint "
                "does not have its values, and it is trainable now: call requires_grad_(False) for it, load, and "
                f"unfreeze it afterwards, or {_ANYWAY}"
            )
    known: dict[int, FrozenParam] = {}
    for name, param in params.items():
        if name in base:
            if id(param) not in known:
                known[id(param)] = _describe(param, name)
            _compare(name, base[name], known[id(param)])


def _describe(param: Tensor, name: str) -> FrozenParam:
    if param.is_meta:
        raise ValueError(f"frozen parameter {name!r} is on the meta device and has no values: load the base first")
    return FrozenParam(dtype_name(param.dtype), tuple(param.shape), tensor_digest(param))


def _compare(name: str, saved: FrozenParam, found: FrozenParam) -> None:
    if found == saved:
        return
    difference = "it has other values"
    if (found.dtype, found.shape) != (saved.dtype, saved.shape):
        difference = f"it was {saved.dtype} of shape {saved.shape} and is {found.dtype} of shape {found.shape}"
    raise CheckpointMismatchError(
        f"the checkpoint was saved with trainable_only for another base: frozen parameter {name!r} is not as it was "
        f"({difference}). Load the base with which the adapters were trained, in the same dtype, or {_ANYWAY}"
    )
