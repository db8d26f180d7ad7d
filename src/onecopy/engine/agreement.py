"""Calls that all ranks make together: compare first, and fail together.

A rank whose own checks failed still takes part, so that no rank waits for it; then every rank raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from onecopy.engine import codec
from onecopy.engine.collectives import Collectives
from onecopy.errors import PeerFailedError, RanksDisagreeError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that must be the same everywhere: what it is about, and its value."""

    subject: str
    value: str


def agree(
    collectives: Collectives,
    what: str,
    facts: Sequence[Fact],
    failure: Exception | None = None,
    flag: bool = False,
) -> bool:
    """Raise on every rank if a rank failed or if the facts differ; else tell whether any rank raised its flag.

    Args:
        collectives: the process group.
        what: the call, for messages, such as "constructing the optimizer".
        facts: what must be equal on all ranks, in order.
        failure: this rank's own error, if it has one.
        flag: anything that one rank knows and all must hear.
    """
    digest = _digest(facts)
    words = collectives.all_gather_words([int(failure is not None), digest, int(flag)], what)
    if any(failed for failed, _, _ in words):
        raise_together(collectives, what, failure)
    if any(other != digest for _, other, _ in words):
        _raise_difference(collectives, what, facts)
    return any(raised for _, _, raised in words)


def together(collectives: Collectives, what: str, action: Callable[[], Result]) -> Result:
    """Do something that may fail, without communication; raise on every rank if it has failed on one."""
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    agree(collectives, what, [], failure)
    return result


def raise_together(collectives: Collectives, what: str, failure: Exception | None) -> None:
    """Raise on every rank: the own failure where there is one, elsewhere the first failing rank's message."""
    messages = collectives.all_gather_bytes(_message(failure), what)
    if failure is not None:
        raise failure
    failed = [group_rank for group_rank, message in enumerate(messages) if message]
    if not failed:
        raise PeerFailedError(f"rank {collectives.group_rank}: {what} failed in another replica; see its own error")
    raise PeerFailedError(
        f"rank {collectives.group_rank}: {what} failed on {_ranks(failed)}: {messages[failed[0]].decode()}"
    )


def _raise_difference(collectives: Collectives, what: str, facts: Sequence[Fact]) -> None:
    mine = codec.dumps([[fact.subject, fact.value] for fact in facts])
    everyone = [codec.loads(text) for text in collectives.all_gather_bytes(mine, what)]
    longest = max(len(rows) for rows in everyone)
    for position in range(longest):
        rows = [tuple(lines[position]) if position < len(lines) else None for lines in everyone]
        if len(set(rows)) == 1:
            continue
        holders: dict[str, list[int]] = {}
        for group_rank, row in enumerate(rows):
            holders.setdefault(f"{row[0]}: {row[1]}" if row else "nothing more", []).append(group_rank)
        details = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in holders.items())
        raise RanksDisagreeError(
            f"rank {collectives.group_rank}: the ranks disagree in {what}. First difference: {details}. "
            "All ranks must make the same call with the same arguments, and have gradients for the same parameters."
        )
    raise AssertionError("digests differ but descriptions do not")


def _digest(facts: Sequence[Fact]) -> int:
    text = hashlib.blake2b(digest_size=7)
    for fact in facts:
        text.update(f"{fact.subject}\0{fact.value}\0".encode(errors="backslashreplace"))
    return int.from_bytes(text.digest(), "big")


def _message(failure: Exception | None) -> bytes:
    """A failure as bytes, whatever its text is made of: nothing may go wrong while the others wait for it."""
    if failure is None:
        return b""
    try:
        text = str(failure)
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(failure).__name__}: {text}".encode(errors="backslashreplace")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
