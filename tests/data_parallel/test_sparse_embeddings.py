"""``ShardedDataParallel(sparse_embeddings=True)``: gradients by rows, and the same training as with dense ones."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm import limits
from onecopy.data_parallel import sparse_rows
from onecopy.data_parallel.sparse_rows import EmbeddingRows, RowBucket, RowRange
from onecopy.errors import RanksDisagreeError
from tests.support.data_parallel import ADAMW, ROUNDING, SGD, Side, as_if_large
from tests.support.data_parallel_use import Meeting
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal

WORDS, WIDTH = 64, 10
"""A row is no multiple of 64 elements, so that ranges begin and end inside rows."""


class Reader(nn.Module):
    """Embeddings, one of them in the middle of the backward pass, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Embedding(WORDS, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.words(words).mean(1))) + self.other(words).sum(1)
        outputs: Tensor = self.last(hidden)
        return outputs


class Tied(Reader):
    """The words' embedding is the output's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WORDS, bias=False)
        self.last.weight = self.words.weight


class Borrowed(Reader):
    """The words' weight is read by a function beside its module, which makes its gradient dense."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + (self.words.weight[:, :4] * 0.5).mean(0)


class Sometimes(Reader):
    """One rank does not use the embedding in every other step."""

    def forward(self, words: Tensor) -> Tensor:
        if int(words[0, 0]) % 2 == dist.get_rank() % 2:
            outputs: Tensor = self.last(self.other(words).sum(1))
            return outputs
        return super().forward(words)


