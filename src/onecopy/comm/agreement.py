"""Calls that all ranks make together: compare their arguments first, and fail on every rank if one fails.

A rank that raised still takes part in the exchange of status flags, so that no other rank waits for it. Then every rank
raises. ``FailTogether`` does this for a block of code. ``step()`` and ``backward()`` exchange status flags anyway:
there ``FirstFailure`` keeps the exception, and the flags tell the other ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from onecopy.comm.collectives import Collectives
from onecopy.common import tagged_json
from onecopy.common.digests import flag_digest
from onecopy.errors import PeerFailedError, RanksDisagreeError

NAMES_HINT = (
    "group0[2] is the third parameter of the first group: construct the optimizer with model.named_parameters() to "
    "see names."
)
"""Explains the names of parameters that were given without names."""

REMEDY = "All ranks must make the same call with the same arguments, and have gradients for the same parameters."
"""The end of an error about facts that differ."""

_POSITION = re.compile(r"group\d+\[\d+\]")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that must be equal on all ranks: its subject and its value, as text for the error."""

    subject: str
    value: str


class FirstFailure:
    """Keeps the first exception of its ``with`` blocks, so that this rank takes part in collectives and tells it later.

    Attributes:
        error: the exception, or None.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __enter__(self) -> FirstFailure:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True

    def __bool__(self) -> bool:
        return self.error is not None

    def raise_if_any(self) -> None:
        """Raise the exception, if there is one."""
        if self.error is not None:
            raise self.error


class FailTogether:
    """Runs a block on every rank; if it raises on one rank, or if the facts differ, all ranks raise.

    Example::

        with FailTogether(collectives, "load_state_dict()") as together:
            state = read()  # may raise on one rank only
            together.facts = describe(state)  # must be equal on all ranks

    1. The block runs. It must not communicate: another rank may have left it already.
    2. All ranks exchange one row of status flags: whether the block raised, a digest of the facts, a flag.
    3. A rank whose block raised raises that exception, the other ranks a :class:`PeerFailedError` with its message. If
       the facts differ, all raise a :class:`RanksDisagreeError` that names the first difference.

    Args:
        collectives: the ranks that make this call, or None for a process without a process group.
        call: the name of the call, for error messages.
        facts: facts that must be equal on all ranks.
        remedy: the sentence that ends the error if they differ.

    Attributes:
        facts: as given. The block may set or extend it.
        flag: a boolean that the block may set.
        any_flag: after the block, whether any rank has set its flag.
    """

    def __init__(
        self, collectives: Collectives | None, call: str, facts: Sequence[Fact] = (), remedy: str = REMEDY
    ) -> None:
        self._collectives = collectives
        self._call = call
        self._remedy = remedy
        self.facts = list(facts)
        self.flag = False
        self.any_flag = False

    def __enter__(self) -> FailTogether:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # Ctrl-C and its like: this process ends, and does not wait for the others
        self.any_flag = self._exchange(error)

    def _exchange(self, error: Exception | None) -> bool:
        """Tell all ranks how the block has ended; raise if it has failed anywhere."""
        collectives = self._collectives
        if collectives is None:
            return self.flag  # the block's own exception is raised by the with statement
        digest = flag_digest(f"{fact.subject}\0{fact.value}\0".encode(errors="backslashreplace") for fact in self.facts)
        rows = collectives.all_gather_flags([int(error is not None), digest, int(self.flag)], self._call)
        if any(failed for failed, _, _ in rows):
            raise_together(collectives, self._call, error)
        if any(other != digest for _, other, _ in rows):
            _raise_difference(collectives, self._call, self.facts, self._remedy)
        return any(flag for _, _, flag in rows)


def raise_together(collectives: Collectives, call: str, failure: Exception | None) -> NoReturn:
    """Raise on every rank: its own failure if it has one, else a :class:`PeerFailedError` with the first message.

    All ranks make this call together, once they know that one of them has failed.
    """
    messages = collectives.all_gather_bytes(_message(failure), call)
    if failure is not None:
        raise failure
    failed = [group_rank for group_rank, message in enumerate(messages) if message]
    if not failed:
        raise PeerFailedError(
            f"global rank {collectives.global_rank}: {call} failed in another replica; see its own error"
        )
    raise PeerFailedError(
        f"rank {collectives.group_rank}: {call} failed on {ranks_text(failed)}: {messages[failed[0]].decode()}"
    )


def _raise_difference(collectives: Collectives, call: str, facts: Sequence[Fact], remedy: str) -> NoReturn:
    mine = tagged_json.dumps([[fact.subject, fact.value] for fact in facts])
    everyone = [tagged_json.loads(text) for text in collectives.all_gather_bytes(mine, call)]
    longest = max(len(rows) for rows in everyone)
    for position in range(longest):
        rows = [tuple(lines[position]) if position < len(lines) else None for lines in everyone]
        if len(set(rows)) == 1:
            continue
        holders: dict[str, list[int]] = {}
        for group_rank, row in enumerate(rows):
            holders.setdefault(f"{row[0]}: {row[1]}" if row else "nothing more", []).append(group_rank)
        details = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in holders.items())
        hint = f" {NAMES_HINT}" if _POSITION.search(details) else ""
        raise RanksDisagreeError(
            f"rank {collectives.group_rank}: the ranks disagree in {call}. First difference: {details}. {remedy}{hint}"
        )
    raise AssertionError("the digests differ, but the facts do not")


def _message(failure: Exception | None) -> bytes:
    """A failure as bytes, whatever its text is: nothing may raise while other ranks wait."""
    if failure is None:
        return b""
    try:
        text = str(failure)
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(failure).__name__}: {text}".encode(errors="backslashreplace")


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as text, such as "ranks 1, 3"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
