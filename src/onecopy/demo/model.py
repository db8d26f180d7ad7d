"""A small GPT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

HEAD_WIDTH = 32


class Block(nn.Module):
    """Attention and a layer of neurons, each added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // HEAD_WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the hidden state after this block."""
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm1(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        neurons: Tensor = self.down(functional.gelu(self.up(self.norm2(hidden))))
        return hidden + neurons


class SmallGPT(nn.Module):
    """A GPT whose embedding is also its output layer.

    Args:
        words: the number of words.
        length: the most words of a sequence.
        width: the width of the layers.
        layers: the number of blocks.
    """

    def __init__(self, words: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.length = length
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits of each next word."""
        hidden = self.tokens(words) + self.positions.weight[: words.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)

    @torch.no_grad()
    def write(self, count: int, stop: int) -> list[int]:
        """Return the words that the model draws after the word ``stop``, up to the next one or ``count`` words."""
        words, generator = [stop], torch.Generator().manual_seed(0)
        while len(words) <= count and (len(words) == 1 or words[-1] != stop):
            logits = self(torch.tensor([words[-self.length :]]))[0, -1].float()
            words.append(int(torch.multinomial((logits / 0.5).softmax(0), 1, generator=generator)))
        return words[1:]
