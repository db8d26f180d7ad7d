"""Run a program on ranks that are there already, say how it failed, and make it short while it fails in that way."""

from __future__ import annotations

import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tests.fuzz.drawing import valid
from tests.fuzz.programs import Level, Program, allowed
from tests.fuzz.script import script
from tests.support.harness import RanksFailedError, pools

Item = TypeVar("Item")

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
        for candidate in filter(allowed, simpler(program)):
            if time.monotonic() > deadline:
                return program
            if candidate not in tried:
                tried.add(candidate)
                if still_fails(candidate):
                    program, found = candidate, True
                    break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs with less in them, the largest steps first."""
    for operations in shorter(program.operations):
        less = replace(program, operations=operations)
        yield less if less.moves else replace(less, levels=program.levels[:1])
    for parts in shorter(program.parts[1:]):
        yield replace(program, parts=(program.parts[0], *parts))
    plain: dict[str, Any] = {"world_size": 2, "scheduler": "", "named": False, "dtype": "float32"}
    for name, value in {**plain, "groups": program.groups[:1]}.items():
        yield replace(program, **{name: value})
    for options in shorter(program.options[1:]):  # the first one is lr
        yield replace(program, options=valid(program.optimizer, dict((program.options[0], *options))))
    for ddp in shorter(program.ddp):
        yield replace(program, ddp=ddp)
    for number, level in enumerate(program.levels):
        less_of_it = [replace(level, arguments=arguments) for arguments in shorter(level.arguments)]
        if level.kind in ("overlap", "scatter"):
            less_of_it.append(Level("zero", level.arguments))
        for each in less_of_it:
            yield replace(program, levels=(*program.levels[:number], each, *program.levels[number + 1 :]))
    for number, operation in enumerate(program.operations):
        for other in operation.simpler():
            yield replace(program, operations=(*program.operations[:number], other, *program.operations[number + 1 :]))
    for kind in ("SGD", "Adam"):
        if program.optimizer not in ("SGD", kind):
            yield replace(program, optimizer=kind, options=(("lr", "0.1"),), groups=program.groups[:1])


def shorter(items: tuple[Item, ...]) -> Iterator[tuple[Item, ...]]:
    """Tuples without some items in a row: without all of them, without a half, without a quarter, without one."""
    length = len(items)
    while length:
        for start in range(0, len(items), length):
            yield items[:start] + items[start + length :]
        length //= 2
