"""A ResNet-50: the standard bottleneck architecture, with PyTorch's own choice of where to stride (in the 3x3)."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Of each stage: its inner width, its number of blocks, and the stride of its first block."""

EXPANSION = 4


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution without a bias, normalised."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Bottleneck(nn.Module):
    """Narrow, convolve, widen; added to the input, which is projected where its shape changes."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * EXPANSION
        self.narrow = convolution(inputs, width, 1)
        self.convolve = convolution(width, width, 3, stride)
        self.widen = convolution(width, outputs, 1)
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else convolution(inputs, outputs, 1, stride)
        self.activation = nn.ReLU()

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.activation(self.narrow(image))
        hidden = self.activation(self.convolve(hidden))
        result: Tensor = self.activation(self.widen(hidden) + self.shortcut(image))
        return result


class ResNet50(nn.Module):
    """Fifty layers that have weights, in sixteen blocks; 25.6 million parameters with 1,000 classes."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        channels = 64
        for width, count, stride in STAGES:
            for position in range(count):
                blocks.append(Bottleneck(channels, width, stride if position == 0 else 1))
                channels = width * EXPANSION
        self.blocks = nn.Sequential(*blocks)
        self.classify = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        features = self.blocks(self.stem(image)).mean((2, 3))
        logits: Tensor = self.classify(features)
        return logits
