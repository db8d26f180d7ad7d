"""A training program: a value that a seed decides, and the rules for which values make sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from fuzz.levels import BUFFERS_IN_EVALUATION, GROUPS_EDITED_BEFORE_ADDING, OFF, REFUSED, Level, draw_level
from fuzz.operations import (
    AddGroup,
    EditGroup,
    EditParams,
    EditState,
    Evaluate,
    Freeze,
    LoadModel,
    Move,
    Operation,
    Raise,
    Refused,
    Reload,
    ResetState,
)
from fuzz.optimizers import CLASSES, Options, draw_options
from fuzz.parts import BASE, KINDS, Part
from fuzz.training import Train

TOLERANCE = 1e-4
"""What parameters may differ by where gradients are added up in another order, relative to values of about 1.

A sum of three gradients of about 1, or of two in two passes, may be off by a few ulps, 3e-7. Classes that divide by a
root of the gradient are drawn with eps=1e-2 then: the error of an update is at most 100 times as large, times a
learning rate of 1e-2. Over ten steps, with what parameters do to later gradients, that is 1e-5 at the most. An update
more or less changes parameters by 1e-3 and more.
"""

SCHEDULERS = (
    "StepLR(optimizer, 2, 0.5)",
    "ExponentialLR(optimizer, 0.9)",
    "LambdaLR(optimizer, lambda n: 1 / (1 + n))",
)


@dataclass(frozen=True)
class Program:
    """A model, an optimizer, levels to train at, and what to do.

    Attributes:
        seed: what it was drawn from.
        world_size: the number of ranks.
        parts: the model.
        dtype: the type of its parameters, but for parts of a type of their own.
        optimizer: the name of a class of ``torch.optim``.
        options: what it is constructed with.
        groups: options of each parameter group; parameters go to them in turns.
        named: whether the optimizer is given names.
        scheduler: an expression of ``torch.optim.lr_scheduler``, or none.
        ddp: arguments of DDP.
        levels: where training begins, and where it may move to.
        operations: what happens.
    """

    seed: int
    world_size: int
    parts: tuple[Part, ...]
    dtype: str
    optimizer: str
    options: Options
    groups: tuple[Options, ...]
    named: bool
    scheduler: str
    ddp: Options
    levels: tuple[Level, ...]
    operations: tuple[Operation, ...]

    @property
    def late(self) -> tuple[str, ...]:
        """The parts that no group has at first."""
        return tuple(operation.part for operation in self.operations if isinstance(operation, AddGroup))

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
    def exact(self) -> bool:
        """Whether both sides must agree bit by bit."""
        if self.world_size > 2:
            # The same all-reduce of the same buckets.
            return len(self.levels) == 1 and not self.levels[0].scatters
        if not self.has_level("sharded"):
            return True
        features = frozenset[str]().union(*(operation.features for operation in self.operations))
        # docs/data-parallel.md: a reduction for each pass is rounded for each; rows are added up in another order.
        rows = any(("sparse_embeddings", "True") in level.arguments for level in self.levels)
        if rows and self.has("large_embedding") and "no_sync" in features:
            return False
        return not features & {"several synchronising passes", "gradients that add up over steps"}


def draw(seed: int) -> Program:
    """The program of this seed."""
    random = Random(f"onecopy {seed}")
    while True:
        program = _draw(random, seed)
        if allowed(program):
            return program


def _draw(random: Random, seed: int) -> Program:
    optimizer = random.choice(list(CLASSES))
    chosen = CLASSES[optimizer]
    dtype = random.choice(("float32",) * 6 + ("float64", "bfloat16"))
    kinds = [kind for kind in KINDS if kind != BASE and (not chosen.matrices or KINDS[kind].matrices)]
    count = random.randint(0, min(4, len(kinds)))
    drawn = random.sample(kinds, count)
    parts = (Part(BASE, BASE), *(Part(kind, kind) for kind in drawn))
    broadcast_buffers = random.random() < 0.85
    levels = [draw_level(random, optimizer, broadcast_buffers)]
    if random.random() < 0.25:
        levels.append(draw_level(random, optimizer, broadcast_buffers))
    names = [part.name for part in parts if part.is_like.trained and part.name != BASE]
    operations = _draw_operations(random, optimizer, names, levels)
    unused = any(part.is_like.unused for part in parts) or any(
        isinstance(operation, Freeze) or "freezing after no_sync" in operation.features for operation in operations
    )
    ddp = {"find_unused_parameters": "True"} if unused or random.random() < 0.2 else {}
    ddp |= {} if broadcast_buffers else {"forward_sync_buffers": "False"}
    ddp |= {"bucket_cap_mb": "0.001"} if random.random() < 0.5 else {}
    ddp |= {"gradient_as_bucket_view": "True"} if random.random() < 0.3 else {}
    program = Program(
        seed=seed,
        world_size=3 if random.random() < 0.25 else 2,
        parts=parts,
        dtype=dtype,
        optimizer=optimizer,
        options=(),
        groups=_draw_groups(random, optimizer),
        named=random.random() < 0.5,
        scheduler=random.choice(SCHEDULERS) if random.random() < 0.35 else "",
        ddp=tuple(ddp.items()),
        levels=tuple(levels),
        operations=operations,
    )
    return replace(program, options=draw_options(random, optimizer, smooth=not program.exact))


def _draw_groups(random: Random, optimizer: str) -> tuple[Options, ...]:
    if random.random() < 0.5:
        return ((),)
    second = {"lr": "3e-3"}
    if "weight_decay" in CLASSES[optimizer].options and random.random() < 0.5:
        second["weight_decay"] = "0.05"
    return ((), tuple(second.items()))


def _draw_operations(random: Random, optimizer: str, parts: list[str], levels: list[Level]) -> tuple[Operation, ...]:
    level = levels[0]
    operations: list[Operation] = [_draw_train(random, parts, level)]
    move_at = random.randint(1, 4) if len(levels) > 1 else 0
    count = random.randint(2, 9)
    while len(operations) < count or move_at:
        if move_at and len(operations) >= move_at:
            operations.append(Move(1, random.random() < 0.7))
            level, move_at = levels[1], 0
        elif not parts or random.random() < 0.45:
            operations.append(_draw_train(random, parts, level))
        else:
            operation = _draw_other(random, optimizer, random.choice(parts))
            if not operation.features & (REFUSED[level.kind] | OFF.keys()):
                operations.append(operation)
    operations.append(Train())
    return tuple(operations)


def _draw_train(random: Random, parts: list[str], level: Level) -> Train:
    """A step: plain half of the time, else with one or two of what this level does not refuse."""
    train = Train(zero=random.choice(("none", "none", "zeros", "after")))
    if random.random() < 0.4:
        return train
    variants: list[Callable[[Train], Train]] = [
        lambda train: replace(train, zero="kept"),
        lambda train: replace(train, unsynchronised=random.randint(1, 2)),
        lambda train: replace(train, unsynchronised=1, freeze_between=random.choice(parts) if parts else ""),
        lambda train: replace(train, synchronised=2),
        lambda train: replace(train, closure=True),
        lambda train: replace(train, max_norm=random.choice((0.01, 0.1, 100.0))),
        lambda train: replace(train, max_norm=0.01, norm_type=random.choice(("float('inf')", "3.0", "1.0"))),
        lambda train: replace(train, steps=random.choice((0, 2))),
        lambda train: replace(train, in_evaluation=True),
        lambda train: replace(train, scale=256),
    ]
    for vary in random.sample(variants, random.choice((1, 1, 2))):
        varied = vary(train)
        if not varied.features & (REFUSED[level.kind] | OFF.keys()) and _consistent(varied):
            train = varied
    return train


def _consistent(train: Train) -> bool:
    """Whether the fields of a step go together: a closure does all by itself, a scaler steps once."""
    alone = not (
        train.unsynchronised or train.max_norm or train.scale or train.synchronised > 1 or train.zero == "kept"
    )
    if train.closure and not (alone and train.steps):
        return False
    return not (train.scale and train.steps != 1)


def _draw_other(random: Random, optimizer: str, part: str) -> Operation:
    chosen = CLASSES[optimizer]
    choices: list[Callable[[], Operation]] = [
        lambda: Freeze(part, random.random() < 0.4),
        lambda: AddGroup(part, random.choice((0.0, 0.02))),
        lambda: EditGroup(random.choice(chosen.edits), group=random.choice((0, 0, -1))),
        lambda: EditState(part, random.choice(chosen.keys), keeps=random.random() < 0.3),
        lambda: EditState(part, random.choice(chosen.keys), kept=True),
        lambda: EditParams(part, data=random.random() < 0.5),
        lambda: LoadModel(),
        lambda: Reload(random.random() < 0.6),
        lambda: Evaluate(),
        lambda: Raise(random.choice(("forward", "closure", "closure after its pass"))),
        lambda: Refused(random.choice(("load", "group"))),
        lambda: ResetState(),
    ]
    return random.choice(choices)()


def allowed(program: Program) -> bool:
    """Whether a program makes sense: plain DDP runs it, and no level of it says that it refuses it."""
    return all(rule(program) for rule in RULES)


def _parts_are_there(program: Program) -> bool:
    names = {part.name for part in program.parts}
    return all(operation.about in names | {""} for operation in program.operations)


def _nothing_is_refused(program: Program) -> bool:
    level = program.levels[0]
    for operation in program.operations:
        if isinstance(operation, Move):
            level = program.levels[operation.to]
        elif operation.features & (REFUSED[level.kind] | OFF.keys()):
            return False
    return True


def _types_go_together(program: Program) -> bool:
    mixed = program.has("fp64") or program.has("bf16")
    narrow = program.dtype == "bfloat16" or any(part.is_like.narrow for part in program.parts)
    if program.dtype != "float32" and mixed:
        return False  # they have another type than the rest
    if not program.exact and narrow:
        return False  # there rounding is as large as an update
    clips = any("clipping" in operation.features for operation in program.operations)
    if narrow and clips and any(level.scatters for level in program.levels):
        return False  # torch rounds the norm of bf16 gradients, and ours rounds the factor for each type
    # torch's GradScaler takes float32 gradients.
    scales = any("a GradScaler" in operation.features for operation in program.operations)
    return not (scales and (mixed or program.dtype != "float32"))


def _class_fits(program: Program) -> bool:
    chosen = CLASSES[program.optimizer]
    if not program.exact and chosen.smooth is None:
        return False
    if program.optimizer == "Adafactor" and program.has("empty"):
        return False  # torch divides by its number of elements
    if program.optimizer == "Adafactor" and ("foreach", "True") in program.options and program.has("bf16"):
        return False  # torch takes eps for all types from the first parameter's: it combines parameters
    return not chosen.matrices or all(part.is_like.matrices for part in program.parts)


def _groups_are_added_once(program: Program) -> bool:
    late = program.late
    if len(set(late)) < len(late):
        return False
    if late and (program.scheduler or any(isinstance(operation, Move) for operation in program.operations)):
        return False  # torch's schedulers do not know new groups; a new optimizer would have to be given them again
    if len(program.groups) > 1 and len(program.parts) - len(late) < 2:
        return False  # torch refuses names where a group is empty
    edited = False
    for operation in program.operations:
        edited = edited or isinstance(operation, EditGroup)
        if edited and isinstance(operation, AddGroup) and not GROUPS_EDITED_BEFORE_ADDING:
            return False
    return True


def _kept_state_is_current(program: Program) -> bool:
    """State that was kept is edited only while it is the state: a load replaces it."""
    kept = False
    for operation in program.operations:
        if isinstance(operation, (Reload, Move, ResetState)):
            kept = False
        elif isinstance(operation, EditState):
            if operation.kept and not kept:
                return False
            kept = kept or operation.keeps
    return True


def _buffers_are_equal(program: Program) -> bool:
    """A checkpoint has rank 0's buffers: without broadcasts the other ranks' would be lost."""
    evaluates = any(operation.features & {"evaluation", "evaluation mode"} for operation in program.operations)
    if program.has("batch_norm") and program.has_level("sharded") and evaluates and not BUFFERS_IN_EVALUATION:
        return False
    moves = any(isinstance(operation, Move) for operation in program.operations)
    return program.broadcasts_buffers or not (moves and program.has("batch_norm"))


RULES: tuple[Callable[[Program], bool], ...] = (
    _parts_are_there,
    _nothing_is_refused,
    _types_go_together,
    _class_fits,
    _groups_are_added_once,
    _kept_state_is_current,
    _buffers_are_equal,
)
