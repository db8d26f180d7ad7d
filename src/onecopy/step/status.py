"""The small word that every step carries before parameters travel."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from onecopy.comm.agreement import Fact, agree, raise_together
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredRead
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.layout import Layout
from onecopy.step.gradient_scale_check import factors_differ
from onecopy.step.parameter_groups import Group
from onecopy.step.rank_comparison import group_facts, options_text


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What must be the same on all ranks in a step."""

    layout: Layout
    layout_digest: int
    has_gradient: Sequence[bool]
    groups: Sequence[Group]

    def digests(self) -> list[int]:
        """One number for the layout, one for which parameters have a gradient, one for the groups' options."""
        options = repr([options_text(group) for group in self.groups]).encode(errors="backslashreplace")
        return [self.layout_digest, _digest(bytes(self.has_gradient)), _digest(options)]

    def in_words(self) -> list[Fact]:
        """The same in words, for the error."""
        return [
            *(
                Fact(f"parameter {spec.name!r}", f"{'a' if has else 'no'} gradient, {spec.describe()}")
                for spec, has in zip(self.layout.params, self.has_gradient, strict=True)
            ),
            *group_facts(self.groups),
            Fact("ownership", str(self.layout_digest)),
        ]


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class ImmediateStatus:
    """Reads the word in the step that sent it. For control data on the CPU, where reading costs no synchronisation."""

    late = False

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def forget(self) -> None:
        """Nothing is left to be read."""

    def exchange(self, facts: StepFacts, factor: int, failure: Exception | None) -> None:
        """Raise on every rank if any rank failed or if the ranks differ."""
        words = self._collectives.all_gather_flags([int(failure is not None), factor, *facts.digests()], "step()")
        if any(word[0] for word in words):
            raise_together(self._collectives, "step()", failure)
        factors = factors_differ([word[1] for word in words])
        if factors is not None:
            raise RanksDisagreeError(
                f"rank {self._collectives.group_rank}: the ranks scaled their reduced gradients by different factors, "
                f"{factors}: after the reduce-scatter hook torch.nn.utils.clip_grad_norm_ finds another norm on every "
                "rank; use "
                "optimizer.clip_grad_norm_() or onecopy.clip_grad_norm_()"
            )
        if all(other[2:] == words[0][2:] for other in words):
            return
        agree(self._collectives, "step()", facts.in_words())
        raise AssertionError("words differ but facts do not")


class DeferredStatus:
    """Reads the word one step later, so that the host never waits for the accelerator.

    A rank that failed raises at once, after it has served the step's collectives; the others raise at their next
    step, before they send anything.
    """

    late = True

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._previous: DeferredRead | None = None

    def forget(self) -> None:
        """Do not read the word of the last step."""
        self._previous = None

    def exchange(self, facts: StepFacts, factor: int, failure: Exception | None) -> None:
        """Check the previous step's words, then start the exchange of this one's."""
        word = [int(failure is not None), factor, *facts.digests()]
        previous, self._previous = self._previous, None
        if previous is not None:
            self._check(previous.read())
        self._previous = DeferredRead(torch.stack(self._collectives.start_all_gather_flags(word)))

    def _check(self, words: list[list[int]]) -> None:
        mine = self._collectives.group_rank
        failed = [group_rank for group_rank, word in enumerate(words) if word[0]]
        if failed:
            raise PeerFailedError(f"rank {mine}: the previous step() failed on ranks {failed}; see their own errors")
        odd = [group_rank for group_rank, word in enumerate(words) if word[2:] != words[mine][2:]]
        if odd:
            raise RanksDisagreeError(
                f"rank {mine}: in the previous step() ranks {odd} had another layout, other options, or gradients for "
                "other parameters"
            )


def make_status(collectives: Collectives) -> ImmediateStatus | DeferredStatus:
    """The kind that fits where control data lives."""
    return (DeferredStatus if collectives.defers_host_reads else ImmediateStatus)(collectives)
