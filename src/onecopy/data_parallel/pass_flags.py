"""The vote at the end of a backward pass: whether it has failed, and which parameters have a gradient on any rank.

The row of the vote is followed by two integers for each parameter: ``2`` if it is frozen, ``+ 1`` if it has a gradient,
and the negative of this. Their maxima tell what holds on any rank, and what on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import Tensor

from onecopy.comm.agreement import Vote, check_vote, vote_row
from onecopy.data_parallel.gradient_buckets import GradientBucket, GradState
from onecopy.errors import RanksDisagreeError

CALL = "backward()"

FROZEN = 2


class PassVote:
    """The vote of one rank at the end of a pass, and what it tells of all ranks.

    Args:
        buckets: the buckets of the module.
        failure: this rank's failure in the pass.

    Attributes:
        row: the row to exchange.
        present: whether each parameter of each bucket has a gradient; after the vote, on any rank.
        knows_others: whether this rank knows before the vote which parameters have a gradient on any rank: it has one
            for each parameter that is not frozen, and parameters are frozen on all ranks.
    """

    def __init__(self, buckets: Sequence[GradientBucket], failure: Exception | None) -> None:
        self._buckets, self._failure = buckets, failure
        self._collectives = buckets[0].policy.collectives
        arrived = GradState.ARRIVED
        self.present = [
            [state is arrived or has for state, has in zip(bucket.states, bucket.has_reduced_grad, strict=True)]
            for bucket in buckets
        ]
        params = [param for bucket in buckets for param in bucket.params]
        codes = [
            has if param.requires_grad else FROZEN + has
            for param, has in zip(params, chain(*self.present), strict=True)
        ]
        self.knows_others = 0 not in codes
        self.row = vote_row(
            self._collectives,
            CALL,
            failure is not None,
            at_once=not self._collectives.defers_host_reads,
            rest=[*codes, *(-code for code in codes)],
        )

    def check(self, row: Tensor) -> None:
        """Raise if the row of all ranks tells of a failure; else note which parameters have a gradient on any rank."""
        vote = Vote(row.tolist())
        check_vote(vote, self._collectives, CALL, self._failure)
        count = len(vote.rest) // 2
        codes, negated = vote.rest[:count], vote.rest[count:]
        place = 0
        for bucket, present in zip(self._buckets, self.present, strict=True):
            for position, (name, param) in enumerate(zip(bucket.names, bucket.params, strict=True)):
                if codes[place] >= FROZEN > -negated[place]:
                    raise RanksDisagreeError(
                        f"rank {self._collectives.group_rank}: parameter {name!r} is frozen on some ranks and not on "
                        f"others (on this rank requires_grad={param.requires_grad}). Call requires_grad_() for it on "
                        "all ranks or on none, and zero the gradients."
                    )
                present[position] = bool(codes[place] & 1)
                place += 1
