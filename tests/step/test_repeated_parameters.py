"""A parameter that one group has several times: torch warns, and steps it as often; so does the sharded optimizer."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam

from onecopy import PeerFailedError, RanksDisagreeError, ZeroRedundancyOptimizer, checkpoint
from tests.support.both import POLICIES, Both
from tests.support.harness import distributed
from tests.support.models import assert_same_tree, small_model

WARNING = "optimizer contains a parameter group with duplicate parameters"

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD, foreach": (SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "Adam": (Adam, {"lr": 0.1}),
    "Adagrad": (Adagrad, {"lr": 0.1}),
}


@contextlib.contextmanager
def warned(times: int = 1) -> Iterator[None]:
    """The code inside warns of repeated parameters this often, and of nothing else."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert [str(each.message)[: len(WARNING)] for each in caught] == [WARNING] * times


def groups_of(named: bool) -> list[dict[str, Any]]:
    """Two groups, of which the first has one parameter twice and another one three times."""
    generator = torch.Generator().manual_seed(0)
    a, b, c, d = (nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 70), (30, 30), (64,), (9,)))
    first = [("a", a), ("b", b), ("a", a), ("c", c), ("also a", a), ("b", b)]
    groups: list[dict[str, Any]] = [{"params": first, "lr": 0.05}, {"params": [("d", d)]}]
    return groups if named else [{**group, "params": [param for _, param in group["params"]]} for group in groups]


@distributed(2, 3)
@POLICIES
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("case", CLASSES)
def test_training_and_state_dicts_equal_the_plain_optimizers(
    world_size: int, case: str, bucket_view: bool, named: bool, shard_by: str
) -> None:
    optimizer_class, options = CLASSES[case]
    ours: dict[str, Any] = {"parameters_as_bucket_view": bucket_view, "shard_by": shard_by}
    with warned(2):
        both = Both(lambda: groups_of(named), optimizer_class, options, **ours)
    for _ in range(3):
        both.step()
        both.check()
    both.ours.consolidate_state_dict()
    if both.ours.rank == 0:
        assert_same_tree(both.ours.state_dict(), both.plain.state_dict(), "state dict")
    both.ours.load_state_dict(both.plain.state_dict())
    with warned(2):
        for optimizer in both.optimizers:  # a group that is added later may repeat a parameter, too
            late = nn.Parameter(torch.arange(7.0))
            optimizer.add_param_group({"params": [("e", late), ("e", late)] if named else [late, late]})
    both.step()
    both.check()


@distributed(2, 3)
def test_all_ranks_raise_if_one_is_warned_by_an_error_or_repeats_another_parameter(world_size: int) -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ours = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], SGD, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=WARNING):
            ZeroRedundancyOptimizer(groups_of(named=True), SGD, lr=0.1)
        with pytest.raises((UserWarning, PeerFailedError), match=WARNING):
            ours.add_param_group({"params": [one, one] if dist.get_rank() else [one]})
    assert len(ours.param_groups) == 1
    with warned(), pytest.raises(RanksDisagreeError, match=r"repeated parameters of group 0: \[2\]"):
        ZeroRedundancyOptimizer([one, other, one] if dist.get_rank() else [one, other, other, other], SGD, lr=0.1)


@distributed(2)
def test_a_checkpoint_refuses_a_repeated_parameter_by_name(world_size: int, tmp_path: Path) -> None:
    model = small_model()
    with warned():
        ours = ZeroRedundancyOptimizer([*model.parameters(), next(model.parameters())], SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"'0.weight' is several times in a group of torch.optim.sgd.SGD"):
        checkpoint.save(tmp_path, 1, model=model, optimizer=ours)
    assert ours.sharded_state_dict()["param_groups"][0]["params"] == [f"group0[{place}]" for place in range(4)]
