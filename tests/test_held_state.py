"""State that is kept elsewhere: nobody who looks can tell."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onecopy.engine.held_state import HeldState, Holder


class Numbers(Holder):
    """Gives each of its tensors a state with a number."""

    def __init__(self, *tensors: Tensor, number: float = 0.0) -> None:
        self.tensors = tensors
        self.number: float | None = number
        self.asked = 0

    def copies(self) -> list[dict[Any, Any]]:
        self.asked += 1
        assert self.number is not None
        return [{"number": self.number + position} for position, _ in enumerate(self.tensors)]

    def forget(self) -> None:
        self.number = None


A, B, C, D = (torch.full((2,), float(value)) for value in range(4))
NEW = torch.ones(1)


def held() -> tuple[HeldState, Numbers, Numbers]:
    """The state of four tensors, of which two holders have that of three."""
    first, second = Numbers(A, B), Numbers(C, number=2.0)
    state = HeldState(dict, {A: {}, B: {}, C: {}, D: {"number": 3.0}})
    state.hold(first)
    state.hold(second)
    return state, first, second


def plain() -> defaultdict[Any, Any]:
    return defaultdict(dict, {tensor: {"number": float(value)} for value, tensor in enumerate((A, B, C, D))})


def as_seen(value: Any) -> Any:
    """What can be compared: tensors by identity, dicts in their order."""
    if isinstance(value, dict):
        return [(as_seen(key), as_seen(item)) for key, item in value.items()]
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, (str, int, float, type(None))):
        return value
    return [as_seen(item) for item in value]


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
    "__repr__": lambda state: repr(state).replace("HeldState", "defaultdict"),
    "__copy__": copy.copy,
    "__reduce__": lambda state: [value["number"] for value in pickle.loads(pickle.dumps(state)).values()],
    "clear": lambda state: state.clear(),
    "copy": lambda state: state.copy(),
    "get": lambda state: [state.get(C), state.get(NEW, 5)],
    "items": lambda state: list(state.items()),
    "keys": lambda state: list(state.keys()),
    "pop": lambda state: state.pop(A),
    "popitem": lambda state: state.popitem(),
    "setdefault": lambda state: [state.setdefault(A, {}), state.setdefault(NEW, {"number": 7.0})],
    "update": lambda state: state.update({A: {"number": 9.0}}),
    "values": lambda state: list(state.values()),
    "dict()": dict,
    "tree": lambda state: tree_map(lambda number: number + 1, state),
    "values, kept": lambda state: (values := state.values(), state.clear(), list(values))[-1],
    "sets": lambda state: sorted(map(id, state.keys() & {A, C})),
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
    assert [each["number"] for each in state.values()] == [0.0, 1.0, 2.0, 3.0]
    assert (first.asked, second.asked, state.held) == (1, 1, 0)
    assert first.number is None


def test_a_new_tensor_gets_an_empty_state_and_disturbs_nobody() -> None:
    state, first, second = held()
    state[NEW]["number"] = 8.0
    assert state[NEW] == {"number": 8.0}
    assert (first.asked, second.asked, len(state)) == (0, 0, 5)


def test_a_holder_that_fails_loses_nothing() -> None:
    state, first, _ = held()

    def fail() -> list[dict[Any, Any]]:
        raise MemoryError

    whole, first.copies = first.copies, fail  # type: ignore[method-assign]
    for use in ("__getitem__", "clear", "items", "__copy__"):
        with pytest.raises(MemoryError):
            USES[use](state)
    assert state.is_held(first)
    first.copies = whole  # type: ignore[method-assign]
    assert as_seen(state) == as_seen(plain())


def test_what_was_asked_for_can_be_held_again_while_somebody_looks() -> None:
    state, _, _ = held()
    values, items = state.values(), iter(state.items())
    assert next(items) == (A, {"number": 0.0})
    state.hold(Numbers(A, B, C, number=5.0))
    assert [each["number"] for each in values] == [5.0, 6.0, 7.0, 3.0]
    assert [each["number"] for _, each in items] == [6.0, 7.0, 3.0]


def test_threads_that_ask_at_once_get_the_same() -> None:
    for _ in range(50):
        state, _, _ = held()
        start = threading.Barrier(4)

        def ask(state: HeldState = state, start: threading.Barrier = start) -> list[int]:
            start.wait()
            return [id(state[tensor]) for tensor in (B, A, C)]

        with ThreadPoolExecutor(4) as pool:
            answers = [each.result() for each in [pool.submit(ask) for _ in range(4)]]
        assert answers == [answers[0]] * 4


@pytest.mark.parametrize("made", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_what_is_written_to_files_is_plain(made: Callable[[HeldState], Any]) -> None:
    state, _, _ = held()
    assert type(made(state)) is defaultdict
