"""Where parameters live: bucket views, and parameters that are moved, converted or replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam

from onecopy import RanksDisagreeError, ZeroRedundancyOptimizer
from tests.support.both import BUCKET_VIEWS, POLICIES, tensors_of
from tests.support.failures import expect, failure_of
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_same_tree


class Net(nn.Module):
    """Two layers large enough to be cut by element, and a small one; they may have different types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 40, 3)
        self.square = nn.Linear(40, 40)
        self.head = nn.Linear(40, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images.to(self.conv.weight.dtype)).mean(dim=(2, 3))
        result: Tensor = self.head(self.square(hidden.to(self.square.weight.dtype)).tanh())
        return result


class Twins:
    """Equal models, one with a plain optimizer and one with ours, that see equal inputs."""

    def __init__(self, **ours: Any) -> None:
        torch.manual_seed(1)
        self.model, self.plain_model = Net(), Net()
        self.plain_model.load_state_dict(self.model.state_dict())
        self.plain = Adam(self.plain_model.parameters(), lr=0.1)
        self.ours = ZeroRedundancyOptimizer(self.model.named_parameters(), Adam, lr=0.1, **ours)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            images = torch.randn(2, 8, 6, 6)
            for model, optimizer in ((self.model, self.ours), (self.plain_model, self.plain)):
                optimizer.zero_grad()
                model(images).square().sum().backward()
                optimizer.step()
        self.check()

    def check(self) -> None:
        plain = list(self.plain_model.parameters())
        assert [param.dtype for param in self.model.parameters()] == [param.dtype for param in plain]
        assert_equal(self.model.parameters(), plain, "parameters")


def storages(optimizer: ZeroRedundancyOptimizer) -> set[int]:
    return {param.untyped_storage().data_ptr() for param in tensors_of(optimizer)}


@distributed(2, 3)
@BUCKET_VIEWS
@POLICIES
def test_bucket_views_keep_values_and_share_storages_and_otherwise_nothing_moves(
    world_size: int, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.check()
    layout = twins.ours.layout
    owners = {shard.owner for shard in layout.shards if layout.is_whole(shard)}
    assert len(storages(twins.ours)) == (len(owners) + len(layout.cut_params) if bucket_view else 6)
    addresses = [param.data_ptr() for param in twins.model.parameters()]
    twins.train()
    assert [param.data_ptr() for param in twins.model.parameters()] == addresses


def clone_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def swap_strides(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data


def transpose_in_place(model: Any) -> None:
    """The same memory, read in another order."""
    model.square.weight.data = model.square.weight.data.t()


def to_channels_last(model: Any) -> None:
    model.to(memory_format=torch.channels_last)


def clone_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == 0:
        clone_data(model)


def give_values_through_data(model: nn.Module) -> None:
    torch.manual_seed(5)
    for param in model.parameters():
        param.data = torch.randn_like(param)


def load_in_place(model: nn.Module) -> None:
    torch.manual_seed(9)
    model.load_state_dict(Net().state_dict())


def tie(model: Any) -> None:
    model.square.bias = model.conv.bias  # both have 40 elements


Change = Callable[[nn.Module], object]
FOLLOWED: dict[str, tuple[Change, int]] = {
    "to float64": (nn.Module.double, 0),
    "to bfloat16": (nn.Module.bfloat16, 0),
    "half of it to float64": (lambda model: model.get_submodule("conv").double(), 0),
    "to channels-last": (to_channels_last, 0),
    "to where it is": (lambda model: model.to("cpu"), 0),
    "strides swapped": (swap_strides, 0),
    "transposed in place": (transpose_in_place, 0),
    "data replaced": (clone_data, 3),
    "data replaced on one rank": (clone_on_one_rank, 3),
    "values given through data": (give_values_through_data, 3),
    "a load in place": (load_in_place, 3),
    "tied": (tie, 3),
}
"""A change of the model, and after how many steps it comes."""


@distributed(2, 3)
@BUCKET_VIEWS
@POLICIES
@pytest.mark.parametrize("case", FOLLOWED)
def test_moves_before_the_first_step_and_other_memory_or_values_at_any_time_are_followed(
    world_size: int, case: str, shard_by: str, bucket_view: bool
) -> None:
    change, steps = FOLLOWED[case]
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    before = len(storages(twins.ours))
    twins.train(steps)
    for model in (twins.model, twins.plain_model):
        change(model)
    twins.train()
    assert case == "half of it to float64" or len(storages(twins.ours)) == before, "it is in flat buckets again, or not"
    twins.ours.consolidate_state_dict()
    if twins.ours.rank == 0:
        assert_same_tree(twins.ours.state_dict()["state"], twins.plain.state_dict()["state"], "state")


def convert_on_one_rank(model: nn.Module) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        model.double()


def replace_on_one_rank(model: nn.Module) -> None:
    """The optimizer's own parameters get no gradient there, and one on the other ranks."""
    if dist.get_rank() == 0:
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


def give_bias(make: Callable[[], Tensor]) -> Callable[[nn.Module], object]:
    return lambda model: setattr(model.get_parameter("head.bias"), "data", make())


LATE, MISFIT = "was moved or converted too late: it was .* and is .*", "was given other memory that does not fit"
NO_GRADIENT = "rank 0: parameter 'conv.weight': no gradient"
REFUSED: dict[str, tuple[Change, int, type[Exception], str]] = {
    "to float64": (nn.Module.double, 3, RuntimeError, f"'conv.weight' {LATE}float64"),
    "to channels-last": (to_channels_last, 3, RuntimeError, f"'conv.weight' {LATE}strides"),
    "strides swapped": (swap_strides, 3, RuntimeError, f"'square.weight' {LATE}strides"),
    "transposed in place": (transpose_in_place, 3, RuntimeError, f"'square.weight' {LATE}strides"),
    "another shape": (give_bias(lambda: torch.zeros(4)), 0, RuntimeError, f"'head.bias' {MISFIT}"),
    "memory with gaps": (give_bias(lambda: torch.zeros(6)[::2]), 0, RuntimeError, f"'head.bias' {MISFIT}"),
    "on one rank": (convert_on_one_rank, 0, RanksDisagreeError, r"'conv.weight'.*rank \d: .*float64"),
    "replaced on one rank": (replace_on_one_rank, 0, RanksDisagreeError, NO_GRADIENT),
}
"""A change of the model, after how many steps it comes, and the error."""


@distributed(2, 3)
@BUCKET_VIEWS
@POLICIES
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_followed_is_refused_by_name(
    world_size: int, case: str, shard_by: str, bucket_view: bool
) -> None:
    change, steps, kind, text = REFUSED[case]
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train(steps)
    twins.ours.zero_grad()
    change(twins.model)
    if "head.bias" not in text:
        twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    expect(failure_of(twins.ours.step), kind, text)
    if case == "to float64":  # a refused conversion can be undone
        twins.model.float()
        twins.train()
