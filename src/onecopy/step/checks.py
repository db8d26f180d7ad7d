"""Checks of a step: whether anything averages the gradients, and whether the parameters of all ranks are equal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from onecopy.comm.agreement import NOT_COMPARED, Fact, FailTogether
from onecopy.comm.collectives import Collectives
from onecopy.common.digests import tensor_checksums
from onecopy.common.flat_views import flat_like, flat_views
from onecopy.errors import GradientsNotReducedWarning
from onecopy.layout import Layout

PROBES = 4
"""Number of gradients that are compared in a step."""

STEPS = 12
"""Number of steps after which no gradients are compared any more."""

IN_A_ROW = 3
"""Number of steps in which more than half of the compared gradients must differ."""

CANDIDATES = 64
"""A probe is the sum of about this many elements of a gradient: a single element is often zero."""


class GradientProbe:
    """Notices in the first steps that nothing averages the gradients, because the script has no DDP.

    Training goes on then and the replicas stay equal, but each shard is updated with its owner's gradient alone. A
    probe of a gradient is rounded to bfloat16, so that gradients that differ by rounding only are equal. Every step
    looks at other parameters, because some of them may differ on purpose (parameters that DDP ignores).
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._steps_left = STEPS if collectives.world_size > 1 else 0
        self._differing_steps = 0
        self._probes: Tensor | None = None

    def end(self) -> None:
        """Compare no more gradients."""
        self._steps_left = 0

    def sample(self, params: Sequence[Tensor]) -> None:
        """Compute the probes of this step from gradients on the device of the vote: the host waits for no other."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        device = self._collectives.control_device
        gradients = [(param, param.grad) for param in params if param.grad is not None]
        found = [(p, g) for p, g in gradients if g.layout is torch.strided and g.device == device and g.numel()]
        values = torch.zeros(PROBES, dtype=torch.bfloat16, device=device)
        for place in range(min(PROBES, len(found))):
            param, gradient = found[(place * len(found) // PROBES + self._steps_left) % len(found)]
            flat = flat_like(gradient.detach(), param)
            flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
            values[place] = flat[:: max(1, flat.numel() // CANDIDATES)].sum(dtype=torch.float32)
        bits = values.view(torch.int16).to(torch.int64)
        usable = (values != 0) & values.isfinite()
        self._probes = torch.cat([torch.where(usable, each, NOT_COMPARED) for each in (bits, -bits)])

    def take(self) -> Tensor | None:
        """Return the probes of this step and their negatives, or None if there are none, and forget them."""
        probes, self._probes = self._probes, None
        return probes

    def compare(self, numbers: Sequence[int]) -> None:
        """Compare the largest of every probe and of every negative, but for probes that one rank cannot compare."""
        pairs = [pair for pair in zip(numbers[:PROBES], numbers[PROBES:], strict=True) if NOT_COMPARED not in pair]
        if not pairs or self._differing_steps >= IN_A_ROW:
            return
        if 2 * sum(largest != -negative for largest, negative in pairs) > len(pairs):
            self._differing_steps += 1
        else:
            self._differing_steps = 0
            self.end()
        if self._differing_steps == IN_A_ROW:
            self.end()

    def warn_if_not_reduced(self) -> None:
        """Warn once, after the step in which it became clear that nothing averages the gradients.

        All ranks warn in the same step: where warnings are errors, no rank is left alone.
        """
        if self._differing_steps == IN_A_ROW:
            self._differing_steps += 1
            warnings.warn(
                f"rank {self._collectives.group_rank}: nothing averages the gradients. In {IN_A_ROW} steps most of the "
                "gradients that were compared differ between the ranks, and each parameter was updated with the "
                "gradient of one rank only. Wrap the model in DistributedDataParallel and call the wrapped model, not "
                "the module inside. If you average gradients yourself, do it before optimizer.step().",
                GradientsNotReducedWarning,
                stacklevel=7,  # the caller of optimizer.step(), which torch and not_compiled() wrap
            )


REPLICA_CALL = "the comparison of parameters before step()"

REPLICA_REMEDY = (
    "The replicas have drifted apart: look for code that writes parameters on some ranks only, and load a checkpoint "
    "before going on."
)


def compare_replicas(
    collectives: Collectives, replicas: Collectives | None, params: Sequence[Tensor], layout: Layout
) -> None:
    """Raise on all ranks if a parameter differs bit by bit. The host waits for an accelerator.

    This comes before an update: after it the owners send their values to all ranks, which hides a difference.
    """
    across = FailTogether(replicas, f"{REPLICA_CALL}, between replicas of the mesh", remedy=REPLICA_REMEDY)
    with across, FailTogether(collectives, REPLICA_CALL, remedy=REPLICA_REMEDY) as together:
        together.facts = across.facts = [
            Fact(f"parameter {spec.name!r}", f"checksum {checksum}")
            for spec, checksum in zip(layout.params, tensor_checksums(flat_views(params)), strict=True)
        ]
