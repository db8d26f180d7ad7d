"""An optimizer's state of which some is kept in another form, for as long as nobody asks for it."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class Holder(Protocol):
    """Has the state of some tensors, in whatever form."""

    tensors: tuple[Tensor, ...]

    def hand_over(self) -> list[dict[Any, Any]]:
        """The state of each tensor as the optimizer keeps it, in memory of its own; the holder keeps nothing."""


class HeldState(defaultdict[Any, Any]):
    """The ``state`` of an optimizer. What a holder has is absent until somebody asks, and then it is there for good.

    So whoever looks at the state, or changes it, finds what a plain optimizer has, and while nobody does there is
    nothing to compare. Only to look up a tensor that nobody holds, and to count, gives nothing back.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holder_of: dict[Any, Holder] = {}

    @property
    def held(self) -> int:
        """The state of how many tensors is left to holders."""
        return len(self._holder_of)

    def hold(self, holder: Holder) -> None:
        """Leave the state of these tensors to a holder, which has it already."""
        for tensor in holder.tensors:
            super().pop(tensor, None)
        self._holder_of.update(dict.fromkeys(holder.tensors, holder))

    def is_held(self, holder: Holder) -> bool:
        """Whether this holder still has what it was left."""
        return self._holder_of.get(holder.tensors[0]) is holder

    def take_back(self, holder: Holder) -> None:
        """Put what a holder has where everybody finds it."""
        if self.is_held(holder):
            for tensor, state in zip(holder.tensors, holder.hand_over(), strict=True):
                super().__setitem__(tensor, state)
                del self._holder_of[tensor]

    def take_all_back(self) -> None:
        """Put everything where everybody finds it."""
        for holder in dict.fromkeys(self._holder_of.values()):
            self.take_back(holder)

    def __missing__(self, tensor: Any) -> Any:
        holder = self._holder_of.get(tensor)
        if holder is None:
            super().__setitem__(tensor, {})
        else:
            self.take_back(holder)
        return self[tensor]

    def __contains__(self, tensor: object) -> bool:
        return super().__contains__(tensor) or tensor in self._holder_of

    def __len__(self) -> int:
        return super().__len__() + self.held

    def __reduce__(self) -> Any:
        # In a file it is what everybody can read.
        return defaultdict, (dict,), None, None, iter(self.items())


def _all_there(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def with_all(self: HeldState, *args: Any, **kwargs: Any) -> Any:
        self.take_all_back()
        return method(self, *args, **kwargs)

    return with_all


ASKS_FOR_ALL = (
    *("__iter__", "__reversed__", "__repr__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__copy__"),
    *("__setitem__", "__delitem__", "clear", "copy", "pop", "popitem", "setdefault", "update"),
    *("get", "items", "keys", "values"),
)
for _name in ASKS_FOR_ALL:
    setattr(HeldState, _name, _all_there(_name))
