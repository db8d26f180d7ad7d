"""Compares the parameters of all ranks bit by bit, every few steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.comm.collectives import Collectives
from onecopy.common.digests import tensor_checksums
from onecopy.common.flat_views import flat_views
from onecopy.layout import Layout

CALL = "the comparison of parameters before step()"

REMEDY = (
    "The replicas have drifted apart: look for code that writes parameters on some ranks only, and load a checkpoint "
    "before going on."
)


class ReplicaCheck:
    """Compares checksums of all parameters before the first step, and then every few steps.

    The comparison comes before the update: after it the owners send their values to all ranks, which hides a
    difference.

    Args:
        every: the number of steps from one comparison to the next.
        collectives: the ranks that share the state.

    Attributes:
        replicas: with a mesh, the ranks that have the same shards in other replicas.
    """

    def __init__(self, every: int, collectives: Collectives) -> None:
        self._every = every
        self._collectives = collectives
        self._steps = 0
        self.replicas: Collectives | None = None

    def begin_step(self) -> bool:
        """Count a step, and return whether the parameters must be compared before it."""
        self._steps += 1
        return (self._steps - 1) % self._every == 0

    def compare(self, params: Sequence[Tensor], layout: Layout) -> None:
        """Raise on all ranks if a parameter differs. The host waits for an accelerator."""
        across = FailTogether(self.replicas, f"{CALL}, between replicas of the mesh", remedy=REMEDY)
        with across, FailTogether(self._collectives, CALL, remedy=REMEDY) as together:
            together.facts = across.facts = [
                Fact(f"parameter {spec.name!r}", f"checksum {checksum}")
                for spec, checksum in zip(layout.params, tensor_checksums(flat_views(params)), strict=True)
            ]
