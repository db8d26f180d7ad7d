"""``params`` in every form that torch accepts, and the parameters that cannot be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from onecopy.step.consistency import options_text
from onecopy.step.parameter_groups import normalise, normalise_group, plan_params
from tests.support.harness import distributed


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


WRONG_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "a bare tensor": (lambda: W, r"params must be an iterable.*got torch\.FloatTensor"),
    "a number": (lambda: 3, r"params must be an iterable.*got .*int"),
    "None": (lambda: None, r"params must be an iterable.*got .*NoneType"),
    "text": (lambda: "weights", r"params must be an iterable.*got .*str"),
    "a bare dict": (lambda: {"params": [W]}, r"params must be an iterable.*got .*dict"),
    "a module": (lambda: torch.nn.Linear(1, 1), r"params must be an iterable.*Linear.*model\.parameters\(\)"),
    "a set": (lambda: {W, B}, r"params must be ordered, got a set"),
    "a number among tensors": (lambda: [W, 1.5], r"parameter 1 of group 0 is not a tensor but .*float"),
    "None among tensors": (lambda: [None, W], r"parameter 0 of group 0 is not a tensor but .*NoneType"),
    "a tensor after a dict": (lambda: [{"params": [W]}, B], r"mixes dicts and tensors: entry 1 is torch\.FloatTensor"),
    "a dict after a tensor": (lambda: [W, {"params": [B]}], r"mixes dicts and tensors: entry 0 is torch\.FloatTensor"),
    "a named number": (lambda: [("w", W), ("b", 3)], r"parameter 'b' is not a tensor but .*int"),
    "a list of lists": (lambda: [[W, B]], r"parameter 0 of group 0 is not a tensor but .*list"),
    "a group with a set": (lambda: [{"params": {W, B}}], r"params of parameter group 0 must be ordered, got a set"),
    "a group with a number": (lambda: [{"params": [W]}, {"params": 3}], r"parameter group 1 must be tensors.*int"),
    "a group with text": (lambda: [{"params": "w"}], r"parameter 0 of group 0 is not a tensor but .*str"),
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_params_of_the_wrong_type_are_refused_with_the_offender(kind: str) -> None:
    make, message = WRONG_TYPES[kind]
    with pytest.raises(TypeError, match=message):
        normalise(make())


def test_a_group_that_is_not_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"parameter group 2 must be a dict, got list"):
        normalise_group([W], 2)


def shared_memory() -> list[Tensor]:
    memory = torch.zeros(10)
    return [Parameter(memory[:6]), Parameter(memory[4:])]


def conjugate() -> Tensor:
    return torch.zeros(2, dtype=torch.complex64).conj()


def managed_by_fsdp() -> Parameter:
    managed = param(2)
    managed._fsdp_flattened = True  # type: ignore[attr-defined]  # what FSDP puts on the parameters it manages
    return managed


def computed() -> Tensor:
    return param(2) * 2


def not_given() -> Iterator[Tensor]:
    return iter(())


WRONG_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (list, r"params is empty"),
    "an empty generator": (not_given, r"params is empty"),
    "only empty groups": (lambda: [{"params": []}, {"params": ()}], r"groups but no parameter"),
    "a group without params": (lambda: [{"params": [W]}, {"lr": 1}], r"parameter group 1 has no 'params'.*'lr'"),
    "some names only": (lambda: [("w", W), B], r"parameter group 0 mixes named and unnamed"),
    "one object in two groups": (
        lambda: [{"params": [W]}, {"params": [B, W]}],
        r"'group1\[1\]' is in two groups \(also as 'group0\[0\]'\)",
    ),
    "two over one memory": (lambda: [("a", W), ("b", Parameter(W.detach()))], r"'a' and 'b' share memory"),
    "two that overlap": (shared_memory, r"'group0\[0\]' and 'group0\[1\]' share memory"),
    "expanded": (lambda: [W, torch.zeros(1).expand(5)], r"'group0\[1\]' does not fill its memory.*expanded"),
    "sliced": (lambda: [("w", torch.zeros(4, 4)[:, :2])], r"'w' does not fill its memory \(shape \(4, 2\)"),
    "sparse": (lambda: [("w", torch.zeros(3, 3).to_sparse())], r"'w' is not a dense tensor.*sparse"),
    "meta": (lambda: [("w", torch.zeros(3, device="meta"))], r"'w' is on the meta device"),
    "lazy": (lambda: torch.nn.LazyLinear(2).named_parameters(), r"'weight' is not materialised yet"),
    "conjugate": (lambda: [("w", conjugate())], r"'w' is a lazy conjugate"),
    "negative": (lambda: [("w", conjugate().imag)], r"'w' is a lazy conjugate or negative view"),
    "not a leaf": (lambda: [("w", computed())], r"'w' is not a leaf"),
    "managed by FSDP": (lambda: [("w", managed_by_fsdp())], r"'w' is managed by FSDP"),
}


@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(kind: str) -> None:
    make, message = WRONG_VALUES[kind]
    with pytest.raises(ValueError, match=message):
        plan_params(normalise(make()))


@distributed(1)
def test_parameters_that_are_sharded_already_are_refused_by_name(world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match=r"'w' is a DTensor"):
        plan_params(normalise([("v", param(2)), ("w", distribute_tensor(torch.zeros(4), mesh))]))
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"'weight' is a DTensor \(FSDP2"):
        plan_params(normalise(model.named_parameters()))


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


def test_options_are_told_in_words_that_equal_options_share() -> None:
    group = {"params": [W], "lr": torch.tensor(0.1), "betas": (0.9, [1]), "extra": {"a": None}, "mine": object()}
    again = {"mine": object(), "lr": torch.tensor(0.1), "betas": (0.9, [1]), "extra": {"a": None}, "params": [B]}
    assert options_text(group) == options_text(again)
    assert set(options_text(group)) == {"lr", "betas", "extra", "mine"}
    for key, value in {"lr": 0.1, "betas": [0.9, [1]], "extra": {"a": 0}}.items():
        assert options_text({**group, key: value}) != options_text(group)
