"""Sharded gradients: ``param.grad`` has the parameter's shape, but holds only this rank's range.

Code that tests ``param.grad`` for None, zeroes it, scales it, clips its values, unscales it with a GradScaler or takes
its norm works as with a whole gradient (all ranks must take a norm and unscale together). Every other operation raises,
because a rank has only a part of the values.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.agreement import FailTogether
from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import flat_view
from onecopy.common.torch_private import (
    ADDING,
    ALIASING,
    CHANGING_EACH_ELEMENT,
    COPYING,
    FOREACH_NORM,
    NORM,
    SCALING,
    UNSCALING,
    ZEROING,
    in_backward,
    no_torch_function,
    norms_of_each,
    tensor_without_memory,
    version_of,
)

CALL = "grad_norm() or clip_grad_norm_()"
"""The name of a call that computes norms, for errors."""


class ShardGrad(Tensor):
    """A gradient that holds only this rank's range, in :attr:`local`.

    Attributes:
        local: the reduced values of the range that this rank owns, flat, in storage order (possibly empty).
        start: the position of the range in the parameter.
        group: the gradients whose norms are computed together with this one's, and the ranks that own the other ranges.
        unreduced: the sum of this rank's own gradients that backward passes have added since the last reduction, or
            None. Only gradients under DDP have it.
    """

    local: Tensor
    start: int
    group: GradientGroup
    unreduced: Tensor | None

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, param: Tensor, group: GradientGroup, start: int = 0) -> ShardGrad:
        """Make a tensor with the parameter's shape, type and device, without memory of its own."""
        tensor = tensor_without_memory(cls, param)
        tensor.local, tensor.start, tensor.group, tensor.unreduced = local, start, group, None
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardGrad({self.local.numel()} of {self.numel()} elements, {self.local})"

    def reduced(self, name: str = "") -> Tensor:
        """The local range; raise if a backward pass under ``no_sync()`` has added to the gradient since."""
        if self.unreduced is not None:
            raise RuntimeError(
                f"the gradient of {f'parameter {name!r}' if name else 'a parameter'} was not reduced: the last "
                "backward pass ran under no_sync(); let the last pass before step() synchronise"
            )
        return self.local

    def receive(self, gradient: Tensor) -> None:
        """Replace the values by this rank's range of a whole gradient, which was reduced."""
        stop = self.start + self.local.numel()
        self.local.copy_(flat_view(gradient)[self.start : stop])
        self.unreduced = None
        self.group.forget_norms()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's annotation leaves the function out
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise _unsupported(func)
        return handler(func, args, kwargs or {})


def _unsupported(func: Any) -> RuntimeError:
    return RuntimeError(
        f"{func} on a sharded gradient: only this rank's range of it is here (param.grad.local). Clip with "
        "torch.nn.utils.clip_grad_norm_() or optimizer.clip_grad_norm_(), read norms with optimizer.grad_norm(), or "
        "compute what you need before backward(); move or convert a model before wrapping it"
    )


@dataclass(frozen=True, slots=True)
class _Norm:
    """The norm of one gradient over all ranks, and the values from which it was computed."""

    local: Tensor
    version: int
    value: Tensor


