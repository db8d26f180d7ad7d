"""Notices gradients that nothing has averaged: without DDP, every rank has gradients of its own.

Training goes on then and the replicas stay equal, but each shard is updated with its owner's gradient alone. In the
first steps every rank sends a flag that depends on a few gradients, in the row of flags that ``step()`` sends anyway.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.common.flat_views import flat_like
from onecopy.errors import GradientsNotReducedWarning

PROBES = 4
"""Number of gradients that are compared in a step. Each has 16 of the 64 bits of a flag."""

STEPS = 12
"""Number of steps after which no gradients are compared any more."""

IN_A_ROW = 3
"""Number of steps in which all compared gradients must differ."""

CANDIDATES = 64
"""A probe is the sum of about this many elements of a gradient: a single element is often zero."""

NO_FLAG = 0
"""The flag of a rank that has compared nothing."""

_SIGN, _EXPONENT = 0x8000, 0x7F80
"""The bits of a bfloat16 that are all of -0.0, and the bits that are set in infinities and NaN."""


class GradientProbe:
    """Compares a few gradients of all ranks in the first steps, until it is clear whether they are averaged.

    A probe is rounded to bfloat16, so that gradients that differ by rounding only are equal. Every step looks at other
    parameters, because some of them may differ on purpose (parameters that DDP ignores).

    Args:
        device: the device of the flag; only gradients on it are compared, so that the host waits for no other device.
        group_rank: this rank.
        world_size: the number of ranks.
    """

    def __init__(self, device: torch.device, group_rank: int, world_size: int) -> None:
        self._device, self._group_rank = device, group_rank
        self._steps_left = STEPS
        self._ended = world_size == 1
        self._differing_steps = 0
        self._warns = False
        self._flag: Tensor | None = None

    def end(self) -> None:
        """Compare no more gradients."""
        self._ended = True

    def sample(self, params: Sequence[Tensor]) -> None:
        """Compute the flag of this step from the gradients of some parameters, on their device."""
        if self._ended or not self._steps_left:
            return
        self._steps_left -= 1
        candidates = [param for param in params if self._can_sample(param.grad)]
        values = torch.zeros(PROBES, dtype=torch.bfloat16, device=self._device)
        for place in range(min(PROBES, len(candidates))):
            param = candidates[(place * len(candidates) // PROBES + self._steps_left) % len(candidates)]
            assert param.grad is not None
            flat = flat_like(param.grad.detach(), param)
            if flat.is_complex():
                flat = torch.view_as_real(flat).view(-1)
            values[place] = flat[:: max(1, flat.numel() // CANDIDATES)].sum(dtype=torch.float32)
        self._flag = values.view(torch.int64)

    def _can_sample(self, gradient: Tensor | None) -> bool:
        return (
            gradient is not None
            and gradient.layout is torch.strided
            and gradient.device == self._device
            and gradient.numel() > 0
        )

    def take_flag(self) -> Tensor | None:
        """Return the flag of this step, or None if nothing was compared, and forget it."""
        flag, self._flag = self._flag, None
        return flag

    def compare(self, flags: Sequence[int]) -> None:
        """Compare the flags of all ranks.

        A probe that is zero or not finite on one of the ranks is ignored.
        """
        if self._ended:
            return
        rows = [struct.unpack("4H", struct.pack("q", flag)) for flag in flags]
        probes = [set(bits) for bits in zip(*rows, strict=True) if all(map(_is_usable, bits))]
        equal = sum(len(bits) == 1 for bits in probes)
        if 2 * equal >= len(probes) > 0:
            self.end()
        elif probes:
            self._differing_steps = 0 if equal else self._differing_steps + 1
        if self._differing_steps == IN_A_ROW:
            self._warns = True
            self.end()

    def warn_if_not_reduced(self) -> None:
        """Warn once, after the step in which it became clear that nothing averages the gradients.

        All ranks warn in the same step: where warnings are errors, no rank is left alone.
        """
        if self._warns:
            self._warns = False
            warnings.warn(
                f"rank {self._group_rank}: nothing averages the gradients. In {IN_A_ROW} steps all gradients that were "
                "compared differ between the ranks, and each parameter was updated with the gradient of one rank only. "
                "Wrap the model in DistributedDataParallel and call the wrapped model, not the module inside. If you "
                "average gradients yourself, do it before optimizer.step().",
                GradientsNotReducedWarning,
                stacklevel=7,  # the caller of optimizer.step(), which torch and not_compiled() wrap
            )


def _is_usable(bits: int) -> bool:
    return bits & ~_SIGN != 0 and bits & _EXPONENT != _EXPONENT
