"""``params`` in every form that torch accepts. What is refused is in ``test_construction_errors.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

from onecopy.step.parameter_groups import normalise, plan_params

W, B = Parameter(torch.zeros(2, 3)), Parameter(torch.zeros(3))


def same_objects(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


def test_params_may_be_anything_that_gives_tensors_in_order() -> None:
    forms: list[Any] = [[W, B], (W, B), (item for item in (W, B)), iter([W, B]), {"w": W, "b": B}.values()]
    forms += [[{"params": [W, B]}], [{"params": (item for item in (W, B))}], ({"params": [W, B]} for _ in range(1))]
    for form in forms:
        (group,) = normalise(form)
        assert same_objects(group["params"], [W, B])
        assert isinstance(group["params"], list)
        assert "param_names" not in group


def test_groups_keep_their_options_and_one_tensor_stands_for_a_list() -> None:
    given: list[dict[str, Any]] = [{"params": W, "lr": 0.1}, {"params": iter([B]), "mine": "kept"}, {"params": []}]
    before = [dict(group) for group in given]
    first, second, empty = normalise(given)
    assert same_objects([*first["params"], *second["params"]], [W, B])
    assert (first["lr"], second["mine"], empty["params"]) == (0.1, "kept", [])
    assert [set(group) for group in given] == [set(group) for group in before], "the caller's dicts are his"
    assert given[0]["params"] is W


def test_dense_parameters_of_any_kind_are_described_in_order() -> None:
    memory = torch.zeros(10)  # flat buckets (ours, or those of recurrent layers) hold several side by side
    params = [
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, 2, dtype=torch.complex64).t(),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.zeros(0, 4),
        memory[5:],
        memory[:5],
    ]
    tensors, specs = plan_params(normalise([{"params": params[:2]}, {"params": params[2:]}]))
    assert same_objects(tensors, params)
    assert [item.index for item in specs] == list(range(7))
    assert [item.name for item in specs] == ["group0[0]", "group0[1]", *(f"group1[{place}]" for place in range(5))]
    for item, tensor in zip(specs, params, strict=True):
        assert (item.shape, item.stride, item.dtype) == (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        assert (item.group, item.device_ordinal) == (int(item.index > 1), 0)
