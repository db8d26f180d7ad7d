"""Telling whether gradients were scaled by another factor on every rank before ``step()``.

That is what ``torch.nn.utils.clip_grad_norm_`` does after the reduce-scatter hook, because it finds another norm on
every rank. A few elements of ``param.grad`` are remembered when gradients have been reduced, and looked at again in
``step()``. They are of the same parameters on all ranks, owned or not, where the gradient is not zero, and a factor
counts only if it is the same for all of them, so that what a person does to single parameters or elements on purpose
raises no alarm.
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

PROBES = 4
LOOKED_AT = 64
TOLERANCE = 1e-3
UNKNOWN = 0
"""The factor of a rank that cannot tell."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One element of a parameter's gradient (in storage order) and its value after the reduction."""

    param: int
    position: int
    value: float


def probed_params(layout: Layout) -> list[int]:
    """A few parameters, from the first to the last."""
    full = [spec.index for spec in layout.params if spec.numel]
    return sorted({full[position * (len(full) - 1) // (PROBES - 1)] for position in range(PROBES)}) if full else []


def remember(chosen: Sequence[int], params: Sequence[Tensor]) -> list[Probe]:
    """Remember the largest of a few elements of the gradient of each of these parameters."""
    probes = []
    for index in chosen:
        gradient = params[index].grad
        if gradient is None or gradient.layout is not torch.strided or gradient.is_complex():
            continue
        stride = max(1, gradient.numel() // LOOKED_AT)
        some = flat_like(gradient, params[index])[::stride]
        position = int(some.abs().argmax())
        value = float(some[position])
        if value != 0.0 and math.isfinite(value):
            probes.append(Probe(index, position * stride, value))
    return probes


def common_factor(probes: Sequence[Probe], params: Sequence[Tensor]) -> int:
    """The factor by which all probes have changed, as the bits of a double; ``UNKNOWN`` if there is none."""
    factors = []
    for probe in probes:
        gradient = params[probe.param].grad
        if gradient is None or gradient.layout is not torch.strided:
            return UNKNOWN
        factors.append(float(flat_like(gradient, params[probe.param])[probe.position]) / probe.value)
    if len(factors) < 2 or min(factors) <= 0 or max(factors) > min(factors) * (1 + TOLERANCE):
        return UNKNOWN
    bits: int = struct.unpack("<q", struct.pack("<d", factors[0]))[0]
    return bits


def factors_differ(words: Sequence[int]) -> list[float] | None:
    """The ranks' factors, if all are known and they are not the same."""
    if UNKNOWN in words:
        return None
    factors = [struct.unpack("<d", struct.pack("<q", word))[0] for word in words]
    return factors if max(factors) > min(factors) * (1 + TOLERANCE) else None
