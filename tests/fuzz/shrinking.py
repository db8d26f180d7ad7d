"""Make a failing program as short as it can be while it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.levels import Level
from tests.fuzz.operations import Move
from tests.fuzz.optimizers import CLASSES, valid
from tests.fuzz.parts import BASE
from tests.fuzz.programs import Program
from tests.fuzz.rules import allowed


def shrink(program: Program, still_fails: Callable[[Program], bool], seconds: float) -> Program:
    """The shortest program found in this time that still fails."""
    deadline = time.monotonic() + seconds
    tried = {program}
    found = True
    while found:
        found = False
        for candidate in simpler(program):
            if time.monotonic() > deadline:
                return program
            if candidate in tried or not allowed(candidate):
                continue
            tried.add(candidate)
            if still_fails(candidate):
                program, found = candidate, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs with less in them, the largest steps first."""
    operations = program.operations
    bare = (("lr", CLASSES[program.optimizer].lr[0]),)
    found = tuple(option for option in program.ddp if option[0] == "find_unused_parameters")
    yield replace(program, scheduler="", groups=program.groups[:1], named=False, ddp=found, options=bare)
    yield replace(
        program,
        parts=program.parts[:1],
        operations=tuple(operation for operation in operations if operation.about in ("", BASE)),
    )
    length = len(operations) // 2
    while length:
        for start in range(0, len(operations), length):
            yield _with_levels_of(replace(program, operations=operations[:start] + operations[start + length :]))
        length //= 2
    for part in program.parts:
        if part.kind != BASE:
            kept = tuple(other for other in program.parts if other != part)
            about = tuple(operation for operation in operations if operation.about != part.name)
            yield _with_levels_of(replace(program, parts=kept, operations=about))
    if len(program.levels) > 1:
        still = tuple(operation for operation in operations if not isinstance(operation, Move))
        for level in program.levels:
            yield replace(program, levels=(level,), operations=still)
    yield replace(program, world_size=2)
    yield replace(program, scheduler="")
    yield replace(program, groups=program.groups[:1])
    yield replace(program, named=False)
    yield replace(program, dtype="float32")
    yield from _with_other_options(program)
    for number, operation in enumerate(operations):
        for other in operation.simpler():
            yield replace(program, operations=(*operations[:number], other, *operations[number + 1 :]))
    for kind in ("SGD", "Adam"):
        if program.optimizer not in ("SGD", kind):
            yield replace(program, optimizer=kind, options=(("lr", "0.1"),), groups=program.groups[:1])


def _with_levels_of(program: Program) -> Program:
    """Without levels that nothing moves to."""
    return program if program.moves else replace(program, levels=program.levels[:1])


def _with_other_options(program: Program) -> Iterator[Program]:
    for name, _ in program.options:
        if name != "lr":
            left = {key: value for key, value in program.options if key != name}
            yield replace(program, options=tuple(valid(program.optimizer, left).items()))
    for name, _ in program.ddp:
        yield replace(program, ddp=tuple(option for option in program.ddp if option[0] != name))
    for number, level in enumerate(program.levels):
        for name, _ in level.arguments:
            left_out = tuple(argument for argument in level.arguments if argument[0] != name)
            yield _with_level(program, number, replace(level, arguments=left_out))
        if level.kind in ("overlap", "scatter"):
            yield _with_level(program, number, Level("zero", level.arguments))


def _with_level(program: Program, number: int, level: Level) -> Program:
    return replace(program, levels=(*program.levels[:number], level, *program.levels[number + 1 :]))
