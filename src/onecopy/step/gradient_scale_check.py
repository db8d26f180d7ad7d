"""Notices gradients that were scaled by a different factor on every rank before ``step()``.

``torch.nn.utils.clip_grad_norm_`` does that after the reduce-scatter hook, because it computes another norm on every
rank. The check remembers a few elements of ``param.grad`` when gradients have been reduced, and reads them again in
``step()``. All ranks look at the same parameters, owned or not. A factor counts only if it is equal for all elements:
a user may scale single parameters or elements on purpose.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.layout import Layout

SAMPLED_PARAMS = 4
CANDIDATES = 64
"""Number of elements of a gradient of which the largest is remembered."""

TOLERANCE = 1e-3
UNKNOWN = 0
"""The factor of a rank that cannot tell."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One element of a parameter's gradient, in storage order, and its value after the reduction."""

    param: int
    position: int
    value: float


class GradientScaleCheck:
    """Samples of the gradients of some parameters on the CPU.

    There are none of parameters on an accelerator, because reading them would make the host wait.

    Attributes:
        takes_samples: whether there is a parameter to sample.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self._params = params
        full = [spec.index for spec in layout.params if spec.numel and params[spec.index].device.type == "cpu"]
        last = SAMPLED_PARAMS - 1
        self._sampled = sorted({full[place * (len(full) - 1) // last] for place in range(last + 1)}) if full else []
        self.takes_samples = bool(self._sampled)
        self._samples: list[Sample] = []

    def clear(self) -> None:
        """Forget the samples, because the gradients were used, or scaled by a factor that is equal on all ranks."""
        self._samples = []

    def take_samples(self) -> None:
        """Remember the largest of a few elements of each sampled gradient."""
        self._samples = []
        for index in self._sampled:
            gradient = self._params[index].grad
            if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
                continue
            stride = max(1, gradient.numel() // CANDIDATES)
            candidates = flat_like(gradient, self._params[index])[::stride]
            position = int(candidates.abs().argmax())
            value = float(candidates[position])
            if value != 0.0 and math.isfinite(value):
                self._samples.append(Sample(index, position * stride, value))

    def common_factor(self) -> int:
        """The factor by which all samples have changed, as the bits of a double, or ``UNKNOWN``."""
        factors = []
        for sample in self._samples:
            gradient = self._params[sample.param].grad
            if gradient is None or gradient.layout is not torch.strided:
                return UNKNOWN
            value = float(flat_like(gradient, self._params[sample.param])[sample.position])
            factors.append(value / sample.value)
        if len(factors) < 2 or min(factors) <= 0 or max(factors) > min(factors) * (1 + TOLERANCE):
            return UNKNOWN
        bits: int = struct.unpack("<q", struct.pack("<d", factors[0]))[0]
        return bits


def factors_differ(bits: Sequence[int]) -> list[float] | None:
    """The factors of all ranks if all are known and they differ, else None."""
    if UNKNOWN in bits:
        return None
    factors = [struct.unpack("<d", struct.pack("<q", each))[0] for each in bits]
    return factors if max(factors) > min(factors) * (1 + TOLERANCE) else None
