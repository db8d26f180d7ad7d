"""Run a program on ranks that are there already, say how it failed, and make it short while it fails in that way."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from tests.fuzz.drawing import valid
from tests.fuzz.operations import Operation
from tests.fuzz.programs import Level, Program, allowed
from tests.fuzz.script import script
from tests.fuzz.tables import CLASSES, Options
from tests.support.harness import RanksFailedError, pools

LIMIT = 25.0
"""Seconds that a program may take; most take less than one."""


@dataclass(frozen=True)
class Failure:
    """How a program has failed."""

    text: str  # what the ranks raised
    kind: str  # the same for failures that are probably the same

    @property
    def compared(self) -> bool:
        """Whether both sides ran to their end, and differ."""
        return self.kind.startswith("AssertionError: operation")


def run(program: Program) -> Failure | None:
    """Run a program; None if onecopy trains as plain DDP does."""
    return run_text(script(program), program.world_size)


def run_text(text: str, world_size: int) -> Failure | None:
    """Run a script."""
    try:
        differences = pools.run(world_size, __name__, "run_here", {"text": text}, LIMIT)
    except RanksFailedError as error:
        return Failure(str(error), kind_of(str(error)))
    found = "\n".join(f"--- rank {rank}\n{each}" for rank, each in enumerate(differences) if each)
    return Failure(found, kind_of(found)) if found else None


def plain_fails(program: Program) -> Failure | None:
    """Run a program with plain DDP alone, which must not fail: else the program makes no sense."""
    text = script(program).replace("    ours = train(True, norms)\n", "    ours = train(False, norms)\n")
    return run_text(text, program.world_size)


def run_here(text: str) -> str:
    """What every rank does; return where the two sides differ.

    Both have ended then, and the processes can go on with the next program. Any other error is raised and ends them.
    """
    logging.getLogger("onecopy").setLevel(logging.ERROR)  # arguments that are ignored are drawn too
    code: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, "program", "exec"), code)
    try:
        code["main"]()
    except AssertionError as error:
        if not str(error).startswith("operation "):
            raise
        return traceback.format_exc()
    return ""


def kind_of(text: str) -> str:
    """The first error that is not about another rank, without names and numbers."""
    errors = re.findall(r"^(\w[\w.]*(?:Error|Exception|Warning)\b.*|no answer within.*|the process died)$", text, re.M)
    own = [error for error in errors if "PeerFailedError" not in error and "no answer" not in error]
    first: str = (own or errors or [text])[0]
    first = re.sub(r"operation (the end, state\b)?[^:]*:", r"operation \1…:", first)
    first = re.sub(r"'[^']*'|\"[^\"]*\"|\([\d, ]*\)", "…", first)
    first = first.replace("not equal!", "not close!")  # with three ranks and with two
    return re.sub(r"[\d.]+(?:e-?\d+)?", "#", first)[:160]


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
    for part in [program.parts[1:], *[(part,) for part in program.parts[1:]]]:
        about = [operation for operation in operations if operation.about not in part]
        yield _with(replace(program, parts=tuple(each for each in program.parts if each not in part)), about)
    length = len(operations) // 2
    while length:
        for start in range(0, len(operations), length):
            yield _with(program, [*operations[:start], *operations[start + length :]])
        length //= 2
    for level in program.levels if program.moves else ():
        still = [operation for operation in operations if "a checkpoint" not in operation.features]
        yield _with(replace(program, levels=(level,)), still)
    yield replace(program, world_size=2)
    yield replace(program, scheduler="")
    yield replace(program, groups=program.groups[:1])
    yield replace(program, named=False)
    yield replace(program, dtype="float32")
    for option in program.options:
        if option[0] != "lr":
            yield replace(program, options=valid(program.optimizer, dict(_without(program.options, option))))
    for option in program.ddp:
        yield replace(program, ddp=_without(program.ddp, option))
    for number, level in enumerate(program.levels):
        less = [replace(level, arguments=_without(level.arguments, argument)) for argument in level.arguments]
        if level.kind in ("overlap", "scatter"):
            less.append(Level("zero", level.arguments))
        for each in less:
            yield replace(program, levels=(*program.levels[:number], each, *program.levels[number + 1 :]))
    for number, operation in enumerate(operations):
        for other in operation.simpler():
            yield replace(program, operations=(*operations[:number], other, *operations[number + 1 :]))
    for kind in ("SGD", "Adam"):
        if program.optimizer not in ("SGD", kind):
            yield replace(program, optimizer=kind, options=(("lr", "0.1"),), groups=program.groups[:1])


def _with(program: Program, operations: list[Operation]) -> Program:
    """With these operations, and without a level that nothing moves to."""
    changed = replace(program, operations=tuple(operations))
    return changed if changed.moves else replace(changed, levels=changed.levels[:1])


def _without(pairs: Options, pair: tuple[str, str]) -> Options:
    return tuple(each for each in pairs if each != pair)
