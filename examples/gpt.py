"""A small GPT, its batches and its loss, for ``compare_levels.py``, ``check_gpu.py`` and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

HEADS = 8


class Block(nn.Module):
    """One transformer layer: attention and a feed-forward layer, each after its norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    """A small GPT whose head is not tied to its embedding. With 0 ``positions`` it does not know where a word is."""

    def __init__(self, vocabulary: int, width: int, head: int, depth: int, positions: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, head, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits over the head's classes."""
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model and of a batch. With the defaults the model has 24M parameters, 69% of them in one."""

    vocabulary: int = 32768
    width: int = 512
    head: int = 2048
    depth: int = 2
    batch: int = 2
    length: int = 64
    positions: int = 0

    def make(self) -> GPT:
        """Construct the model, always from the same seed."""
        torch.manual_seed(0)
        return GPT(self.vocabulary, self.width, self.head, self.depth, self.positions)

    def tokens(self, rank: int, step: int) -> Tensor:
        """Return a batch of tokens that depends only on the rank and the step."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        return torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)

    def elements(self) -> int:
        """Return the number of elements of all parameters."""
        with torch.device("meta"):
            return sum(param.numel() for param in self.make().parameters())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy against the next token, modulo the number of the head's classes."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten() % logits.shape[-1])
