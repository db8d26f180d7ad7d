"""A training program: a value with everything that a run depends on, and which programs make sense."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.operations import ADD, HOOKS, KEEP, TURN, USE_KEPT, Operation
from tests.fuzz.tables import CLASSES, OTHER_REFUSED, PARTS, REFUSED, Options

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
class Level:
    """How training is sharded."""

    kind: str = "zero"  # a key of REFUSED
    arguments: Options = ()  # of the optimizer, or at level 3 of the wrapper
    hook: str = ""

    @property
    def scatters(self) -> bool:
        """Whether a rank has only a part of the gradients."""
        return self.kind in ("scatter", "sharded")


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, levels to train at, and what to do. Strings, but names and ``dtype``, are expressions."""

    seed: int
    world_size: int
    parts: tuple[str, ...]  # of the model
    dtype: str  # of the parameters, but for parts with a type of their own
    optimizer: str
    options: Options
    groups: tuple[Options, ...]  # options of each; parameters go to them in turns
    named: bool  # whether the optimizer is given names
    scheduler: str
    ddp: Options
    levels: tuple[Level, ...]  # where training begins, and where it may move to
    operations: tuple[Operation, ...]
    matrices: bool = False  # whether the matrices are in a group of Muon's

    @property
    def added(self) -> tuple[str, ...]:
        """The parts that no group has at first."""
        return tuple(each.about for each in self.operations if each.what == ADD)

    @property
    def of_other(self) -> tuple[str, ...]:
        """The parts of a second optimizer."""
        return tuple(sorted({each.about for each in self.operations if each.what == TURN}))

    @property
    def features(self) -> frozenset[str]:
        """What its operations ask of a level."""
        return frozenset[str]().union(*(operation.features for operation in self.operations))

    @property
    def exact(self) -> bool:
        """Whether both sides must agree bit by bit."""
        if self.world_size > 2:
            # The same all-reduce of the same buckets, which DDP arranges anew after its first pass.
            return len(self.levels) == 1 and not self.scatters and "rolling back" not in self.features
        # docs/data-parallel.md: a reduction for each pass is rounded for each.
        return not (self.scatters and self.features & {"several synchronising passes", *KEEPING})

    @property
    def scatters(self) -> bool:
        """Whether a rank has only a part of the gradients, at one of the levels."""
        return any(level.scatters for level in self.levels)

    @property
    def moves(self) -> bool:
        """Whether it goes on from a checkpoint with other objects."""
        return "a checkpoint" in self.features

    @property
    def has_unused(self) -> bool:
        """Whether some pass may leave a trainable parameter out, so that DDP must look for it."""
        freezes = self.features & {"freezing", "freezing after no_sync"}
        return bool(freezes) or any(PARTS[part].unused for part in self.parts)


def allowed(program: Program) -> bool:
    """Whether a program makes sense: plain DDP runs it, and no level of it says that it refuses it."""
    level = program.levels[0]
    for operation in program.operations:
        if "a checkpoint" in operation.features:
            level = program.levels[1]
        elif operation.features & REFUSED[level.kind]:
            return False
    return not (any(_nonsense(program)) or _edits_old_state(program))


def _nonsense(program: Program) -> Iterator[bool]:
    """Reasons not to run a program, each true if it applies."""
    features, late, chosen = program.features, program.added, CLASSES[program.optimizer]
    mixed = bool({"fp64", "bf16"} & set(program.parts))
    narrow = program.dtype == "bfloat16" or "bf16" in program.parts
    looks = ("find_unused_parameters", "True") in program.ddp
    yield any(operation.about not in ("", *program.parts) for operation in program.operations)
    yield program.has_unused and not looks

    # Types: these parts have another one than the rest; where a sum has another order, rounding in bf16 is as large as
    # an update; torch rounds the norm of bf16 gradients, and ours rounds the factor for each type; torch's GradScaler
    # takes float32 gradients.
    yield program.dtype != "float32" and mixed
    yield narrow and not program.exact
    yield narrow and program.scatters and "clipping" in features
    yield "a GradScaler" in features and (mixed or program.dtype != "float32")

    # Optimizer classes: torch's Adafactor divides by the number of elements, and takes the eps of the first parameter's
    # type for all of them, which onecopy refuses. Torch's SGD kernel for bf16 reads momentum that it has not written.
    yield not program.exact and chosen.smooth is None
    yield program.optimizer == "Adafactor" and ("empty" in program.parts or mixed)
    yield program.optimizer == "SGD" and narrow and ("fused", "True") in program.options
    cuts = ("shard_by", '"element"') in program.levels[0].arguments
    yield program.matrices and (cuts or chosen.matrices or not program.exact)
    yield chosen.matrices and not all(PARTS[part].matrices for part in program.parts)

    # torch has no largest element of an empty gradient.
    yield "clipping by the largest" in features and "empty" in program.parts

    # Groups: each part is added once. torch's schedulers do not know new groups, a new optimizer would have to be given
    # them again, and a load adds an option to torch's defaults, which groups that are added later then have. torch
    # refuses names where a group is empty.
    yield len(set(late)) < len(late)
    yield bool(late) and bool(program.scheduler or features & {"a checkpoint", "rolling back"})
    yield len(program.groups) > 1 and len(program.parts) - len(late) - len(program.of_other) < 2
    yield bool(program.of_other) and bool(features & OTHER_REFUSED or set(program.of_other) & set(late))

    # Hooks are lost with the model of a checkpoint. At level 3 they see the gradient of a pass only, and at level 2 one
    # may run on some ranks only.
    yield program.moves and any(each.what in HOOKS for each in program.operations)
    kinds = {level.kind for level in program.levels}
    partly = "sharded" in kinds or ("scatter" in kinds and "sometimes" in program.parts)
    accumulates = bool(features & {"several synchronising passes", *KEEPING})
    yield partly and accumulates and "an edit of param.grad in each pass" in features

    # A checkpoint has rank 0's buffers: without broadcasts the other ranks' would be lost. After a join context DDP
    # goes on sending the last rank's buffers, and in the pass after one without gradients it sends none. A new DDP
    # sends rank 0's before its first pass.
    lost = ("forward_sync_buffers", "False") in program.ddp or features & {"Join", "evaluation", "evaluation mode"}
    yield "batch_norm" in program.parts and ("rolling back" in features or bool(program.moves and lost))


def _edits_old_state(program: Program) -> bool:
    """Whether state that was kept is edited when something else has become the state."""
    kept = False
    for operation in program.operations:
        if operation.features & {"replaced state", "a checkpoint", "rolling back", "Join"}:
            kept = False
        elif operation.what == KEEP:
            kept = True
        elif operation.what == USE_KEPT and not kept:
            return True
    return False