class GradientGroup:
    """The sharded gradients of some parameters. All their norms are computed at once, and kept until a write.

    The parameters are not kept alive. ``may_lack_ranks`` tells whether some ranks may have run out of inputs (a join
    context). They take no norms, so the ranks meet first, and raise if one does not come.

    Attributes:
        ddp_may_rebuild: whether DDP may rebuild its buckets in the next forward pass. Then it copies the gradients.
    """

    def __init__(
        self, collectives: Collectives, params: Iterable[Tensor], may_lack_ranks: Callable[[], bool] = lambda: False
    ) -> None:
        self.collectives = collectives
        self._params = [weakref.ref(param) for param in params]
        self._may_lack_ranks = may_lack_ranks
        self.ddp_may_rebuild = False
        self._norms: dict[float, dict[int, _Norm]] = {}  # by order, and by the identity of the local range

    def forget_norms(self) -> None:
        """Note that gradients were written."""
        self._norms.clear()

    def meet(self, call: str) -> None:
        """Raise on all ranks if some of them are not in this call, where that can be expected."""
        if self._may_lack_ranks():
            with FailTogether(self.collectives, call):
                pass

    def norms(self, gradients: Sequence[ShardGrad], order: float) -> list[Tensor]:
        """The norm of each gradient over all ranks, as torch would return it for the whole gradient."""
        for number, gradient in enumerate(gradients):
            check_defined(order, gradient.numel(), f"gradient {number}, of shape {tuple(gradient.shape)},")
        known = self._norms.get(order, {})
        if not all(_is_current(known.get(id(each.reduced())), each) for each in gradients):
            known = self._norms[order] = self._compute(gradients, order)
        return [known[id(each.local)].value.to(each.device, each.dtype) for each in gradients]

    def _compute(self, wanted: Sequence[ShardGrad], order: float) -> dict[int, _Norm]:
        # One row for each parameter, so that the message is equally long on all ranks.
        rows: list[Tensor | None] = []
        for reference in self._params:
            param = reference()
            gradient = None if param is None else param.grad
            live = isinstance(gradient, ShardGrad) and gradient.group is self and gradient.unreduced is None
            rows.append(gradient.local if isinstance(gradient, ShardGrad) and live else None)
        present = {id(row) for row in rows}
        rows += [each.local for each in wanted if id(each.local) not in present]
        self.meet(CALL)
        norms = combined_norms(self.collectives, local_norms(rows, order, wanted[0].device), order)
        return {
            id(row): _Norm(row, version_of(row), norm)
            for row, norm in zip(rows, norms.to(wanted[0].device), strict=True)
            if row is not None
        }


def _is_current(norm: _Norm | None, gradient: ShardGrad) -> bool:
    return norm is not None and norm.local is gradient.local and norm.version == version_of(gradient.local)


def _groups(gradients: Iterable[Any]) -> list[GradientGroup]:
    return list(dict.fromkeys(each.group for each in gradients if isinstance(each, ShardGrad)))


def _local(value: Any) -> Any:
    if isinstance(value, ShardGrad):
        return value.reduced()
    return [_local(item) for item in value] if isinstance(value, (list, tuple)) else value


def _change_each_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation that treats all elements alike on the local ranges."""
    is_list = isinstance(args[0], (list, tuple))
    changed = [each for each in (args[0] if is_list else args[:1]) if isinstance(each, ShardGrad)]
    others = [each for each in args[1:] if isinstance(each, Tensor)]
    if not changed or any(each.numel() != 1 or isinstance(each, ShardGrad) for each in others):
        raise _unsupported(func)
    for gradient in changed:
        if func in ZEROING:
            gradient.unreduced = None
        gradient.group.forget_norms()
    if func in SCALING and not is_list and in_backward() and args[0].unreduced is not None:
        # A hook of the user's, on a gradient that is kept from an earlier pass: both parts of the sum are scaled (the
        # kept one where the owner's hook runs). What autograd has added is copied first, because another parameter may
        # have the same memory.
        args[0].unreduced = args[0].unreduced.clone()
        func(args[0].unreduced, *args[1:], **kwargs)
        func(args[0].local, *args[1:], **kwargs)
    else:
        func(_local(args[0]), *args[1:], **kwargs)
    return None if is_list else args[0]


def _alias(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardGrad:
    del func, kwargs
    gradient = args[0]
    alias = ShardGrad(gradient.local, gradient, gradient.group, gradient.start)
    alias.unreduced = gradient.unreduced
    return alias


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the local ranges, and set ``found_inf`` on all ranks if one rank has found an infinity."""
    gradients, found_inf, inverse_scale = args
    func(_local(gradients), found_inf, inverse_scale, **kwargs)
    for group in _groups(gradients):
        call, collectives = "GradScaler.unscale_()", group.collectives
        group.forget_norms()
        group.meet(call)
        flag = found_inf.to(collectives.control_device)
        collectives.all_reduce(flag, call, largest=True).wait()
        found_inf.copy_(flag)


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    del func
    gradient, order = args[0], args[1] if len(args) > 1 else 2.0
    if len(args) > 2 and args[2] is not None:
        raise RuntimeError("a norm over some dimensions of a sharded gradient is not supported")
    norm: Tensor = gradient.group.norms([gradient], float(order))[0]
    return norm if kwargs.get("dtype") is None else norm.to(kwargs["dtype"])


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The norms of gradients, of which some may be whole."""
    gradients, order = args[0], float(args[1] if len(args) > 1 else 2.0)
    norms: dict[int, Tensor] = {}
    for group in _groups(gradients):
        mine = [each for each in gradients if isinstance(each, ShardGrad) and each.group is group]
        norms |= zip(map(id, mine), group.norms(mine, order), strict=True)
    whole = [each for each in gradients if not isinstance(each, ShardGrad)]
    norms |= zip(map(id, whole), func(whole, order) if whole else (), strict=True)
    dtype = kwargs.get("dtype")
    return [norms[id(each)] if dtype is None else norms[id(each)].to(dtype) for each in gradients]


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Copy between a sharded gradient and DDP's bucket, as DDP's reducer does with ``param.grad``.

    The reduction that follows a copy to the bucket takes the mean over all ranks, so the range of the owner, which is
    the mean already, counts once for each rank.
    """
    del kwargs
    target, source = args[:2]
    if isinstance(target, ShardGrad):
        if isinstance(source, ShardGrad) or not in_backward():
            raise _unsupported(func)
        target.receive(source)
        return target
    if not (in_backward() or source.group.ddp_may_rebuild):
        raise _unsupported(func)
    owned = source.local * source.group.collectives.world_size  # the local range may be in the bucket, too
    if source.unreduced is None:
        target.zero_()
    else:
        target.copy_(source.unreduced)
    flat_view(target)[source.start : source.start + owned.numel()].add_(owned)
    return target  # type: ignore[no-any-return]


