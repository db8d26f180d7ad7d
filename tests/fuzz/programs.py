"""A training program: a value with everything that a run depends on."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fuzz.levels import Level
from tests.fuzz.operations import AddGroup, Move, Operation, Turn
from tests.fuzz.optimizers import Options
from tests.fuzz.parts import Part

KEEPING = frozenset({"gradients that add up over steps", "two optimizers"})
"""With these, a gradient that was reduced is still there in a later pass, which adds to it."""

TOLERANCE = 1e-4
"""What parameters may differ by where gradients are added up in another order, relative to values of about 1.

A sum of three gradients of about 1, or of two in two passes, may be off by a few ulps, 3e-7. Classes that divide by a
root of the gradient are drawn with eps=1e-2 then: the error of an update is at most 100 times as large, times a
learning rate of 1e-2. Over ten steps, with what parameters do to later gradients, that is 1e-5 at the most. An update
more or less changes parameters by 1e-3 and more.
"""


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, levels to train at, and what to do. Strings, but names and ``dtype``, are expressions."""

    seed: int
    world_size: int
    parts: tuple[Part, ...]  # the model
    dtype: str  # of the parameters, but for parts with a type of their own
    optimizer: str
    options: Options
    groups: tuple[Options, ...]  # options of each; parameters go to them in turns
    named: bool  # whether the optimizer is given names
    scheduler: str
    ddp: Options
    levels: tuple[Level, ...]  # where training begins, and where it may move to
    operations: tuple[Operation, ...]
    matrices: bool = False  # whether a group of the matrices is Muon's

    @property
    def added(self) -> tuple[str, ...]:
        """The parts that no group has at first."""
        return tuple(operation.part for operation in self.operations if isinstance(operation, AddGroup))

    @property
    def of_other(self) -> tuple[str, ...]:
        """The parts of a second optimizer."""
        return tuple(sorted({operation.part for operation in self.operations if isinstance(operation, Turn)}))

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether rank 0's buffers are everyone's."""
        return ("forward_sync_buffers", "False") not in self.ddp

    def has(self, kind: str) -> bool:
        """Whether the model has such a part."""
        return any(part.kind == kind for part in self.parts)

    def has_level(self, kind: str) -> bool:
        """Whether it is trained at this level at some time."""
        return any(level.kind == kind for level in self.levels)

    @property
    def features(self) -> frozenset[str]:
        """What its operations ask of a level."""
        return frozenset[str]().union(*(operation.features for operation in self.operations))

    @property
    def exact(self) -> bool:
        """Whether both sides must agree bit by bit."""
        features = self.features
        if self.world_size > 2:
            # The same all-reduce of the same buckets, which DDP arranges anew after its first pass.
            return len(self.levels) == 1 and not self.levels[0].scatters and "rolling back" not in features
        if not self.scatters:
            return True
        # docs/data-parallel.md: a reduction for each pass is rounded for each.
        return not features & {"several synchronising passes", *KEEPING}

    @property
    def scatters(self) -> bool:
        """Whether a rank has only a part of the gradients, at one of the levels."""
        return any(level.scatters for level in self.levels)

    @property
    def narrow(self) -> bool:
        """Whether something is in bf16."""
        return self.dtype == "bfloat16" or any(part.is_like.narrow for part in self.parts)

    @property
    def moves(self) -> bool:
        """Whether it goes on from a checkpoint with other objects."""
        return any(isinstance(operation, Move) for operation in self.operations)

    @property
    def has_unused(self) -> bool:
        """Whether some pass may leave a trainable parameter out, so that DDP must look for it."""
        freezes = any(operation.features & {"freezing", "freezing after no_sync"} for operation in self.operations)
        return freezes or any(part.is_like.unused for part in self.parts)
