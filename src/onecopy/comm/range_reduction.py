"""A reduce-scatter of ranges of a flat buffer: every rank receives the mean of the ranges that it owns.

The two transports plan it differently: ``pairwise_range_reduction.py`` for pairs of ranks,
``collective_range_reduction.py`` for the backend's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GradientRange:
    """A range of a flat buffer of gradients.

    Attributes:
        start: the position of its first element.
        stop: the position after its last element.
        owner: the group rank of the owner.
        optimizer: the position, among several optimizers, of the one that the range belongs to.
    """

    start: int
    stop: int
    owner: int
    optimizer: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


FinishReduction = Callable[[], list[tuple[int, Tensor]]]
"""Waits for a reduction, and writes the mean of all ranks into the ranges of the buffer that this rank owns.

Returns the same values as flat tensors, each with the position of its optimizer. They are valid until another reduction
starts, and may have the type in which gradients are summed.
"""


class RangeReduction(Protocol):
    """The messages that reduce the ranges of one buffer to their owners, planned once."""

    def start(self, buffer: Tensor, tag: int, is_last: bool) -> FinishReduction:
        """Start the reduction of a buffer, and return the function that finishes it.

        On an accelerator, the same stream must be current in both calls.

        Args:
            buffer: the gradients of this rank.
            tag: a message tag that no other reduction in flight has.
            is_last: whether all ranks finish this reduction at once, and start no other one before.
        """
