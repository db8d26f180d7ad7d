"""Where parameters live: buckets, moves, odd memory formats and data types, subgroups, and what travels."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from harness import distributed
from onecopy import RanksDisagreeError, ZeroRedundancyOptimizer

BOTH = pytest.mark.parametrize("bucket_view", [False, True])
POLICIES = pytest.mark.parametrize("shard_by", ["parameter", "element"])


class Net(nn.Module):
    """A convolution large enough to be cut by element, and a few small layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 20, 3)
        self.square = nn.Linear(20, 20)
        self.head = nn.Linear(20, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images.to(self.conv.weight.dtype)).mean(dim=(2, 3))
        result: Tensor = self.head(self.square(hidden).tanh())
        return result


class Twins:
    """Equal models, one with a plain optimizer and one with ours, that see equal inputs."""

    def __init__(self, optimizer_class: type[Optimizer] = Adam, **ours: Any) -> None:
        torch.manual_seed(1)
        self.model, self.plain_model = Net(), Net()
        self.plain_model.load_state_dict(self.model.state_dict())
        self.plain = optimizer_class(self.plain_model.parameters(), lr=0.1)  # type: ignore[call-arg]
        self.ours = ZeroRedundancyOptimizer(self.model.named_parameters(), optimizer_class, lr=0.1, **ours)

    def both(self, change: Callable[[nn.Module], object]) -> None:
        """Do the same to both models."""
        change(self.model)
        change(self.plain_model)

    def backward(self) -> None:
        images = torch.randn(2, 8, 6, 6)
        for model in (self.model, self.plain_model):
            model.zero_grad()
            model(images).square().sum().backward()

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            self.backward()
            self.ours.step()
            self.plain.step()
        self.check()

    def check(self) -> None:
        for (name, param), plain in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            assert param.dtype == plain.dtype
            assert torch.equal(param, plain), name


class Tensors:
    """The same for bare parameters with random gradients; ``grad_like`` may give gradients other strides."""

    def __init__(
        self,
        values: list[Tensor],
        optimizer_class: type[Optimizer] = Adam,
        grad_like: Callable[[Tensor], Tensor] = lambda gradient: gradient,
        seed: int = 0,
        **ours: Any,
    ) -> None:
        self.params = [nn.Parameter(_copy(value)) for value in values]
        self.plain_params = [nn.Parameter(_copy(value)) for value in values]
        self.plain = optimizer_class(self.plain_params, lr=0.1)  # type: ignore[call-arg]
        self.ours = ZeroRedundancyOptimizer(self.params, optimizer_class, lr=0.1, **ours)
        self.grad_like = grad_like
        self.generator = torch.Generator().manual_seed(seed)

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            for param, plain in zip(self.params, self.plain_params, strict=True):
                gradient = torch.randn(param.shape, dtype=param.dtype, generator=self.generator)
                param.grad = self.grad_like(gradient)
                plain.grad = self.grad_like(gradient.clone())
            self.ours.step()
            self.plain.step()
        for param, plain in zip(self.params, self.plain_params, strict=True):
            assert param.stride() == plain.stride()
            assert torch.equal(param, plain)


