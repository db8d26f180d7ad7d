"""The models of the benchmark: small GPTs, one with an embedding that is most of it, one deep without such a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and a feed-forward layer, each with its norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    """24M parameters with the defaults, 69% of them in the embedding; the head is not tied to it."""

    def __init__(self, vocabulary: int = 32768, width: int = 512, head: int = 2048, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, head, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits over the head's classes."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return logits


@dataclass(frozen=True, slots=True)
class Sizes:
    """A model and a batch."""

    vocabulary: int = 32768
    width: int = 512
    head: int = 2048
    depth: int = 2
    batch: int = 2
    length: int = 64

    def make(self) -> GPT:
        """The model, always from the same seed."""
        torch.manual_seed(0)
        return GPT(self.vocabulary, self.width, self.head, self.depth)

    def tokens(self, rank: int, step: int) -> Tensor:
        """A batch that depends only on the rank and the step."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        return torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)


MODELS: dict[str, Sizes] = {
    "reference": Sizes(),
    "deep": Sizes(vocabulary=2048, width=384, head=2048, depth=12, batch=4),
}
"""24M parameters with a dominant embedding and small batches; 23M parameters in 12 equal blocks, with larger ones."""


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy against the next token, folded into the head's classes."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten() % logits.shape[-1])