def words_of(rank: int, step: int, few: bool = True) -> Tensor:
    """Words with repetitions: few of all there are, or so many that dense gradients are shorter."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (2 if few else 40, 4), generator=generator)


@contextlib.contextmanager
def small_ones_too() -> Iterator[None]:
    """Send embeddings by rows that are so small that it would not be worth it."""
    with pytest.MonkeyPatch.context() as patch, as_if_large():
        patch.setattr(sparse_rows, "SPARSE_BYTES", 1)
        yield


def row_buckets(side: Side) -> list[RowBucket]:
    return [bucket for bucket in side.sharded._reducer._buckets if isinstance(bucket, RowBucket)]


def both(make: Callable[[], nn.Module] = Reader, optimizer: Any = torch.optim.SGD, **options: Any) -> tuple[Side, Side]:
    """DDP with dense gradients, and ours."""
    values = ADAMW if optimizer is torch.optim.AdamW else SGD if optimizer is torch.optim.SGD else {"lr": 1e-2}
    plain = Side(False, make, optimizer, values)
    with small_ones_too():
        return plain, Side(True, make, optimizer, values, sparse_embeddings=True, **options)


def backward_of(side: Side, step: int, few: bool = True) -> None:
    side.model(words_of(dist.get_rank(), step, few)).float().square().mean().backward()


def one_step(side: Side, step: int, few: bool = True) -> None:
    side.optimizer.zero_grad()
    backward_of(side, step, few)
    side.optimizer.step()


# The same training


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor], ids=["SGD", "AdamW", "whole"]
)
@pytest.mark.parametrize("make", [Reader, Tied, Borrowed])
@distributed(1, 2, 3, 4)
def test_it_trains_like_ddp_with_dense_gradients(
    world_size: int, make: Callable[[], nn.Module], optimizer: type[Optimizer], overlap: bool
) -> None:
    plain, ours = both(make, optimizer, overlap_forward=overlap, uses={"": ["words"]} if overlap else None)
    assert len(row_buckets(ours)) == (1 if make is Tied else 2)
    for step in range(12):
        with small_ones_too():
            for side in (plain, ours):
                one_step(side, step, few=step % 4 != 3)
        # What a function reads beside the module is added to a sum of rows, or row by row to it: another order.
        exact = world_size <= 2 and make is not Borrowed
        assert_equal(ours.params, plain.params, f"step {step}", 0.0 if exact else 2e-5)
    assert_replicas_equal(ours.params)


@distributed(2, 3)
def test_dense_gradients_and_those_by_rows_add_up_to_the_same(world_size: int) -> None:
    """Each rank chooses for itself; also on three ranks the order of adding is the same."""
    with small_ones_too():
        dense, ours = Side(True, Reader), Side(True, Reader, sparse_embeddings=True)
        for step in range(8):
            for side in (dense, ours):
                one_step(side, step, few=(step + dist.get_rank()) % 3 > 0)
            assert_equal(ours.params, dense.params, f"step {step}")


@pytest.mark.parametrize("passes", ["reduced twice", "not synchronised", "both"])
@distributed(2, 3)
def test_gradients_are_accumulated(world_size: int, passes: str) -> None:
    plain, ours = both()
    for step in range(5):
        for side in (plain, ours):
            side.optimizer.zero_grad(set_to_none=step % 2 == 0)
            if passes != "reduced twice":
                with side.model.no_sync():
                    backward_of(side, 10 * step)
                    backward_of(side, 10 * step + 1)
            if passes != "not synchronised":
                backward_of(side, 10 * step + 2)
            backward_of(side, 10 * step + 3)
            side.optimizer.step()
        assert_equal(ours.params, plain.params, f"step {step}", ROUNDING)


@distributed(2)
def test_sparse_gradients_that_were_zeroed_are_not_used(world_size: int) -> None:
    plain, ours = both()
    for side in (plain, ours):
        with side.model.no_sync():
            backward_of(side, 0)
        for param in side.params:
            assert param.grad is not None
            param.grad.zero_()
        backward_of(side, 1)
        side.optimizer.step()
    assert_equal(ours.params, plain.params, "after zeroing", ROUNDING)


@distributed(2, 3)
def test_clipping_finds_the_same_norm(world_size: int) -> None:
    plain, ours = both(optimizer=torch.optim.AdamW)
    for step in range(4):
        norms = []
        for side in (plain, ours):
            side.optimizer.zero_grad()
            backward_of(side, step)
            norms.append(side.zero.clip_grad_norm_(0.1) if side.ours else nn.utils.clip_grad_norm_(side.params, 0.1))
            side.optimizer.step()
        torch.testing.assert_close(norms[0], norms[1])
        assert_equal(ours.params, plain.params, f"step {step}", 1e-5)


@distributed(2, 3)
def test_an_embedding_that_a_rank_does_not_use(world_size: int) -> None:
    with small_ones_too():
        dense, ours = Side(True, Sometimes), Side(True, Sometimes, sparse_embeddings=True)
        for step in range(8):
            for side in (dense, ours):
                one_step(side, step)
            assert_equal(ours.params, dense.params, f"step {step}")
    assert_replicas_equal(ours.params)


@pytest.mark.parametrize("few", ["everywhere", "nowhere", "on some ranks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", [None, torch.float32])
@distributed(2, 3)
def test_mixed_precision(world_size: int, dtype: torch.dtype, reduce: torch.dtype | None, few: str) -> None:
    """The same as with dense gradients, also of words that come several times."""
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=reduce)
    with small_ones_too():
        dense, ours = (
            Side(True, Reader, torch.optim.AdamW, ADAMW, mixed_precision=policy, sparse_embeddings=sparse)
            for sparse in (False, True)
        )
        for step in range(6):
            for side in (dense, ours):
                one_step(side, step, {"everywhere": True, "nowhere": False}.get(few, dist.get_rank() == step % 2))
            assert_equal(ours.params, dense.params, f"step {step}")


@distributed(2, 3)
def test_uneven_inputs(world_size: int) -> None:
    plain, ours = both()
    for side in (plain, ours):
        with Join([side.model, side.optimizer] if side.ours else [side.model]):  # type: ignore[list-item]
            for step in range(2 + 2 * dist.get_rank()):
                one_step(side, step)
    assert_equal(ours.params, plain.params, "uneven", ROUNDING)


@distributed(4)
def test_a_mesh(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with small_ones_too():
        plain = Side(False, Reader)
        ours = Side(True, Reader, group=mesh.get_group("shard"), mesh=mesh, sparse_embeddings=True)
        for step in range(6):
            for side in (plain, ours):
                one_step(side, step)
            assert_equal(ours.params, plain.params, f"step {step}", ROUNDING)


class Meets(Reader):
    """After the other embedding's gradient has come, its backward pass waits for all ranks."""

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words).mean(1)
        outputs: Tensor = self.last(torch.tanh(self.layer(Meeting.apply(hidden))) + self.other(words).sum(1))
        return outputs


