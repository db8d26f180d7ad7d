"""The ``state`` of a state dict that is gathered from the other ranks when it is first read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any


class PendingState(MutableMapping[Any, Any]):
    """A mapping whose entries are gathered from the other ranks when it is first read, copied or pickled.

    Frameworks that call ``state_dict()`` on all ranks and save on one drop the others unread, which costs nothing. It
    is pickled as an ``OrderedDict``, which ``torch.load`` reads with ``weights_only=True``.

    Args:
        source: a function that gathers the entries, or the entries.
    """

    def __init__(self, source: Callable[[], Mapping[Any, Any]] | Mapping[Any, Any]) -> None:
        self._gather = None if isinstance(source, Mapping) else source
        self._entries: dict[Any, Any] = dict(source) if isinstance(source, Mapping) else {}

    def _read(self) -> dict[Any, Any]:
        if self._gather is not None:
            self._entries = dict(self._gather())
            self._gather = None  # only now: after a failure the next read raises again
        return self._entries

    def __getitem__(self, key: Any) -> Any:
        return self._read()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._read()[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._read()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __or__(self, other: Any) -> dict[Any, Any]:
        return self._read() | dict(other)

    def __ror__(self, other: Any) -> dict[Any, Any]:
        return dict(other) | self._read()

    def copy(self) -> dict[Any, Any]:
        """Return the entries as an ordinary dict, as ``dict.copy`` does."""
        return self._read().copy()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'not read yet' if self._gather is not None else self._entries})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return the entries for a pickle or a copy."""
        return (OrderedDict, (), None, None, iter(self._read().items()))
