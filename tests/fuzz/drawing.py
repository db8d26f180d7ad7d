"""From a seed to a program."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import replace
from random import Random

from tests.fuzz.levels import OFF, OTHER_REFUSED, REFUSED, Level, draw_level
from tests.fuzz.operations import (
    TEXTS,
    AddGroup,
    Do,
    EditGroup,
    EditParams,
    EditState,
    Freeze,
    LateHook,
    Move,
    Operation,
    Reload,
    Turn,
)
from tests.fuzz.optimizers import CLASSES, Options, draw_options
from tests.fuzz.parts import BASE, KINDS, Part
from tests.fuzz.programs import Program
from tests.fuzz.rules import allowed
from tests.fuzz.training import Train

SCHEDULERS = (
    "StepLR(optimizer, 2, 0.5)",
    "ExponentialLR(optimizer, 0.9)",
    "LambdaLR(optimizer, lambda n: 1 / (1 + n))",
)


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
    ddp = {} if broadcast_buffers else {"forward_sync_buffers": "False"}
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
    if program.has_unused or random.random() < 0.2:
        program = replace(program, ddp=(("find_unused_parameters", "True"), *program.ddp))
    if program.exact and len(levels) == 1 and random.random() < 0.15:
        simple = tuple(each for each in operations if isinstance(each, (Train, Freeze, EditParams, LateHook)))
        program = replace(program, matrices=True, operations=simple, named=False, groups=((),))
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
    move_at = random.randint(1, 4) if len(levels) > 1 else 0
    count = random.randint(2, 9)
    of_other = random.choice(parts) if parts and len(levels) == 1 and random.random() < 0.3 else ""
    refused = REFUSED[level.kind] | OFF.keys() | (OTHER_REFUSED if of_other else set())
    operations: list[Operation] = [_draw_train(random, parts, refused)]
    while len(operations) < count or move_at:
        if move_at and len(operations) >= move_at:
            operations.append(Move(1, random.random() < 0.7))
            refused, move_at = REFUSED[levels[1].kind] | OFF.keys(), 0
        elif not parts or random.random() < 0.45:
            operations.append(_draw_train(random, parts, refused))
        else:
            is_turn = of_other and random.random() < 0.5
            operation = Turn(of_other) if is_turn else _draw_other(random, optimizer, random.choice(parts))
            if not operation.features & refused:
                operations.append(operation)
    operations.append(Train())
    return tuple(operations)


def _draw_train(random: Random, parts: list[str], refused: Set[str]) -> Train:
    """A step: plain half of the time, else with one or two variants that are not refused."""
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
        lambda train: replace(train, max_norm=0.1, by_torch=False),
        lambda train: replace(train, max_norm=0.01, norm_type=random.choice(("float('inf')", "3.0", "1.0"))),
        lambda train: replace(train, steps=random.choice((0, 2))),
        lambda train: replace(train, in_evaluation=True),
        lambda train: replace(train, scale=256),
        lambda train: replace(
            train,
            edited=random.choice(parts) if parts else "",
            edit=random.choice(("p.grad.mul_(0.5)", "p.grad = None", "p.grad.zero_()")),
        ),
    ]
    for vary in random.sample(variants, random.choice((1, 1, 2))):
        varied = vary(train)
        if not varied.features & refused and _consistent(varied):
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
        lambda: LateHook(part),
        lambda: LateHook(part, after=True),
        lambda: AddGroup(part, random.choice((0.0, 0.02))),
        lambda: EditGroup(random.choice(chosen.edits), group=random.choice((0, 0, -1))),
        lambda: EditState(part, random.choice(chosen.keys), keeps=random.random() < 0.3),
        lambda: EditState(part, random.choice(chosen.keys), kept=True),
        lambda: EditParams(part, data=random.random() < 0.5),
        lambda: Reload(random.random() < 0.6),
        *[lambda: Do(random.choice(list(TEXTS)))] * 7,
        lambda: EditState(part, random.choice(chosen.keys), replaces=True),
    ]
    return random.choice(choices)()
