"""``optimizer.state`` is the user's to edit, as a plain optimizer's is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import SGD, Adam

from onecopy import RanksDisagreeError, ZeroRedundancyOptimizer, checkpoint
from tests.support import both as support
from tests.support.both import tensors_of
from tests.support.harness import distributed
from tests.support.models import assert_same_tree, small_model

MODES: dict[str, dict[str, Any]] = {
    "whole parameters": {"shard_by": "parameter"},
    "cut parameters": {"shard_by": "element"},
    "buckets": {"parameters_as_bucket_view": True},
    "aliases": {"overlap_with_ddp": True},
}


def params_of() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 70), (30, 30), (64,), (9,))]


class Both(support.Both):
    """Both optimizers over the same parameters after a step; their state dicts are compared too."""

    def __init__(self, optimizer_class: Any = Adam, **ours: Any) -> None:
        options: dict[str, Any] = {"lr": 0.1} if optimizer_class is Adam else {"lr": 0.1, "momentum": 0.9}
        super().__init__(params_of, optimizer_class, options, **ours)
        self.step()

    def check(self) -> None:
        self.step()
        super().check()
        self.ours.consolidate_state_dict()
        if self.ours.rank == 0:
            assert_same_tree(self.ours.state_dict(), self.plain.state_dict(), "state dict")


def start_afresh(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def start_afresh_from_attributes(optimizer: Any) -> None:
    optimizer.__setstate__({"state": defaultdict(dict), "param_groups": optimizer.param_groups})


def keep_one(optimizer: Any) -> None:
    third = tensors_of(optimizer)[2]
    kept = {param: state for param, state in optimizer.state.items() if param is third}
    optimizer.state = defaultdict(dict, kept)


@distributed(2, 3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", [start_afresh, start_afresh_from_attributes, keep_one])
def test_state_that_is_assigned_takes_effect(world_size: int, edit: Callable[[Any], None], mode: str) -> None:
    for optimizer_class in (SGD, Adam):
        both = Both(optimizer_class, **MODES[mode])
        for optimizer in both.optimizers:
            edit(optimizer)
        both.step()
        both.check()


@distributed(2, 3)
def test_state_of_parameters_that_other_ranks_own_is_left_out(world_size: int) -> None:
    both = Both(SGD, elementwise=False)
    with pytest.raises(TypeError, match="state must be a mapping from parameters to their state, got list"):
        both.ours.state = []  # type: ignore[assignment]
    for state in both.plain.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] * 3
    params = tensors_of(both.ours)
    both.ours.state = {
        mine: {"momentum_buffer": both.plain.state[theirs]["momentum_buffer"].clone()}
        for mine, theirs in zip(params, tensors_of(both.plain), strict=True)
    }
    own = {shard.param for shard in both.ours.layout.owned_by(both.ours.rank)}
    assert [id(param) for param in both.ours.state] == [id(params[index]) for index in sorted(own)]
    both.check()
    for index, param in enumerate(params):
        assert (both.ours.state.get(param) is not None) == (index in own)
        assert (both.ours.state.pop(param, "none") == "none") == (index not in own)
        assert param not in both.ours.state
    assert len(both.ours.state) == len(both.ours.optim.state) == 0


@distributed(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_state_under_a_key_that_is_no_parameter_is_kept_also_by_a_load(world_size: int, mode: str) -> None:
    both = Both(**MODES[mode])
    for optimizer in both.optimizers:
        optimizer.state["note"] = {"count": 1, "text": "yes", "values": torch.arange(3.0)}
        optimizer.state["rounds"] = 7
        assert "note" in optimizer.state
        assert [key for key in optimizer.state if not isinstance(key, Tensor)] == ["note", "rounds"]
        assert optimizer.state.get("nothing", 3) == 3
        assert optimizer.state["nothing"] == {}
        del optimizer.state["nothing"]
    both.check()
    state_dict = both.plain.state_dict()
    both.ours.load_state_dict(state_dict)
    both.ours.state["note"]["values"].add_(1)
    assert state_dict["state"]["note"]["values"].sum() == 3  # the caller's dict is left as it is
    both.plain.state["note"]["values"] = torch.arange(3.0) + 1  # type: ignore[index]
    both.check()
    for optimizer in both.optimizers:
        del optimizer.state["note"]
        with pytest.raises(KeyError):
            del optimizer.state["note"]
        assert optimizer.state.pop("rounds") == 7
        with pytest.raises(KeyError):
            optimizer.state.pop("rounds")
        assert all(isinstance(key, Tensor) for key in optimizer.state)
    both.check()


@distributed(2, 3)
@pytest.mark.parametrize("in_a_tensor", [False, True])
def test_state_under_a_key_that_is_no_parameter_must_be_equal_on_all_ranks(world_size: int, in_a_tensor: bool) -> None:
    both = Both()
    both.ours.state["rounds"] = {"sum": torch.tensor([1.0, dist.get_rank()])} if in_a_tensor else dist.get_rank()
    with pytest.raises(RanksDisagreeError, match="state under 'rounds'"):
        both.ours.consolidate_state_dict()
    if dist.get_rank() > 0:
        del both.ours.state["rounds"]
    with pytest.raises(RanksDisagreeError, match=r"rank 0: state under 'rounds'.*nothing more"):
        both.ours.consolidate_state_dict()
    both.ours.state.pop("rounds", None)
    both.check()


@distributed(2)
@pytest.mark.parametrize("full", [False, True])
def test_functions_that_name_parameters_refuse_state_under_other_keys(world_size: int, full: bool) -> None:
    model = small_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), Adam, lr=0.1)
    zero.state["rounds"] = 7
    with pytest.raises(TypeError, match="keeps state under 'rounds', which is not a parameter"):
        checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(full_state_dict=full))