@distributed(2, 3)
def test_no_rank_waits_for_rows_that_others_receive_later(world_size: int) -> None:
    """Dense values are received only when a rank adds up, which must not keep another from getting there."""
    with small_ones_too(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "GRADIENT_BYTES_IN_FLIGHT", 1)
        ours = Side(True, Meets, sparse_embeddings=True)
        for step in range(4):
            one_step(ours, step, few=step % 2 == 0)
    assert_replicas_equal(ours.params)


class Twice(Reader):
    """Reads its words in two calls, the second time some of the same, and the first ones of an empty batch."""

    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) + super().forward(words.flip(0)[:, :2]) + super().forward(words[:0]).sum(0)


@distributed(1, 2, 3)
def test_an_embedding_that_runs_several_times(world_size: int) -> None:
    plain, ours = both(Twice)
    for step in range(4):
        for side in (plain, ours):
            one_step(side, step)
        assert_equal(ours.params, plain.params, f"step {step}", ROUNDING)


class ParameterSync(nn.Module):
    """A parameter gets the same gradient as the embedding's output, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(8 * WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, words: Tensor | None) -> Tensor:
        hidden = self.shift.view(8, WIDTH)
        outputs: Tensor = self.last(hidden if words is None else hidden + self.words(words.flatten()))
        return outputs


@distributed(2)
def test_rows_that_a_pass_leaves_are_in_memory_of_their_own_and_do_not_pile_up(world_size: int) -> None:
    with small_ones_too():
        dense, ours = (Side(True, ParameterSync, sparse_embeddings=sparse) for sparse in (False, True))
    for side in (dense, ours):
        for step in range(3):
            for number in range(4):
                with side.sharded.no_sync():
                    words = None if number % 2 else words_of(dist.get_rank(), 10 * step)
                    side.model(words).square().sum().backward()
            left = side.module.get_parameter("words.weight").grad
            assert left is not None
            if side is ours:
                assert left.is_sparse
                assert left.coalesce().values().shape[0] == left._values().shape[0] <= 8
            side.model(words_of(dist.get_rank(), 10 * step + 1)).square().sum().backward()
            side.optimizer.step()
            side.optimizer.zero_grad()
    assert_equal(ours.params, dense.params, "after passes that left their gradients", ROUNDING)


class Gathered(Reader):
    """Its weight is read in a way that makes gradients sparse in both dimensions."""

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.gather(self.words.weight, 0, words[:, :1].expand(-1, WIDTH), sparse_grad=True)
        outputs: Tensor = self.last(hidden)
        return outputs


@distributed(2)
def test_other_sparse_gradients_are_refused_by_name(world_size: int) -> None:
    with small_ones_too():
        ours = Side(True, Gathered, sparse_embeddings=True)
        with pytest.raises(ValueError, match=r"'words\.weight' has a sparse gradient"):
            backward_of(ours, 0)


@distributed(2)
def test_replicas_add_up_at_the_same_time_whatever_rows_they_have(world_size: int) -> None:
    """One that waits for its replica must not wait for one that waits inside its backward pass."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with small_ones_too(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "GRADIENT_BYTES_IN_FLIGHT", 500)
        ours = Side(True, Meets, group=mesh.get_group("shard"), mesh=mesh, sparse_embeddings=True)
        for step in range(3):
            words = words_of(0, step, few=False)[: 6 if dist.get_rank() else 1]
            ours.model(words).square().mean().backward()
            ours.optimizer.step()
    assert_replicas_equal(ours.params)


# What it is for