def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardGrad:
    """Add the gradient of a further backward pass, as autograd does."""
    gradient, added = args
    if not in_backward() or kwargs or not isinstance(gradient, ShardGrad) or isinstance(added, ShardGrad):
        raise _unsupported(func)
    # The first one is only referred to. Nothing writes to it, because another parameter may have the same memory.
    gradient.unreduced = added if gradient.unreduced is None else gradient.unreduced + added
    gradient.group.forget_norms()
    return gradient


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys((*ZEROING, *CHANGING_EACH_ELEMENT), _change_each_element),
    **dict.fromkeys(ALIASING, _alias),
    COPYING: _copy,
    ADDING: _add,
    UNSCALING: _unscale,
    NORM: _norm,
    FOREACH_NORM: _foreach_norm,
}


def check_defined(order: float, numel: int, what: str) -> None:
    """Raise if a norm is not defined: of infinite or negative order, for a tensor without elements.

    torch raises there, too. The size of the whole tensor decides, so that all ranks raise or none.
    """
    if numel == 0 and (math.isinf(order) or order < 0):
        raise RuntimeError(
            f"the norm of order {order} of {what} is not defined, because it has no elements; use a finite positive "
            "norm_type, or set that gradient to None"
        )


def local_norms(parts: Sequence[Tensor | None], order: float, device: torch.device) -> Tensor:
    """The norm of this rank's part of each tensor, as one tensor on ``device``; a neutral value for an empty part."""
    by_type: dict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = {}
    for place, part in enumerate(parts):
        if part is not None and part.numel():
            by_type.setdefault((part.dtype, part.device), {})[place] = part.detach()
    neutral = math.inf if order < 0 else 0.0
    rows = []
    for (dtype, source), same in by_type.items():
        # In the parts' own dtype where it is precise enough: a conversion takes longer than the norm.
        found = norms_of_each(list(same.values()), order, torch.float32 if dtype.itemsize < 4 else None)
        by_place = dict(zip(same, found, strict=True))
        # A stack with neutral values at the other places. An index would have to be sent to the device, for which the
        # host would wait.
        missing = torch.full((), neutral, dtype=found[0].dtype, device=source)
        stacked = torch.stack([by_place.get(place, missing) for place in range(len(parts))])
        rows.append(stacked.to(device, torch.float64))
    if not rows:
        return torch.full((len(parts),), neutral, dtype=torch.float64, device=device)
    return functools.reduce(torch.minimum if order < 0 else torch.maximum, rows)


def combined_norms(collectives: Collectives, local: Tensor, order: float) -> Tensor:
    """The norms of the whole tensors, from the norms of each rank's parts, in one all-reduce of all ranks."""
    local = local.to(collectives.control_device)
    if math.isinf(order):
        # The maximum of several numbers need not be NaN where one of them is, so NaN has a row of its own.
        is_nan = local.isnan()
        sign = math.copysign(1.0, order)
        rows = torch.stack([torch.where(is_nan, -math.inf, sign * local), is_nan.to(local.dtype)])
        collectives.all_reduce(rows, CALL, largest=True).wait()
        return torch.where(rows[1] > 0, math.nan, sign * rows[0])
    powers = local if order == 0 else local.pow(order)
    collectives.all_reduce(powers, CALL).wait()
    return powers if order == 0 else powers.pow(1.0 / order)
