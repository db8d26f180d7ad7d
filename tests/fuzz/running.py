"""Run a program on ranks that are there already, and say how it failed."""

from __future__ import annotations

import logging
import re
import traceback
from dataclasses import dataclass
from typing import Any

from tests.fuzz.programs import Program
from tests.fuzz.script import script
from tests.support.harness import RanksFailedError, pools

LIMIT = 25.0
"""Seconds that a program may take; most take less than one."""


@dataclass(frozen=True)
class Failure:
    """How a program has failed.

    Attributes:
        text: what the ranks raised.
        kind: the same for failures that are probably the same.
    """

    text: str
    kind: str

    @property
    def compared(self) -> bool:
        """Whether both sides ran to their end, and differ."""
        return self.kind.startswith("AssertionError: operation")


def run(program: Program, limit: float = LIMIT) -> Failure | None:
    """Run a program; None if onecopy trains as plain DDP does."""
    return run_text(script(program), program.world_size, limit)


def run_text(text: str, world_size: int, limit: float = LIMIT) -> Failure | None:
    """Run a script."""
    try:
        differences = pools.run(world_size, __name__, "run_here", {"text": text}, limit)
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
