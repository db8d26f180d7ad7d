"""Tiny models, inputs and comparisons that several test files share. All of it is the same in every process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

WORDS = 400
WIDTH = 16
SIDE = 6


class Everything(nn.Module):
    """All that makes ownership hard, in one model.

    A dominant embedding tied to the output, channels-last convolutions, a branch that is never used, one that is used
    by one rank in every other step, and a layer to be frozen half way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Conv2d(WIDTH, 8, 3, padding=1)
        self.second = nn.Conv2d(8, WIDTH, 3, stride=2)
        self.frozen_later = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, 4)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        self.output.weight = self.embedding.weight
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, words: Tensor, take_branch: bool) -> Tensor:
        image = self.embedding(words).permute(0, 3, 1, 2)
        hidden = functional.relu(self.second(functional.relu(self.first(image)))).mean((2, 3))
        hidden = hidden + torch.tanh(self.frozen_later(hidden))
        if take_branch:
            hidden = hidden + self.sometimes(hidden)
        logits: Tensor = self.output(hidden)
        return logits


def everything_inputs(rank: int, step: int) -> tuple[Tensor, Tensor, bool]:
    """Words, targets and whether this rank takes the branch: rank 0 alone, in every other step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(WORDS, (2, SIDE, SIDE), generator=generator)
    targets = torch.randint(WORDS, (2,), generator=generator)
    return words, targets, rank == 0 and step % 2 == 0


def small_model(seed: int = 3) -> nn.Sequential:
    """Two linear layers; the first weight, of 1,280 elements, is cut by ``shard_by="element"`` and whole otherwise."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 160), nn.Tanh(), nn.Linear(160, 4))
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.3, 0.3, generator=generator)
    return model


def small_inputs(rank: int, step: int) -> Tensor:
    """One rank's batch."""
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1000 * step + rank + 7))


def small_ddp(**options: Any) -> DistributedDataParallel:
    """The small model under DDP."""
    return DistributedDataParallel(small_model(), **options)


def small_loss(model: nn.Module, step: int) -> Tensor:
    """This rank's loss in one step, in the type of the model."""
    inputs = small_inputs(dist.get_rank(), step).to(next(model.parameters()).dtype)
    loss: Tensor = model(inputs).square().mean()
    return loss


def more_for_later_ranks(rank: int) -> int:
    """How many batches a rank has if the last rank goes on longest."""
    return 1 + 2 * rank


def more_for_earlier_ranks(rank: int) -> int:
    """How many batches a rank has if the first rank goes on longest."""
    return 8 - 2 * rank


def values(params: Iterable[Tensor]) -> list[Tensor]:
    """Copies of the parameters as they are now."""
    return [param.detach().clone() for param in params]


def assert_equal(ours: Iterable[Tensor], plain: Iterable[Tensor], what: str, tolerance: float = 0.0) -> None:
    """Two lists of tensors are the same bit by bit, or within a tolerance (relative to 1 and to the value)."""
    for index, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        if not torch.equal(mine, theirs):
            difference = float((mine.detach() - theirs.detach()).abs().max())
            assert tolerance, f"{what}: tensor {index} of shape {tuple(mine.shape)} differs by {difference:.3g}"
            torch.testing.assert_close(
                mine, theirs, rtol=tolerance, atol=tolerance, msg=f"{what}: tensor {index} differs by {difference:.3g}"
            )


def assert_same_tree(ours: Any, plain: Any, what: str, tolerance: float = 0.0) -> None:
    """Two state dicts are the same: keys, types, values, and strides of tensors."""
    assert type(ours) is type(plain), f"{what}: {type(ours)} instead of {type(plain)}"
    if isinstance(plain, Tensor):
        mine = (ours.dtype, ours.shape, ours.stride())
        assert mine == (plain.dtype, plain.shape, plain.stride()), f"{what}: {mine} instead of {plain.stride()}"
        assert_equal([ours], [plain], what, tolerance)
    elif isinstance(plain, dict):
        assert set(ours) == set(plain), f"{what}: keys {sorted(map(str, ours))} not {sorted(map(str, plain))}"
        for key in plain:
            assert_same_tree(ours[key], plain[key], f"{what}[{key!r}]", tolerance)
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), what
        for position, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
            assert_same_tree(mine, theirs, f"{what}[{position}]", tolerance)
    else:
        assert ours == plain, f"{what}: {ours!r} instead of {plain!r}"


def assert_replicas_equal(params: Iterable[Tensor]) -> None:
    """All ranks hold the same values, bit by bit."""
    mine = torch.cat([param.detach().reshape(-1) for param in params])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, other in enumerate(everyone):
        assert torch.equal(mine, other), f"rank {dist.get_rank()} and rank {rank} hold other values"
