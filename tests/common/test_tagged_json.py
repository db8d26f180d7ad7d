"""Tagged JSON: plain data comes back with its types, and anything else is refused with its place."""

from __future__ import annotations

import collections
import enum
import math
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from onecopy.common import tagged_json

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.sampled_from([-0.0, 5e-324, 2**70, "tensor", "dict", torch.bfloat16, torch.Size([2, 3])]),
)
PLAIN_KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
KEYS = st.one_of(PLAIN_KEYS, st.tuples(PLAIN_KEYS, PLAIN_KEYS))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value all the way down, with nan equal to nan and zeros told apart by their sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


def round_trip(value: object) -> Any:
    found: list[Tensor] = []
    return tagged_json.decode(tagged_json.loads(tagged_json.dumps(tagged_json.encode(value, found, "it"))), found)


@settings(max_examples=200)
@given(TREES)
@example({1: "int", "1": "text", None: (), (1, "a"): [math.nan, math.inf, -math.inf]})
@example([["tensor", 0], ["float", "nan"], ("tuple", [])])
@example({"empty": [{}, [], ()], "nested": ((((1,),),),)})
def test_plain_data_comes_back_with_the_same_types_and_values(value: Any) -> None:
    assert same(round_trip(value), value)


def test_tensors_travel_beside_the_tree_and_return_to_their_places() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.tensor(3)
    found: list[Tensor] = []
    data = tagged_json.encode({"a": first, "b": [1, (second, None)], "c": first}, found, "state")
    assert [tensor.tolist() for tensor in found] == [[1.0, 1.0], 3, [1.0, 1.0]]
    assert not any(tensor.requires_grad for tensor in found)
    back = tagged_json.decode(tagged_json.loads(tagged_json.dumps(data)), ["x", "y", "z"])
    assert back == {"a": "x", "b": [1, ("y", None)], "c": "z"}


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: int


REFUSED: dict[str, tuple[object, str]] = {
    "a set": ({1}, r"state of 'w' is of type builtins\.set"),
    "bytes": (b"raw", r"state of 'w' is of type builtins\.bytes"),
    "a complex number": (1j, r"state of 'w' is of type builtins\.complex"),
    "an enum inside a list": ([0, Colour.RED], r"state of 'w'\[1\] is of type .*Colour"),
    "a named tuple inside a dict": ({"a": {2: Pair(1)}}, r"state of 'w'\['a'\]\[2\] is of type .*Pair"),
    "a default dict": ((collections.defaultdict(int),), r"state of 'w'\[0\] is of type collections\.defaultdict"),
    "a device": ({"d": torch.device("cpu")}, r"state of 'w'\['d'\] is of type torch\.device"),
    "a function": ([len], r"state of 'w'\[0\] is of type builtins\.builtin_function_or_method"),
    "a key": ({frozenset(): 1}, r"a key of state of 'w' is of type builtins\.frozenset"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_any_other_type_is_refused_with_its_place_and_type(kind: str) -> None:
    value, message = REFUSED[kind]
    with pytest.raises(TypeError, match=message):
        tagged_json.encode(value, [], "state of 'w'")