class Large(nn.Module):
    """An embedding of 4 MB, of which a batch uses a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16384, 64)
        self.last = nn.Linear(64, 4)

    def forward(self, words: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.words(words).mean(1))
        return outputs


@distributed(2, 4)
def test_only_rows_travel(world_size: int) -> None:
    """Reducing sends less than a tenth of the model. The loopback may count what others send, too: a rough test."""
    side = Side(True, Large, sparse_embeddings=True)
    (bucket,) = row_buckets(side)
    for step in range(2):
        one_step(side, step)
    dist.barrier()
    before = int(re.findall(r"lo:(.*)", Path("/proc/net/dev").read_text())[0].split()[8])
    backward_of(side, 3)
    dist.barrier()
    sent = int(re.findall(r"lo:(.*)", Path("/proc/net/dev").read_text())[0].split()[8]) - before
    assert 0 < sent < 0.1 * bucket.plan.numel * 4 * (world_size - 1)
    assert bucket.shard.numel() == 16384 * 64 // world_size


@distributed(2)
def test_which_embeddings_are_chosen(world_size: int) -> None:
    """Large ones whose weights no other module has, and for which torch has sparse gradients."""
    module = nn.ModuleDict(
        {
            "large": nn.Embedding(16384, 64),
            "small": nn.Embedding(16, 64),
            "counted": nn.Embedding(16384, 64, scale_grad_by_freq=True),
            "shared": nn.Embedding(16384, 64),
            "output": nn.Linear(64, 16384, bias=False),
            "bag": nn.EmbeddingBag(16384, 64),
            "frozen": nn.Embedding(16384, 64),
        }
    )
    module["output"].weight = module["shared"].weight
    module["frozen"].requires_grad_(False)
    for wanted, expected in ((True, ["large.weight"]), (False, [])):
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, optimizer, sparse_embeddings=wanted)
        found = [name for bucket in model._reducer._buckets if isinstance(bucket, RowBucket) for name in bucket.names]
        assert found == expected


@distributed(2)
def test_the_module_itself_stays_as_it_was(world_size: int) -> None:
    """So that it can be copied, used without the wrapper, and wrapped again."""
    module = Large()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    model = ShardedDataParallel(module, optimizer, sparse_embeddings=True)
    seen = []
    handle = module.words.register_forward_hook(lambda words, _inputs, _output: seen.append(words.sparse))
    loss = model(words_of(0, 0)).sum()
    with pytest.raises(IndexError):
        model(torch.tensor([[20_000]]))
    handle.remove()
    assert seen == [True]
    assert not module.words.sparse
    loss.backward()
    other = copy.deepcopy(module)
    other.zero_grad()
    other(words_of(0, 0)).sum().backward()
    assert other.words.weight.grad is not None
    assert not other.words.weight.grad.is_sparse


@distributed(2)
def test_ranks_that_ask_for_different_things(world_size: int) -> None:
    module = Large()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(RanksDisagreeError, match="sparse_embeddings"):
        ShardedDataParallel(module, optimizer, sparse_embeddings=dist.get_rank() == 0)
    assert not module.words.sparse
    assert optimizer.wait_for_transfers is None


# Rows and ranges, without processes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """A matrix's number of rows and their width, and a range of its elements."""
    count, width = draw(st.integers(1, 9)), draw(st.integers(1, 7))
    start = draw(st.integers(0, count * width))
    return count, width, start, draw(st.integers(start, count * width))


@given(ranges(), st.data())
@example((3, 5, 6, 9), None)
@settings(max_examples=300)
def test_rows_are_added_where_they_belong(matrix: tuple[int, int, int, int], data: Any) -> None:
    """Also where a range begins or ends inside a row, or lies inside a single one; and only those that concern it."""
    count, width, start, stop = matrix
    chosen = data.draw(st.sets(st.integers(0, count - 1))) if data is not None else {0, 1}
    numbers = torch.tensor(sorted(chosen), dtype=torch.int64)
    values = 1.0 + torch.arange(len(chosen) * width, dtype=torch.float32).view(len(chosen), width)
    dense = torch.zeros(count, width)
    dense[numbers] = values
    part = RowRange(start, stop, width)
    sent = part.part_of(EmbeddingRows(numbers, values))
    touched = {element // width for element in range(start, stop)}
    assert set(sent.numbers.tolist()) >= chosen & touched
    assert start == stop or set(sent.numbers.tolist()) == chosen & touched
    total = torch.zeros(stop - start)
    for _ in range(2):
        part.add(total, sent)
    part.scale(total, sent.numbers, 0.25)
    assert torch.equal(total, 0.5 * dense.view(-1)[start:stop])
