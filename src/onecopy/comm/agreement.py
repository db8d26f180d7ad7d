"""One vote, by which all ranks agree or all raise.

The row of a vote has a fixed number of integers, and the ranks take the largest of each. So all ranks read the same:

1. ``1 +`` a rank that has failed, or 0.
2. For the call that the ranks are in, and for each value that must be equal: ``digest << 20 | rank``, and its negative.
   The largest and the smallest digest differ if any do, and name two ranks that differ.
3. Numbers of which only the largest is wanted.

A row is read at once, or on an accelerator a step later. Only after a row that was read at once do the ranks gather
texts: the messages of exceptions, or the values that differ. Rows that are read later are read at different places.

A rank that raised still votes, so that no other rank waits for it. :class:`FailTogether` does this for a block of code.
Where a vote is cast anyway, as in ``step()``, :class:`FirstFailure` keeps the exception until then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import NoReturn

from torch import Tensor

from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import flags_on
from onecopy.comm.work import Work
from onecopy.common import tagged_json
from onecopy.common.digests import flag_digest
from onecopy.errors import PeerFailedError, RanksDisagreeError

NAMES_HINT = (
    "group0[2] is the third parameter of the first group: construct the optimizer with model.named_parameters() to "
    "see names."
)
"""Explains the names of parameters that were given without names."""

REMEDY = "All ranks must make the same call with the same arguments, and have gradients for the same parameters."
"""The end of an error about values that differ."""

UPDATED = "Parameters may have been updated: load a checkpoint before going on"
"""The end of an error that comes one step late."""

NOT_COMPARED = 1 << 40
"""A number of a rank that has nothing to compare: larger than all that are compared."""

_RANK_BITS = 20
_EQUAL = 4
"""Number of values that must be equal: the call, and up to three digests."""

_NUMBERS = 10
"""Number of other numbers: whether the row is read later, one number of the caller, and the eight of a probe."""

_FIRST_NUMBER = 1 + 2 * _EQUAL
VOTE_BYTES = 8 * (_FIRST_NUMBER + _NUMBERS)
"""The length of a row."""

_POSITION = re.compile(r"group\d+\[\d+\]")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that must be equal on all ranks: its subject and its value, as text for the error."""

    subject: str
    value: str


@dataclass(frozen=True, slots=True)
class Vote:
    """The row that all ranks have after a vote."""

    row: Sequence[int]  # the largest of each integer

    @property
    def failed_rank(self) -> int | None:
        """The global rank of a rank that has failed, or None."""
        return self.row[0] - 1 if self.row[0] else None

    @property
    def number(self) -> int:
        """The largest number of the callers."""
        return self.row[_FIRST_NUMBER + 1]

    @property
    def probes(self) -> Sequence[int]:
        """The numbers of a probe of gradients: the largest, then the largest of the negatives."""
        return self.row[_FIRST_NUMBER + 2 : _FIRST_NUMBER + _NUMBERS]

    @property
    def read_later(self) -> bool:
        """Whether a rank reads this row later, and so takes part in no exchange of texts."""
        return bool(self.row[_FIRST_NUMBER])

    @property
    def rest(self) -> Sequence[int]:
        """The integers after the row of a vote, in the exchange at the end of a backward pass."""
        return self.row[_FIRST_NUMBER + _NUMBERS :]

    def different(self, place: int) -> tuple[int, int] | None:
        """Two global ranks whose values at a place differ, or None. Place 0 is the call."""
        high, low = self.row[1 + 2 * place], -self.row[2 + 2 * place]
        mask = (1 << _RANK_BITS) - 1
        return (low & mask, high & mask) if high >> _RANK_BITS != low >> _RANK_BITS else None


def vote_row(
    collectives: Collectives,
    call: str,
    failed: bool,
    digests: Sequence[int] = (),
    *,
    at_once: bool,
    number: int | Tensor = 0,
    probes: Tensor | None = None,
    rest: Sequence[int] = (),
) -> Tensor:
    """The row of this rank, on the device where it is exchanged."""
    values = [1 + collectives.global_rank if failed else 0]
    for digest in (_call_digest(call), *digests, *[0] * (_EQUAL - 1 - len(digests))):
        value = digest << _RANK_BITS | collectives.global_rank
        values += [value, -value]
    values += [int(not at_once), number if isinstance(number, int) else 0, *[NOT_COMPARED] * (_NUMBERS - 2), *rest]
    row = flags_on(collectives.host_device if at_once else collectives.control_device, values)
    if isinstance(number, Tensor):
        row[_FIRST_NUMBER + 1].copy_(number)
    if probes is not None:
        row[_FIRST_NUMBER + 2 : _FIRST_NUMBER + _NUMBERS].copy_(probes)
    return row


def start_vote(collectives: Collectives, row: Tensor, call: str, replicas: Collectives | None = None) -> Work:
    """Start the exchange of a row that is read later; with a mesh, among the ranks of all replicas."""
    work = collectives.all_reduce(row, call, largest=True)
    return work if replicas is None else replicas.all_reduce_after(work, row, call, largest=True)


