"""From a seed to a program."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from random import Random
from typing import Any

from tests.fuzz.operations import HOOKS, MOVES, PART, SIMPLE, TEXTS, TURN, VARIANTS, Do, Operation, Train
from tests.fuzz.programs import Level, Program, allowed
from tests.fuzz.tables import BASE, CLASSES, OTHER_REFUSED, PARTS, POLICIES, REFUSED, SCHEDULERS, Options


def draw(seed: int) -> Program:
    """The program of this seed."""
    random = Random(f"onecopy {seed}")
    while True:
        program = _draw(random, seed)
        if allowed(program):
            return program


def _draw(random: Random, seed: int) -> Program:
    optimizer = random.choice(list(CLASSES))
    kinds = [
        name for name, part in PARTS.items() if name != BASE and (part.matrices or not CLASSES[optimizer].matrices)
    ]
    drawn = random.sample(kinds, random.randint(0, min(4, len(kinds))))
    broadcast_buffers = random.random() < 0.85
    levels = [_draw_level(random, optimizer, broadcast_buffers) for _ in range(2 if random.random() < 0.25 else 1)]
    ddp = {} if broadcast_buffers else {"forward_sync_buffers": "False"}
    ddp |= {"bucket_cap_mb": "0.001"} if random.random() < 0.5 else {}
    ddp |= {"gradient_as_bucket_view": "True"} if random.random() < 0.3 else {}
    program = Program(
        seed=seed,
        world_size=3 if random.random() < 0.25 else 2,
        parts=(BASE, *drawn),
        dtype=random.choice(("float32",) * 6 + ("float64", "bfloat16")),
        optimizer=optimizer,
        options=(),
        groups=_draw_groups(random, optimizer),
        named=random.random() < 0.5,
        scheduler=random.choice(SCHEDULERS) if random.random() < 0.35 else "",
        ddp=tuple(ddp.items()),
        levels=tuple(levels),
        operations=_draw_operations(random, optimizer, [part for part in drawn if PARTS[part].trained], levels),
    )
    if program.has_unused or random.random() < 0.2:
        program = replace(program, ddp=(("find_unused_parameters", "True"), *program.ddp))
    if program.exact and len(levels) == 1 and random.random() < 0.15:
        simple = tuple(each for each in program.operations if isinstance(each, Train) or each.what in SIMPLE)
        program = replace(program, matrices=True, operations=simple, named=False, groups=((),))
    return replace(program, options=_draw_options(random, optimizer, smooth=not program.exact))


def _draw_options(random: Random, name: str, smooth: bool) -> Options:
    """The options that a class is constructed with."""
    chosen = CLASSES[name]
    options = {"lr": random.choice(chosen.lr)}
    for option, values in chosen.options.items():
        if random.random() < 0.35:
            options[option] = random.choice(values)
    if "foreach" in options:
        options.pop("fused", None)
    if smooth:
        options |= chosen.smooth or {}
    return valid(name, options)


def valid(name: str, options: dict[str, str]) -> Options:
    """The options without those that the class itself refuses beside the others."""
    options = dict(options)
    if name == "SGD" and "nesterov" in options:
        options.setdefault("momentum", "0.9")
        options.pop("dampening", None)
    if options["lr"].startswith("torch.") and options.get("foreach") == "True":
        options["lr"] = "0.01"  # torch takes a tensor here for its capturable implementation only
    return tuple(options.items())


def _draw_groups(random: Random, optimizer: str) -> tuple[Options, ...]:
    if random.random() < 0.5:
        return ((),)
    second = {"lr": "3e-3"}
    if "weight_decay" in CLASSES[optimizer].options and random.random() < 0.5:
        second["weight_decay"] = "0.05"
    return ((), tuple(second.items()))


def _draw_level(random: Random, optimizer: str, broadcast_buffers: bool) -> Level:
    """A level that this class can be trained at."""
    kind = random.choice(("zero", "zero", "overlap", "scatter", "sharded", "sharded"))
    arguments: dict[str, str] = {}
    if kind == "sharded":
        if not broadcast_buffers:
            arguments["broadcast_buffers"] = "False"
        if random.random() < 0.7:
            arguments["bucket_bytes"] = random.choice(("1", "500", "2000", "20000"))
        if random.random() < 0.4:
            arguments["overlap_forward"] = "True"
    else:
        if random.random() < 0.7:
            policies = [policy for policy in POLICIES if CLASSES[optimizer].cuts or policy != '"element"']
            arguments["shard_by"] = random.choice(policies)
        if random.random() < 0.4:
            arguments["parameters_as_bucket_view"] = "True"
        if random.random() < 0.15 and arguments.get("shard_by") != '"element"':
            arguments["elementwise"] = "False"
    hook = random.choice(("hook_with_zero_step", "hook_with_zero_step_interleaved")) if kind == "overlap" else ""
    return Level(kind, tuple(arguments.items()), hook)


def _draw_operations(random: Random, optimizer: str, parts: list[str], levels: list[Level]) -> tuple[Operation, ...]:
    move_at = random.randint(1, 4) if len(levels) > 1 else 0
    count = random.randint(2, 9)
    of_other = random.choice(parts) if parts and len(levels) == 1 and random.random() < 0.3 else ""
    # Moves, and turns of the other optimizer, are drawn apart from the rest.
    refused = REFUSED[levels[0].kind] | {"a checkpoint"} | (OTHER_REFUSED if of_other else set())
    operations: list[Operation] = [_draw_train(random, parts, refused)]
    while len(operations) < count or move_at:
        if move_at and len(operations) >= move_at:
            operations.append(Do(random.choice(MOVES)))
            refused, move_at = REFUSED[levels[1].kind] | {"a checkpoint"}, 0
        elif not parts or random.random() < 0.45:
            operations.append(_draw_train(random, parts, refused))
        else:
            is_turn = of_other and random.random() < 0.5
            operation = Do(TURN, of_other) if is_turn else _draw_do(random, optimizer, random.choice(parts))
            if not operation.features & refused and (is_turn or operation.what != TURN):
                operations.append(operation)
    return (*operations, Train())


def _draw_do(random: Random, optimizer: str, part: str) -> Do:
    chosen, what = CLASSES[optimizer], random.choice([*TEXTS, *HOOKS])  # hooks twice as often
    text = TEXTS[what].text
    keys = chosen.keys if "STATE" in text else chosen.edits if "OPTION" in text else ("",)
    return Do(what, part if "PAR" in text else "", random.choice(keys), random.choice(TEXTS[what].values))


def _draw_train(random: Random, parts: list[str], refused: Set[str]) -> Train:
    """A step: plain half of the time, else with one or two variants that are not refused."""
    train = Train(zero=random.choice(("none", "none", "zeros", "after")))
    if random.random() < 0.4:
        return train
    part = random.choice(parts) if parts else ""
    for variant in random.sample(VARIANTS, random.choice((1, 1, 2))):
        drawn = {name: random.choice(values) for name, values in variant.items()}
        fields: dict[str, Any] = {name: part if value == PART else value for name, value in drawn.items()}
        varied = replace(train, **fields)
        if not varied.features & refused and _consistent(varied):
            train = varied
    return train


def _consistent(train: Train) -> bool:
    """Whether the fields of a step go together: a closure does all by itself, a scaler steps once."""
    more = train.unsynchronised or train.max_norm or train.scale or train.synchronised > 1 or train.zero == "kept"
    return not (train.closure and (more or not train.steps)) and not (train.scale and train.steps != 1)
