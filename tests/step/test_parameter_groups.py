"""``params`` in every form that torch accepts. What is refused is in ``test_construction_errors.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from onecopy.step.parameter_groups import normalise, plan_params


def param(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape))


def same_objects(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


W, B = param(2, 3), param(3)

ACCEPTED: dict[str, Callable[[], object]] = {
    "a list": lambda: [W, B],
    "a tuple": lambda: (W, B),
    "a generator": lambda: (item for item in (W, B)),
    "an iterator": lambda: iter([W, B]),
    "a dict's values": lambda: {"w": W, "b": B}.values(),
    "one group": lambda: [{"params": [W, B]}],
    "a group with a generator": lambda: [{"params": (item for item in (W, B))}],
    "a generator of groups": lambda: ({"params": [W, B]} for _ in range(1)),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_params_may_be_anything_that_gives_tensors_in_order(kind: str) -> None:
    (group,) = normalise(ACCEPTED[kind]())
    assert same_objects(group["params"], [W, B])
    assert isinstance(group["params"], list)
    assert "param_names" not in group


def test_groups_keep_their_options_and_one_tensor_stands_for_a_list() -> None:
    given_groups: list[dict[str, Any]] = [
        {"params": W, "lr": 0.1},
        {"params": iter([B]), "lr": 0.2, "mine": "kept"},
        {"params": []},
    ]
    before = [dict(group) for group in given_groups]
    first, second, empty = normalise(given_groups)
    assert same_objects(first["params"], [W])
    assert same_objects(second["params"], [B])
    assert (first["lr"], second["lr"], second["mine"], empty["params"]) == (0.1, 0.2, "kept", [])
    assert all(one is not other for one, other in zip((first, second, empty), given_groups, strict=True))
    assert [set(group) for group in given_groups] == [set(group) for group in before], "the caller's dicts are his"
    assert given_groups[0]["params"] is W


def test_named_parameters_keep_their_names() -> None:
    model = torch.nn.Linear(3, 2)
    (group,) = normalise(model.named_parameters())
    assert same_objects(group["params"], list(model.parameters()))
    assert group["param_names"] == ["weight", "bias"]
    (group,) = normalise([{"params": model.named_parameters(), "lr": 1.0}])
    assert group["param_names"] == ["weight", "bias"]
    tensors, specs = plan_params([group])
    assert [item.name for item in specs] == ["weight", "bias"]
    assert same_objects(tensors, list(model.parameters()))


def test_a_parameter_tied_by_its_module_appears_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    for params in (model.parameters(), model.named_parameters()):
        tensors, _ = plan_params(normalise(params))
        assert same_objects(tensors, [model[0].weight])


def test_dense_parameters_of_any_kind_are_described_in_order() -> None:
    params = [
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, 2, dtype=torch.complex64).t(),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.zeros(0, 4),
    ]
    tensors, specs = plan_params(normalise([{"params": params[:2]}, {"params": params[2:]}]))
    assert same_objects(tensors, params)
    assert [item.index for item in specs] == list(range(5))
    assert [item.group for item in specs] == [0, 0, 1, 1, 1]
    assert [item.shape for item in specs] == [tuple(tensor.shape) for tensor in params]
    assert [item.stride for item in specs] == [tensor.stride() for tensor in params]
    assert [item.dtype for item in specs] == [tensor.dtype for tensor in params]
    assert [item.name for item in specs] == ["group0[0]", "group0[1]", "group1[0]", "group1[1]", "group1[2]"]
    assert {item.device_ordinal for item in specs} == {0}


def test_neighbours_in_one_buffer_are_accepted() -> None:
    """Flat buckets (ours, or those of recurrent layers) hold several parameters side by side."""
    memory = torch.zeros(10)
    tensors, _ = plan_params(normalise([memory[5:], memory[:5]]))
    assert [tensor.storage_offset() for tensor in tensors] == [5, 0]
