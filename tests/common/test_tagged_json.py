"""Tagged JSON: plain data comes back with its types.

What is refused, and tensors of all kinds, are in ``tests/state_dict/test_state_values.py``.
"""

from __future__ import annotations

import math
from typing import Any

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


@settings(max_examples=200)
@given(TREES)
@example({1: "int", "1": "text", None: (), (1, "a"): [math.nan, math.inf, -math.inf]})
@example([["tensor", 0], ["float", "nan"], ("tuple", [])])
@example({"empty": [{}, [], ()], "nested": ((((1,),),),)})
def test_plain_data_comes_back_with_the_same_types_and_values(value: Any) -> None:
    found: list[Tensor] = []
    data = tagged_json.dumps(tagged_json.encode([value, torch.ones(2, requires_grad=True)], found, "it"))
    assert [tensor.requires_grad for tensor in found] == [False]
    back, tensor = tagged_json.decode(tagged_json.loads(data), found)
    assert same(back, value)
    assert tensor is found[0]
