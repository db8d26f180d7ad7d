"""Optimizer classes: which may have a parameter cut among ranks, and which cannot be sharded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from onecopy.layout import CostFunction, ParamSpec, newton_schulz_cost
from onecopy.optim import Muon

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
    }
)
"""Classes whose update of an element depends on that element alone. Subclasses are not assumed to be like them."""

SKIPS_MISSING_GRADIENTS: frozenset[type[Optimizer]] = ELEMENTWISE | {
    torch.optim.Adafactor,
    torch.optim.Muon,
    Muon,
    torch.optim.SparseAdam,
}
"""Classes that do not change a parameter without a gradient, so that it need not be sent."""

REFUSES_SPARSE_GRADIENTS: frozenset[type[Optimizer]] = SKIPS_MISSING_GRADIENTS - {
    torch.optim.SGD,
    torch.optim.Adagrad,
    torch.optim.SparseAdam,
}
"""Classes that raise an error for sparse gradients."""

COMBINING = {
    "LBFGS": "it builds one direction from all parameters",
    "Prodigy": "it estimates one step size from all parameters",
    "ProdigyPlusScheduleFree": "it estimates one step size from all parameters",
    "DAdaptAdam": "it estimates one step size from all parameters",
    "DAdaptAdaGrad": "it estimates one step size from all parameters",
    "DAdaptAdan": "it estimates one step size from all parameters",
    "DAdaptLion": "it estimates one step size from all parameters",
    "DAdaptSGD": "it estimates one step size from all parameters",
    "SAM": "it scales its ascent step by the norm of all gradients",
    "FusedLAMB": "it clips by the norm of all gradients",
}
"""Names of classes, or base classes, that combine parameters in one update: sharding would change the result."""

CLIPS_GLOBALLY = {"Lamb", "LAMB"}
"""Names of classes that clip by the norm of all gradients, unless ``max_grad_norm`` turns it off."""

DIMENSIONS = {torch.optim.Muon: (2, "two dimensions"), Muon: (math.inf, "two or more dimensions")}
"""Classes that take matrices only: the most dimensions of a parameter, and the text of an error. Two is the least."""

QUANTISED_STATE = re.compile(r"(8bit|4bit|Fp8)$")
"""Names of classes, or base classes, whose state is quantised in blocks (bitsandbytes, torchao)."""


NEWTON_SCHULZ = re.compile(r"Muon$")
"""Names of classes, or base classes, whose update is a Newton-Schulz iteration."""


EXAMPLE = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)"
"""The line to write, for errors."""


def check_class(optimizer_class: object, wrapper: type, where: str = "optimizer_class") -> None:
    """Raise unless ``optimizer_class`` can be sharded; ``where`` it was given is for errors."""
    if optimizer_class is Optimizer:  # the default of the argument
        raise TypeError(f"{where} must be the class to shard, and it is missing: write {EXAMPLE}")
    if isinstance(optimizer_class, Optimizer):
        name = type(optimizer_class).__qualname__
        raise TypeError(
            f"{where} must be a class, got an instance of {name}: pass the class itself, and its options as "
            f"keyword arguments, as in {EXAMPLE}"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        name = getattr(optimizer_class, "__qualname__", f"an instance of {type(optimizer_class).__qualname__}")
        raise TypeError(
            f"{where} must be a subclass of torch.optim.Optimizer, got {name}: write, for example, {EXAMPLE}"
        )
    if issubclass(optimizer_class, wrapper):
        raise TypeError(
            f"{where} must be the class to shard, such as torch.optim.AdamW, got {optimizer_class.__qualname__}"
        )
    of_group = "" if where == "optimizer_class" else f"{where}: "
    for base in optimizer_class.__mro__:
        if base.__name__ in COMBINING:
            raise ValueError(
                f"{of_group}{optimizer_class.__qualname__} cannot be sharded exactly: {COMBINING[base.__name__]}, "
                "and a rank sees only its own; use the class itself, unsharded, under DDP"
            )


def check_shape(optimizer_class: type[Optimizer], param: ParamSpec) -> None:
    """Raise if a class takes matrices only, and the parameter is none."""
    for known, (most, text) in DIMENSIONS.items():
        if issubclass(optimizer_class, known) and not 2 <= len(param.shape) <= most:
            raise ValueError(
                f"parameter {param.name!r} of group {param.group} has shape {param.shape}, and "
                f"{known.__qualname__} takes parameters of {text} only: put it into a group of another class, such as "
                "AdamW"
            )


def check_options(optimizer: Optimizer, positions: Sequence[int] | None = None) -> None:
    """Raise if an option of a constructed optimizer makes sharding impossible.

    ``positions`` are the user's positions of its groups; without them they are the same.
    """
    clips = any(base.__name__ in CLIPS_GLOBALLY for base in type(optimizer).__mro__)
    for place, group in enumerate(optimizer.param_groups):
        position = place if positions is None else positions[place]
        if group.get("differentiable"):
            raise ValueError(
                f"differentiable=True (parameter group {position}) is not supported: parameters travel between ranks "
                "outside autograd"
            )
        if clips and (group.get("max_grad_norm") or optimizer.defaults.get("max_grad_norm")):
            raise ValueError(
                f"{type(optimizer).__qualname__} with max_grad_norm (parameter group {position}) cannot be sharded "
                "exactly: it clips by the norm of all gradients, and a rank sees only its own; pass "
                "max_grad_norm=0 (or None) and clip with torch.nn.utils.clip_grad_norm_ before step()"
            )


def check_dtypes(
    optimizer: Optimizer, dtypes: Iterable[tuple[int, torch.dtype]], positions: Sequence[int] | None = None
) -> None:
    """Raise if the update of one parameter depends on the dtype of another, which may be on another rank.

    ``dtypes`` has the group and the dtype of every parameter of all ranks, as the optimizers of their owners see it;
    ``positions`` are the user's positions of the optimizer's groups, if it does not have them all.
    """
    if not isinstance(optimizer, torch.optim.Adafactor):
        return
    groups = dict(
        zip(range(len(optimizer.param_groups)) if positions is None else positions, optimizer.param_groups, strict=True)
    )
    dtypes_of: dict[int, set[str]] = {}
    for position, dtype in dtypes:
        if not dtype.is_floating_point or position not in groups:
            continue  # it can only be frozen, or another class steps it
        dtypes_of.setdefault(position, set()).add(str(dtype))
    for position, names in dtypes_of.items():
        if len(names) > 1 and groups[position]["eps"][0] is None:
            raise ValueError(
                f"{type(optimizer).__qualname__} over several dtypes (parameter group {position}: "
                f"{', '.join(sorted(names))}) cannot be sharded exactly: it takes the epsilon of the first parameter's "
                "dtype for all parameters of a group, and a rank sees only its own; pass eps=(1e-7, 1e-3), or make a "
                "parameter group for each dtype"
            )


def is_elementwise(optimizer_class: type[Optimizer], declared: bool | None) -> bool:
    """Whether a parameter may be cut: as the user declared, or as the class is known, and otherwise not."""
    if declared and any(QUANTISED_STATE.search(base.__name__) for base in optimizer_class.__mro__):
        raise ValueError(
            f"{optimizer_class.__qualname__} is not elementwise: it quantises its state in blocks of a parameter, and "
            "keeps small parameters in 32 bit, so that a cut would change the result; leave elementwise=True out"
        )
    return optimizer_class in ELEMENTWISE if declared is None else declared


def cost_of(optimizer_class: type[Optimizer], shape: tuple[int, ...], cost: CostFunction | None) -> float:
    """The cost of one update of a parameter: the user's function, or as the class is known, or the elements."""
    if cost is not None:
        found = cost(shape)
        if not (isinstance(found, (int, float)) and 0 <= found < math.inf):
            raise ValueError(f"cost must return a finite number that is at least 0, got {found!r} for shape {shape}")
        return float(found)
    if any(NEWTON_SCHULZ.search(base.__name__) for base in optimizer_class.__mro__):
        return newton_schulz_cost(shape)
    return float(math.prod(shape))
