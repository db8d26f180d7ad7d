"""The block of a ResNet-50: the standard bottleneck, with PyTorch's own choice of where to stride (in the 3x3)."""

from __future__ import annotations

from torch import Tensor, nn

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
