"""The reduce-scatter of pieces by owner: means, where they go, and that they do not overflow."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffers import BufferPool
from onecopy.comm.collectives import Collectives
from onecopy.comm.reduce_scatter import Piece, ReduceScatterPlan
from tests.support.harness import distributed


@dataclass(frozen=True)
class Case:
    """How 300 gradients of each source are cut, and how they are sent."""

    name: str
    direct_bytes: int = 1 << 18
    sources: int = 2
    dtype: torch.dtype = torch.float32
    sent_as: torch.dtype = torch.float32
    gap: int = 0
    all_of_one_owner: bool = False


CASES = [
    Case("packed"),
    Case("in place", direct_bytes=4),
    Case("some in place", direct_bytes=400),
    Case("with gaps", gap=5),
    Case("sent as bf16", direct_bytes=4, sent_as=torch.bfloat16),
    Case("bf16", direct_bytes=4, dtype=torch.bfloat16, sent_as=torch.bfloat16),
    Case("fp64", direct_bytes=4, dtype=torch.float64, sent_as=torch.float64),
    Case("one owner", all_of_one_owner=True),
]


def make_pieces(case: Case, ranks: int) -> list[Piece]:
    """Pieces of all sources, for every owner in turn."""
    pieces, ends = [], [0] * ranks
    for source in range(case.sources):
        start = 0
        for number, length in enumerate((10, 120, 100, 70)):
            owner = 0 if case.all_of_one_owner else number % ranks
            pieces.append(Piece(source, start, start + length, owner, ends[owner]))
            ends[owner] += length + case.gap
            start += length
    return pieces


@pytest.mark.parametrize("into", [False, True], ids=["in place of the pieces", "into other memory"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@distributed(1, 2, 3)
def test_every_owner_gets_the_mean_of_its_pieces(world_size: int, case: Case, into: bool) -> None:
    collectives, everyone = Collectives(), []
    here = collectives.group_rank
    for rank in range(world_size):
        generators = [torch.Generator().manual_seed(10 * rank + source) for source in range(case.sources)]
        everyone.append([torch.randn(300, generator=each).to(case.dtype) for each in generators])
    pieces, pool = make_pieces(case, world_size), BufferPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "DIRECT_GRADIENT_BYTES", case.direct_bytes)
        patch.setattr(limits, "REDUCE_MESSAGE_BYTES", 256)
        reduction = ReduceScatterPlan(collectives, pieces, case.dtype, case.sent_as, torch.device("cpu"))
        for tag in range(2):
            sources: list[Tensor | None] = [source.clone() for source in everyone[here]]
            length = max((piece.offset + piece.numel for piece in pieces if piece.owner == here), default=0)
            target = torch.full((length,), -1.0, dtype=case.sent_as) if into else None
            reduction.start(sources, pool, collectives.reserve_tags() + tag, target).wait()
            for piece in pieces:
                rows = [(rank[piece.source][piece.start : piece.stop]).to(case.sent_as) for rank in everyone]
                mean = sum(row * (1 / world_size) for row in rows)  # as DDP does it
                assert isinstance(mean, Tensor)
                source = sources[piece.source]
                if piece.owner != here:
                    untouched = everyone[here][piece.source][piece.start : piece.stop]
                    assert source is None or torch.equal(source[piece.start : piece.stop], untouched)
                elif target is not None:
                    assert torch.equal(target[piece.offset : piece.offset + piece.numel], mean), piece
                else:
                    assert source is not None
                    assert torch.equal(source[piece.start : piece.stop], mean.to(case.dtype)), piece
    assert not pool._in_use


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@distributed(2, 3)
def test_gradients_are_scaled_before_they_are_added_up(world_size: int, dtype: torch.dtype) -> None:
    collectives = Collectives()
    gradient = torch.full((world_size * 10,), torch.finfo(dtype).max / 1.5, dtype=dtype)
    pieces = [Piece(0, 10 * owner, 10 * owner + 10, owner, 0) for owner in range(world_size)]
    reduction = ReduceScatterPlan(collectives, pieces, dtype, dtype, gradient.device)
    reduction.start([gradient], BufferPool(), collectives.reserve_tags(), None).wait()
    mean = gradient[10 * collectives.group_rank :][:10]
    assert mean.isfinite().all()
    torch.testing.assert_close(mean, torch.full_like(mean, torch.finfo(dtype).max / 1.5))