def vote_at_once(collectives: Collectives, row: Tensor, call: str, replicas: Collectives | None = None) -> Vote:
    """Exchange a row and read it."""
    collectives.largest_row(row, call)
    if replicas is not None:
        replicas.largest_row(row, call)
    return Vote(row.tolist())


def check_vote(
    vote: Vote,
    collectives: Collectives,
    call: str,  # the name of the call that has exchanged the row
    failure: Exception | None = None,  # this rank's failure in the call
    values: Sequence[str] = (),  # what the digests in the row are of
    # Returns what must be equal, as text, which is gathered to name the first difference.
    facts: Callable[[], Sequence[Fact]] | None = None,
    remedy: str = REMEDY,  # the sentence that ends the error about it
) -> None:
    """Raise on every rank if a rank has failed, if the ranks are in different calls, or if their values differ.

    A rank raises its own failure, the other ranks a :class:`PeerFailedError` with its message. A row that is read later
    only tells which ranks have failed or differ.
    """
    here, at_once = f"rank {collectives.group_rank}", not vote.read_later
    different = vote.different(0)
    if different is not None:
        _raise_different_calls(vote, different, collectives, call)
    previous = call if at_once else f"the previous {call.removeprefix('the ')}"
    if vote.failed_rank is not None:
        if at_once:
            _raise_together(collectives, call, failure)
        raise PeerFailedError(f"{here}: {previous} failed on global rank {vote.failed_rank}; see its error. {UPDATED}")
    found = [
        f"global ranks {ranks[0]} and {ranks[1]} have different {value}"
        for place, value in enumerate(values, 1)
        if (ranks := vote.different(place)) is not None
    ]
    if found:
        if at_once and facts is not None:
            _raise_first_difference(collectives, call, facts(), remedy)
        raise RanksDisagreeError(f"{here}: the ranks disagree in {previous}: {', '.join(found)}. {UPDATED}")


@dataclass(slots=True)
class FirstFailure:
    """Keeps the first exception of its ``with`` blocks: this rank takes part in collectives, and tells it later."""

    error: Exception | None = None

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
    2. All ranks vote: whether the block raised, a digest of the facts, a flag.
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

    def must_equal(self, values: Mapping[str, object]) -> None:
        """Add facts: values by name."""
        self.facts += [Fact(name, str(value)) for name, value in values.items()]

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
        failed = error is not None
        row = vote_row(collectives, self._call, failed, [digest], at_once=True, number=int(self.flag))
        vote = vote_at_once(collectives, row, self._call)
        check_vote(vote, collectives, self._call, error, ["arguments"], lambda: self.facts, self._remedy)
        return bool(vote.number)


def _raise_different_calls(vote: Vote, different: Sequence[int], collectives: Collectives, call: str) -> NoReturn:
    if vote.read_later:
        places = f"Global ranks {different[0]} and {different[1]} differ; this rank: {call}"
    else:
        calls = [name.decode() for name in collectives.all_gather_bytes(call.encode(), "naming the calls")]
        places = "; ".join(f"rank {group_rank}: {name}" for group_rank, name in enumerate(calls))
    raise RanksDisagreeError(
        f"rank {collectives.group_rank}: the ranks are at different calls. {places}. All ranks must make these calls, "
        "in the same order, and none of them inside `if rank == 0:`."
    )


def _raise_together(collectives: Collectives, call: str, failure: Exception | None) -> NoReturn:
    messages = collectives.all_gather_bytes(_message(failure), call)
    if failure is not None:
        raise failure
    failed = [group_rank for group_rank, message in enumerate(messages) if message]
    if not failed:
        raise PeerFailedError(
            f"global rank {collectives.global_rank}: {call} failed in another replica; see its own error"
        )
    raise PeerFailedError(
        f"rank {collectives.group_rank}: {call} failed on {_ranks_text(failed)}: {messages[failed[0]].decode()}"
    )


def _raise_first_difference(collectives: Collectives, call: str, facts: Sequence[Fact], remedy: str) -> None:
    """Raise, unless the facts differ only between the replicas of a mesh."""
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
        details = "; ".join(f"{_ranks_text(ranks)}: {text}" for text, ranks in holders.items())
        hint = f" {NAMES_HINT}" if _POSITION.search(details) else ""
        raise RanksDisagreeError(
            f"rank {collectives.group_rank}: the ranks disagree in {call}. First difference: {details}. {remedy}{hint}"
        )


def _ranks_text(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _message(failure: Exception | None) -> bytes:
    """A failure as bytes, whatever its text is: nothing may raise while other ranks wait."""
    if failure is None:
        return b""
    try:
        text = str(failure)
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(failure).__name__}: {text}".encode(errors="backslashreplace")


@lru_cache
def _call_digest(call: str) -> int:
    return flag_digest([call.encode()])
