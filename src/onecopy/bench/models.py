"""The models of the benchmark: two small GPTs that are trained, and the parameter shapes of three known models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onecopy.planning.models import gpt_shapes, llama_shapes


class Block(nn.Module):
    """One transformer layer: attention and a feed-forward layer, each after its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + fed


class GPT(nn.Module):
    """A small GPT whose head is not tied to its embedding.

    With the defaults it has 24M parameters, 69% of them in the embedding.
    """

    def __init__(self, vocabulary: int = 32768, width: int = 512, head: int = 2048, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, head, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits over the head's classes."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return logits


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model and of a batch."""

    vocabulary: int = 32768
    width: int = 512
    head: int = 2048
    depth: int = 2
    batch: int = 2
    length: int = 64

    def make(self) -> GPT:
        """Construct the model, always from the same seed."""
        torch.manual_seed(0)
        return GPT(self.vocabulary, self.width, self.head, self.depth)

    def tokens(self, rank: int, step: int) -> Tensor:
        """Return a batch of tokens that depends only on the rank and the step."""
        generator = torch.Generator().manual_seed(1_000_003 * rank + step)
        return torch.randint(0, self.vocabulary, (self.batch, self.length + 1), generator=generator)


MODELS: dict[str, Sizes] = {
    "reference": Sizes(),
    "deep": Sizes(vocabulary=2048, width=384, head=2048, depth=12, batch=4),
}
"""24M parameters with a dominant embedding and small batches; 23M parameters in 12 equal blocks with larger batches."""

Shape = tuple[int, ...]


def resnet50_shapes() -> list[Shape]:
    """Return the parameter shapes of ResNet-50: 26M elements."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[Shape]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes = convolution(3, 64, 7)
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(depth):
            shapes += [*convolution(inputs, width, 1), *convolution(width, width, 3), *convolution(width, 4 * width, 1)]
            if number == 0:
                shapes += convolution(inputs, 4 * width, 1)  # of the shortcut
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


PARAMETER_SHAPES: dict[str, list[Shape]] = {
    "GPT-2 small": [*gpt_shapes(12, 768, 50257, 1024).values()],
    "ResNet-50": resnet50_shapes(),
    "Llama-like": [*llama_shapes(32, 1024, 2752, 1024, 32000).values()],
}
"""The shapes for which the host time of ``step()`` is measured: 148, 161 and 291 tensors.

The last ones are those of Llama 2 7B, with a hidden size of 1024 instead of 4096.
"""


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the cross-entropy against the next token, modulo the number of the head's classes."""
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten() % logits.shape[-1])


def elements_of(sizes: dict[str, int]) -> list[int]:
    """Return the number of elements of each parameter of a model."""
    with torch.device("meta"):
        return [param.numel() for param in Sizes(**sizes).make().parameters()]
