"""An optimizer's state of which some is kept in another form, for as long as nobody asks for it."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterator, ValuesView
from typing import Any

from torch import Tensor

from onecopy.engine.torch_private import register_as_tree


class Holder:
    """Has the state of some tensors, in whatever form."""

    tensors: tuple[Tensor, ...]

    def copies(self) -> list[dict[Any, Any]]:
        """The state of each tensor as the optimizer keeps it, in memory of its own."""
        raise NotImplementedError

    def forget(self) -> None:
        """The copies have been put in place: they are the state from now on."""
        raise NotImplementedError


class HeldState(defaultdict[Any, Any]):
    """The ``state`` of an optimizer. A holder stands where the state of its tensors was, until somebody asks for one.

    So whoever looks at the state, or changes it, finds what a plain optimizer has, and while nobody does there is
    nothing to compare. To look up a tensor that nobody holds, to count and to list tensors takes nothing back.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._holders: dict[Holder, None] = {}
        self.lock = threading.RLock()

    @property
    def held(self) -> int:
        """The state of how many tensors is left to holders."""
        return sum(len(holder.tensors) for holder in self._holders)

    def hold(self, holder: Holder) -> None:
        """Leave the state of these tensors to a holder, which has it already."""
        with self.lock:
            self._holders[holder] = None
            super().update(dict.fromkeys(holder.tensors, holder))

    def is_held(self, holder: Holder) -> bool:
        """Whether this holder still has what it was left."""
        return super().get(holder.tensors[0]) is holder

    def take_back(self, holder: Holder) -> None:
        """Put what a holder has where everybody finds it."""
        with self.lock:
            if holder in self._holders:
                super().update(zip(holder.tensors, holder.copies(), strict=True))
                del self._holders[holder]
                holder.forget()

    def __getitem__(self, tensor: Any) -> Any:
        found = super().__getitem__(tensor)
        if isinstance(found, Holder):
            self.take_back(found)
            found = super().__getitem__(tensor)
        return found

    def __missing__(self, tensor: Any) -> Any:
        super().__setitem__(tensor, {})
        return super().__getitem__(tensor)

    def __iter__(self) -> Iterator[Any]:
        # Without this method of its own, dict() would copy what is there without asking.
        return super().__iter__()

    def get(self, tensor: Any, default: Any = None) -> Any:
        """The state of a tensor, or ``default`` if it has none."""
        return self[tensor] if tensor in self else default  # noqa: SIM401 - that would call this method

    def values(self) -> Any:
        """The states, taken back one by one as they are looked at."""
        return ValuesView(self)

    def items(self) -> Any:
        """The tensors and their states, which are taken back as they are looked at."""
        return ItemsView(self)

    def __reduce__(self) -> Any:
        # In a file it is what everybody can read.
        return defaultdict, (self.default_factory,), None, None, iter(self.items())


def _all_there(name: str) -> Callable[..., Any]:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def with_all(self: HeldState, *args: Any, **kwargs: Any) -> Any:
        for holder in list(self._holders):
            self.take_back(holder)
        return method(self, *args, **kwargs)

    return with_all


for _name in (
    *("__repr__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__copy__", "copy"),
    *("__setitem__", "__delitem__", "clear", "pop", "popitem", "setdefault", "update"),
):
    setattr(HeldState, _name, _all_there(_name))

register_as_tree(HeldState)
