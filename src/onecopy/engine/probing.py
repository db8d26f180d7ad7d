"""Telling whether reduced gradients were scaled by another factor on every rank before ``step()``.

That is what ``torch.nn.utils.clip_grad_norm_`` does after the reduce-scatter hook, because it finds another norm on
every rank. A few elements are remembered when gradients have been reduced, and looked at again in ``step()``. Only
parameters of which every rank owns a part are used, and a factor counts only if it is the same for all of them, so that
what a person does to single parameters or elements on purpose raises no alarm.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from onecopy.engine.flat import flat_like
from onecopy.layout import Layout

PROBES = 3
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


def shared_params(layout: Layout) -> list[int]:
    """A few parameters of which every rank owns a part."""
    owners: dict[int, int] = {}
    for shard in layout.shards:
        owners[shard.param] = owners.get(shard.param, 0) + 1
    found = [param for param, count in owners.items() if count == layout.world_size]
    return found[:PROBES] if len(found) > 1 and layout.world_size > 1 else []


def remember(params: Sequence[int], reduced: Mapping[int, Tensor], starts: Mapping[int, int]) -> list[Probe]:
    """Remember the largest of the first elements that this rank owns of each of these parameters."""
    probes = []
    for param in params:
        if param in reduced:
            head = reduced[param][:LOOKED_AT].abs()
            position = int(head.argmax())
            probes.append(Probe(param, starts[param] + position, float(reduced[param][position])))
    return probes


def common_factor(probes: Sequence[Probe], params: Sequence[Tensor]) -> int:
    """The factor by which all probes have changed, as the bits of a double; ``UNKNOWN`` if there is none."""
    factors = []
    for probe in probes:
        gradient = params[probe.param].grad
        if gradient is None or probe.value == 0.0 or not math.isfinite(probe.value):
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
