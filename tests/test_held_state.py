"""State that is kept elsewhere: nobody who looks can tell."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from onecopy.engine.held_state import HeldState


class Holder:
    """Gives each of its tensors a state with a number."""

    def __init__(self, *tensors: Tensor, number: float = 0.0) -> None:
        self.tensors = tensors
        self.number = number
        self.asked = 0

    def hand_over(self) -> list[dict[Any, Any]]:
        self.asked += 1
        return [{"number": self.number + position} for position, _ in enumerate(self.tensors)]


A, B, C, D = (torch.full((2,), float(value)) for value in range(4))
NEW = torch.ones(1)


def held() -> tuple[HeldState, Holder, Holder]:
    """The state of four tensors, of which two holders have that of three."""
    first, second = Holder(A, B), Holder(C, number=2.0)
    state = HeldState(dict, {D: {"number": 3.0}, A: {}, B: {}, C: {}})
    state.hold(first)
    state.hold(second)
    return state, first, second


def plain() -> defaultdict[Any, Any]:
    return defaultdict(dict, {tensor: {"number": float(value)} for value, tensor in enumerate((A, B, C, D))})


def as_seen(value: Any) -> Any:
    """What can be compared: views, iterators and dicts of tensors by identity, in any order."""
    if isinstance(value, dict):
        return {id(key) if isinstance(key, Tensor) else key: as_seen(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, (str, bytes, int, float, type(None))):
        return value
    found = [tuple(map(as_seen, item)) if isinstance(item, tuple) else as_seen(item) for item in value]
    return sorted(found, key=repr)


USES: dict[str, Callable[[Any], Any]] = {
    "__getitem__": lambda state: state[B],
    "__missing__": lambda state: state[NEW],
    "__setitem__": lambda state: state.__setitem__(A, {"number": 9.0}),
    "__delitem__": lambda state: state.__delitem__(A),
    "__contains__": lambda state: [tensor in state for tensor in (A, B, C, D, NEW)],
    "__len__": len,
    "__iter__": lambda state: list(iter(state)),
    "__reversed__": lambda state: list(reversed(state)),
    "__eq__": lambda state: state == plain(),
    "__ne__": lambda state: state != plain(),
    "__or__": lambda state: state | {NEW: {}},
    "__ror__": lambda state: {NEW: {}} | state,
    "__ior__": lambda state: state.__ior__({NEW: {}}) and None,
    "__repr__": lambda state: len(repr(state)) - len(type(state).__name__),
    "__copy__": copy.copy,
    "__reduce__": lambda state: [value["number"] for value in pickle.loads(pickle.dumps(state)).values()],
    "clear": lambda state: state.clear(),
    "copy": lambda state: state.copy(),
    "get": lambda state: [state.get(C), state.get(NEW, 5)],
    "items": lambda state: list(state.items()),
    "keys": lambda state: list(state.keys()),
    "pop": lambda state: state.pop(A),
    "popitem": lambda state: len(state.popitem()),
    "setdefault": lambda state: [state.setdefault(A, {}), state.setdefault(NEW, {"number": 7.0})],
    "update": lambda state: state.update({A: {"number": 9.0}}),
    "values": lambda state: list(state.values()),
    "dict()": dict,
    "{**state}": lambda state: {**state},
    "deepcopy": lambda state: [value["number"] for value in copy.deepcopy(state).values()],
    "bool": bool,
}
NOT_A_USE = {"__class_getitem__", "__hash__", "__init__", "__new__", "__doc__", "__getattribute__", "default_factory"}
NOT_A_USE |= {"fromkeys", "__sizeof__", "__lt__", "__le__", "__gt__", "__ge__"}


def test_every_method_is_tried() -> None:
    methods = {name for name in dir(defaultdict) if getattr(defaultdict, name) is not getattr(object, name, None)}
    assert methods - {"__init_subclass__", "__subclasshook__"} <= USES.keys() | NOT_A_USE


@pytest.mark.parametrize("use", USES)
def test_whoever_asks_sees_what_a_plain_optimizer_has(use: str) -> None:
    state, _, _ = held()
    expected = plain()
    if use == "popitem":
        assert USES[use](state) == USES[use](expected) == 2
        assert len(state) == len(expected) == 3
        return
    assert as_seen(USES[use](state)) == as_seen(USES[use](expected))
    assert as_seen(state) == as_seen(expected)
    assert state.held == 0


def test_only_what_is_asked_for_is_taken_back() -> None:
    state, first, second = held()
    assert (len(state), state.held) == (4, 3)
    assert state[D] == {"number": 3.0}
    assert A in state
    assert NEW not in state
    assert not first.asked
    assert not second.asked
    assert state[B] == {"number": 1.0}
    assert state[A] == {"number": 0.0}
    assert (first.asked, second.asked, state.held) == (1, 0, 1)
    assert not state.is_held(first)
    assert state.is_held(second)
    state.take_all_back()
    assert (first.asked, second.asked, state.held) == (1, 1, 0)


def test_a_new_tensor_gets_an_empty_state_and_disturbs_nobody() -> None:
    state, first, second = held()
    state[NEW]["number"] = 8.0
    assert state[NEW] == {"number": 8.0}
    assert (first.asked, second.asked, len(state)) == (0, 0, 5)


def test_a_holder_that_fails_loses_nothing() -> None:
    state, first, _ = held()

    def fail() -> list[dict[Any, Any]]:
        raise MemoryError

    whole, first.hand_over = first.hand_over, fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        state[A]
    assert A in state
    first.hand_over = whole  # type: ignore[method-assign]
    assert state[B] == {"number": 1.0}


@pytest.mark.parametrize("made", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_what_is_written_to_files_is_plain(made: Callable[[HeldState], Any]) -> None:
    state, _, _ = held()
    assert type(made(state)) is defaultdict