def _copy(value: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


def storages(model: nn.Module) -> set[int]:
    return {param.untyped_storage().data_ptr() for param in model.parameters()}


@contextmanager
def debug_log() -> Iterator[list[str]]:
    """What onecopy logs while distributed debugging is on."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("onecopy"), Keep()
    level, debug_level = logger.level, dist.get_debug_level()  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    dist.set_debug_level(dist.DebugLevel.INFO)  # type: ignore[attr-defined]
    try:
        yield messages
    finally:
        dist.set_debug_level(debug_level)  # type: ignore[attr-defined]
        logger.setLevel(level)
        logger.removeHandler(handler)


@distributed(2, 3)
@POLICIES
def test_bucket_views_keep_values_and_share_storages(world_size: int, shard_by: str) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=True)
    twins.check()
    owners = {
        shard.owner for shard in twins.ours.layout.shards if shard.numel == twins.ours.layout.params[shard.param].numel
    }
    assert len(storages(twins.model)) == len(owners) + len(twins.ours.layout.cut_params)
    assert len(storages(twins.model)) < len(list(twins.model.parameters()))
    addresses = [param.data_ptr() for param in twins.model.parameters()]
    twins.train()
    assert [param.data_ptr() for param in twins.model.parameters()] == addresses


@distributed(2, 3)
@POLICIES
def test_without_bucket_views_nothing_moves(world_size: int, shard_by: str) -> None:
    torch.manual_seed(1)
    model = Net()
    addresses = [param.data_ptr() for param in model.parameters()]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Adam, shard_by=shard_by)
    model(torch.ones(1, 8, 4, 4)).sum().backward()
    optimizer.step()
    assert [param.data_ptr() for param in model.parameters()] == addresses


def clone_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.clone()


def swap_strides(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.t().contiguous().t() if param.dim() == 2 else param.data


def transpose_in_place(model: nn.Module) -> None:
    """The same memory, read in another order."""
    assert isinstance(model, Net)
    model.square.weight.data = model.square.weight.data.t()


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to float64": lambda model: model.to(torch.float64),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half of it to float64": lambda model: model.get_submodule("conv").double(),
    "to channels-last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "to where it is": lambda model: model.to("cpu"),
    "data replaced": clone_data,
    "strides swapped": swap_strides,
    "transposed in place": transpose_in_place,
    "twice": lambda model: (model.double(), model.float()),
}


class MixedNet(Net):
    """Its layers may have different data types."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.conv(images.to(self.conv.weight.dtype)).mean(dim=(2, 3))
        result: Tensor = self.head(self.square(hidden.to(self.square.weight.dtype)).tanh())
        return result


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("case", MOVES)
def test_a_move_before_the_first_step_is_followed(world_size: int, case: str, shard_by: str, bucket_view: bool) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.model.__class__ = twins.plain_model.__class__ = MixedNet
    twins.both(MOVES[case])
    twins.train()
    twins.ours.consolidate_state_dict()
    if twins.ours.rank == 0:
        plain = twins.plain.state_dict()["state"]
        for index, state in twins.ours.state_dict()["state"].items():
            for key, value in state.items():
                assert value.dtype == plain[index][key].dtype
                assert torch.equal(value, plain[index][key]), (index, key)


@distributed(2, 3)
@BOTH
@POLICIES
def test_new_memory_for_the_same_values_is_followed_at_any_time(
    world_size: int, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.both(clone_data)
    twins.train()
    if dist.get_rank() == 0:
        clone_data(twins.model)
    twins.train()
    if bucket_view:
        assert len(storages(twins.model)) < len(list(twins.model.parameters()))


@distributed(2)
@BOTH
@POLICIES
def test_new_values_given_through_data_are_the_ones_that_count(
    world_size: int, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    torch.manual_seed(5)
    fresh = [torch.randn_like(param) for param in twins.model.parameters()]
    for model in (twins.model, twins.plain_model):
        for param, value in zip(model.parameters(), fresh, strict=True):
            param.data = value.clone()
    twins.train()


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize(
    ("case", "name", "new"),
    [
        ("to float64", "conv.weight", "float64"),
        ("to channels-last", "conv.weight", "strides"),
        ("strides swapped", "square.weight", "strides"),
    ],
)
def test_a_conversion_after_state_exists_is_refused_by_name(
    world_size: int, case: str, name: str, new: str, shard_by: str, bucket_view: bool
) -> None:
    twins = Twins(shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.ours.zero_grad()
    MOVES[case](twins.model)
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RuntimeError
    assert re.search(rf"'{name}' was moved or converted too late: it was .* and is .*{new}", str(refusal)), str(refusal)


def refusal_of(optimizer: ZeroRedundancyOptimizer) -> Exception:
    """What a step raises; the ranks meet before anybody judges it."""
    refusal: Exception | None = None
    try:
        optimizer.step()
    except Exception as error:
        refusal = error
    dist.barrier()
    assert refusal is not None, "the step was not refused"
    return refusal


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("steps_before", [0, 2])
def test_the_same_memory_read_in_another_order_is_never_ignored(
    world_size: int, shard_by: str, bucket_view: bool, steps_before: int
) -> None:
    tensors = Tensors([torch.randn(40, 40)], shard_by=shard_by, parameters_as_bucket_view=bucket_view)
    tensors.train(steps_before)
    for param in (*tensors.params, *tensors.plain_params):
        param.grad = None
        param.data = param.data.t()
    refusal: RuntimeError | None = None
    try:
        tensors.train()
    except RuntimeError as error:
        refusal = error
    if refusal is not None:
        assert steps_before > 0, "nothing stands in the way of following this"
        assert re.search(r"'group0\[0\]' was moved or converted too late", str(refusal)), str(refusal)
        return
    tensors.ours.consolidate_state_dict()
    if tensors.ours.rank == 0:
        average = tensors.ours.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(average, tensors.plain.state_dict()["state"][0]["exp_avg"])


@distributed(2, 3)
@BOTH
def test_a_refused_conversion_can_be_undone(world_size: int, bucket_view: bool) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.model.double()
    assert "'conv.weight'" in str(refusal_of(twins.ours))
    twins.model.float()
    twins.train()


@distributed(2, 3)
@BOTH
def test_a_conversion_on_one_rank_only_is_an_error_on_all(world_size: int, bucket_view: bool) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    if dist.get_rank() == world_size - 1:
        twins.model.double()
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RanksDisagreeError
    assert re.search(rf"'conv.weight'.*rank {world_size - 1}: .*float64", str(refusal)), str(refusal)


@distributed(2)
@BOTH
def test_other_shapes_and_memory_with_gaps_are_refused_by_name(world_size: int, bucket_view: bool) -> None:
    for value in (torch.zeros(4), torch.zeros(6)[::2], torch.zeros(1).expand(3)):
        twins = Twins(parameters_as_bucket_view=bucket_view)
        twins.model.head.bias.data = value
        refusal = refusal_of(twins.ours)
        assert type(refusal) is RuntimeError
        assert re.search("'head.bias' was given other memory that does not fit", str(refusal)), str(refusal)


@distributed(2, 3)
def test_parameters_replaced_on_one_rank_stop_all(world_size: int) -> None:
    """The optimizer's own parameters get no gradient there, and one on the other ranks."""
    twins = Twins()
    if dist.get_rank() == 0:
        twins.model.load_state_dict(
            {key: value.clone() for key, value in twins.model.state_dict().items()}, assign=True
        )
    twins.model(torch.ones(1, 8, 4, 4)).sum().backward()
    refusal = refusal_of(twins.ours)
    assert type(refusal) is RanksDisagreeError
    assert re.search("rank 0: parameter 'conv.weight': no gradient", str(refusal)), str(refusal)


@distributed(2, 3)
@BOTH
def test_weights_tied_after_construction_raise_no_false_alarm(world_size: int, bucket_view: bool) -> None:
    def tie(model: nn.Module) -> None:
        first, second = model.get_submodule("conv"), model.get_submodule("square")
        second.bias = first.bias  # both have 20 elements

    twins = Twins(parameters_as_bucket_view=bucket_view)
    twins.train()
    twins.both(tie)
    twins.train()


@distributed(2, 3)
@BOTH
@POLICIES
def test_loading_into_the_module_in_place_works(world_size: int, bucket_view: bool, shard_by: str) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view, shard_by=shard_by)
    twins.train()
    torch.manual_seed(9)
    state_dict = Net().state_dict()
    twins.both(lambda model: model.load_state_dict(state_dict))
    twins.check()
    twins.train()


ODD: dict[str, Callable[[], list[Tensor]]] = {
    "channels-last": lambda: [torch.randn(20, 8, 3, 3).to(memory_format=torch.channels_last), torch.randn(5)],
    "channels-last in 3-d": lambda: [
        torch.randn(5, 8, 3, 3, 4).to(memory_format=torch.channels_last_3d),
        torch.randn(5),
    ],
    "transposed": lambda: [torch.randn(60, 40).t(), torch.randn(3, 7).t()],
    "permuted": lambda: [torch.randn(5, 4, 3, 6, 7).permute(3, 0, 4, 2, 1), torch.randn(2, 3, 4).permute(2, 0, 1)],
    "complex": lambda: [torch.randn(40, 50, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64)],
    "complex and transposed": lambda: [torch.randn(40, 50, dtype=torch.complex128).t()],
    "several data types": lambda: [
        torch.randn(40, 50, dtype=torch.bfloat16),
        torch.randn(1500),
        torch.randn(41, 31, dtype=torch.float64),
        torch.randn(3, dtype=torch.bfloat16),
        torch.randn(1, 1, dtype=torch.float64),
        torch.randn(7, dtype=torch.float16),
    ],
    "nothing and scalars": lambda: [
        torch.zeros(0),
        torch.randn(()),
        torch.zeros(3, 0, 2),
        torch.randn(1),
        torch.randn(()).double(),
    ],
    "one parameter": lambda: [torch.randn(5)],
    "one scalar": lambda: [torch.randn(())],
}


def other_strides(gradient: Tensor) -> Tensor:
    """The same values, in memory the other way round."""
    backwards = list(reversed(range(gradient.dim())))
    return gradient.permute(backwards).contiguous().permute(backwards)


@distributed(2, 3)
@BOTH
@POLICIES
@pytest.mark.parametrize("case", ODD)
def test_odd_parameters_train_as_with_the_plain_optimizer(
    world_size: int, case: str, shard_by: str, bucket_view: bool
) -> None:
    torch.manual_seed(3)
    values = ODD[case]()
    for grad_like in (lambda gradient: gradient, other_strides):
        tensors = Tensors(values, grad_like=grad_like, shard_by=shard_by, parameters_as_bucket_view=bucket_view)
        large = [index for index, value in enumerate(values) if value.numel() > 1000]
        assert shard_by == "parameter" or list(tensors.ours.layout.cut_params) == large
        tensors.train()


@distributed(2)
def test_gradients_keep_their_strides_and_values(world_size: int) -> None:
    values = [torch.randn(60, 40)]
    tensors = Tensors(values, SGD, grad_like=other_strides, shard_by="element")
    tensors.train()
    assert tensors.params[0].grad is not None
    assert tensors.plain_params[0].grad is not None
    assert tensors.params[0].grad.stride() == (1, 60)
    assert torch.equal(tensors.params[0].grad, tensors.plain_params[0].grad)


@distributed(2, 3)
@BOTH
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_of_whole_parameters_are_stepped(world_size: int, bucket_view: bool, momentum: float) -> None:
    torch.manual_seed(2)
    ours_model, plain_model = (
        nn.ModuleList([nn.Embedding(64, 32, sparse=True), nn.Embedding(9, 4, sparse=True)]) for _ in range(2)
    )
    plain_model.load_state_dict(ours_model.state_dict())
    ours = ZeroRedundancyOptimizer(
        ours_model.parameters(),
        SGD,
        lr=0.1,
        momentum=momentum,
        elementwise=False,
        parameters_as_bucket_view=bucket_view,
    )
    assert ours.layout.cut_params == ()
    plain = SGD(plain_model.parameters(), lr=0.1, momentum=momentum)
    for step in range(3):
        for model in (ours_model, plain_model):
            model.zero_grad()
            for embedding in model:
                embedding(torch.tensor([step, 5, 5])).square().sum().backward()
        ours.step()
        plain.step()
    for param, expected in zip(ours_model.parameters(), plain_model.parameters(), strict=True):
        assert param.grad is not None
        assert param.grad.is_sparse
        assert torch.equal(param, expected)


@distributed(2)
@BOTH
def test_sparse_gradients_of_single_elements_are_exact_or_refused(world_size: int, bucket_view: bool) -> None:
    ours_params, plain_params = ([nn.Parameter(torch.ones(6)) for _ in range(8)] for _ in range(2))
    ours = ZeroRedundancyOptimizer(ours_params, SGD, lr=0.5, parameters_as_bucket_view=bucket_view)
    plain = SGD(plain_params, lr=0.5)
    for param in (*ours_params, *plain_params):
        param.grad = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.0]).to_sparse()
    if bucket_view:
        with pytest.raises(ValueError, match=r"parameter 'group0\[\d\]' has a sparse gradient of single elements"):
            ours.step()
        assert all(torch.equal(param, torch.ones(6)) for param in ours_params)
        return
    ours.step()
    plain.step()
    assert all(map(torch.equal, ours_params, plain_params))


def peak_growth(action: Callable[[], object]) -> int:
    """By how many bytes the process grows while something runs."""

    def read(field: str) -> int:
        match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match
        return int(match[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = read("VmRSS")
    action()
    return read("VmHWM") - before


@distributed(2)
@BOTH
def test_many_small_parameters_travel_in_bounded_memory(world_size: int, bucket_view: bool) -> None:
    values = [torch.full((256, 240), float(index)) for index in range(220)]
    assert sum(value.numel() * 4 for value in values) > 50 << 20
    with debug_log() as messages:
        tensors = Tensors(values, SGD, parameters_as_bucket_view=bucket_view)
    match = re.search(r"(\d+) messages a step, (\d+) bytes of staging", "\n".join(messages))
    assert match, messages
    sent, staging = int(match[1]), int(match[2])
    for param, plain in zip(tensors.params, tensors.plain_params, strict=True):
        param.grad = torch.full_like(param, 0.5)
        plain.grad = param.grad
    growth = peak_growth(tensors.ours.step)
    tensors.plain.step()
    for param, plain in zip(tensors.params, tensors.plain_params, strict=True):
        assert torch.equal(param, plain)
    if bucket_view:
        assert staging == 0
    else:
        assert sent > 5, "several packed messages are under way at once"
        assert 0 < staging < 48 << 20
    assert growth < 48 << 20


@distributed(4)
@BOTH
@POLICIES
def test_two_subgroups_train_side_by_side(world_size: int, shard_by: str, bucket_view: bool) -> None:
    members = [[1, 3], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = 0 if dist.get_rank() in members[0] else 1
    torch.manual_seed(20 + mine)
    tensors = Tensors(
        [torch.randn(60, 40), torch.randn(7), torch.randn(3, 3)],
        seed=mine,
        process_group=groups[mine],
        shard_by=shard_by,
        parameters_as_bucket_view=bucket_view,
    )
    ours = tensors.ours
    assert (ours.world_size, ours.rank, ours.global_rank) == (
        2,
        members[mine].index(dist.get_rank()),
        dist.get_rank(),
    )
    assert ours.process_group is groups[mine]
    tensors.train(5)
    ours.consolidate_state_dict(to=1)
    if ours.rank == 1:
        assert dist.get_rank() in (2, 3)
        for index, state in ours.state_dict()["state"].items():
            assert torch.equal(state["exp_avg"], tensors.plain.state_dict()["state"][index]["exp_avg"])
    dist.barrier()


@distributed(3)
def test_a_subgroup_of_one_and_a_rank_without_an_optimizer(world_size: int) -> None:
    alone = dist.new_group([1])
    if dist.get_rank() == 1:
        tensors = Tensors([torch.randn(60, 40), torch.randn(3)], process_group=alone, shard_by="element")
        tensors.train()
        tensors.ours.consolidate_state_dict()
        assert len(tensors.ours.state_dict()["state"]) == 2
    dist.barrier()


@distributed(2)
def test_a_group_with_a_backend_per_device_works(world_size: int) -> None:
    group = dist.new_group(backend="cpu:gloo")
    tensors = Tensors([torch.randn(60, 40), torch.randn(7)], process_group=group)
    tensors.train()
    assert tensors.ours.join_device == torch.device("cpu")
    dist.barrier()


@distributed(2, 3)
def test_under_distributed_debugging_every_rank_logs_its_share(world_size: int) -> None:
    with debug_log() as messages:
        optimizer = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(60, 40)), nn.Parameter(torch.ones(8))], Adam)
    rank, elements = optimizer.rank, optimizer.layout.elements_per_rank[optimizer.rank]
    assert any(re.search(rf"rank {rank} owns {elements} of 2408 elements", message) for message in messages)
    tables = [message for message in messages if message == str(optimizer.layout)]
    assert len(tables) == (1 if rank == 0 else 0)


@distributed(2)
def test_otherwise_construction_logs_nothing(world_size: int) -> None:
    with debug_log() as messages:
        dist.set_debug_level(dist.DebugLevel.OFF)  # type: ignore[attr-defined]
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(60, 40))], Adam)
    assert messages == []


@distributed(2, 3)
@BOTH
def test_messages_that_a_user_has_under_way_in_the_same_group_are_left_alone(
    world_size: int, bucket_view: bool
) -> None:
    twins = Twins(parameters_as_bucket_view=bucket_view)
    arriving = [torch.zeros(5000) for _ in range(world_size)]
    others = [rank for rank in range(world_size) if rank != dist.get_rank()]
    works = [dist.irecv(arriving[rank], rank) for rank in others]
    twins.train(1)
    twins.ours.consolidate_state_dict()
    works += [dist.isend(torch.full((5000,), dist.get_rank() + 1.0), rank) for rank in others]
    for work in works:
        assert work is not None
        work.wait()
    for rank, received in enumerate(arriving):
        expected = 0.0 if rank == dist.get_rank() else rank + 1.0
        assert torch.equal(received, torch.full((5000,), expected))
    twins.train(1)
