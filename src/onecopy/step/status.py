"""The status flags of a step: the ranks exchange them between update and share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from onecopy.comm.agreement import Fact, FailTogether, raise_together
from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import DeferredFlags
from onecopy.common.digests import flag_digest
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.layout import Layout
from onecopy.step.gradient_probe import NO_FLAG, GradientProbe
from onecopy.step.nonfinite import NonfiniteGuard
from onecopy.step.parameter_groups import Group
from onecopy.step.rank_comparison import group_facts, options_text


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The facts that must be equal on all ranks in a step."""

    layout: Layout
    layout_digest: int
    has_gradient: Sequence[bool]
    groups: Sequence[Group]

    def digests(self) -> list[int]:
        """A digest of the layout, of the parameters that have a gradient, and of the groups' options."""
        options = repr([sorted(options_text(group).items()) for group in self.groups]).encode(errors="backslashreplace")
        return [self.layout_digest, flag_digest([bytes(self.has_gradient)]), flag_digest([options])]

    def as_text(self) -> list[Fact]:
        """The same facts as text, for the error."""
        return [
            *(
                Fact(f"parameter {spec.name!r}", f"{'a' if has else 'no'} gradient, {spec.describe()}")
                for spec, has in zip(self.layout.params, self.has_gradient, strict=True)
            ),
            *group_facts(self.groups),
            Fact("ownership", str(self.layout_digest)),
        ]


CALL = "step()"
"""The name of the call in which the flags of a step are exchanged, except inside a backward pass."""


class StepStatus(Protocol):
    """Exchanges the status flags of a step.

    Attributes:
        is_deferred: whether the flags are read in the next step.
    """

    is_deferred: bool

    def clear(self) -> None:
        """Forget flags that have not been read."""

    def check_previous(self) -> None:
        """Raise if the flags of the previous step, where they have not been read yet, tell of a failure."""

    def exchange(
        self,
        facts: StepFacts,
        failure: Exception | None,
        call: str = CALL,
        probe: GradientProbe | None = None,
        guard: NonfiniteGuard | None = None,
    ) -> None:
        """Exchange the flags, and raise on every rank if a rank failed or if the facts differ.

        Args:
            facts: the facts of this rank.
            failure: its exception in the update.
            call: the name of the call that all ranks are in, for errors.
            probe: compares gradients in the first steps.
            guard: knows whether this rank's gradients are finite.
        """


class ImmediateStatus:
    """Reads the flags in the step that sent them. For flags on the CPU, where reading does not synchronise."""

    is_deferred = False

    def __init__(self, collectives: Collectives, flags: DeferredFlags) -> None:
        self._collectives, self._flags = collectives, flags

    def clear(self) -> None:
        """Forget flags of others in the queue; the flags of this class have been read."""
        self._flags.clear()

    def check_previous(self) -> None:
        """Check flags of others in the queue; the flags of this class have been read."""
        self._flags.check_all()

    def exchange(
        self,
        facts: StepFacts,
        failure: Exception | None,
        call: str = CALL,
        probe: GradientProbe | None = None,
        guard: NonfiniteGuard | None = None,
    ) -> None:
        """Exchange the flags, and raise on every rank if a rank failed or if the facts differ."""
        probed = probe.take_flag() if probe is not None else None
        found = guard.take_flag() if guard is not None else None
        flags = [int(failure is not None), NO_FLAG if probed is None else int(probed), *facts.digests()]
        flags.append(0 if found is None else int(found))
        rows = self._collectives.all_gather_flags(flags, call)
        if any(row[0] for row in rows):
            raise_together(self._collectives, call, failure)
        if guard is not None and guard.found(row[5] for row in rows):
            return
        if all(row[2:5] == rows[0][2:5] for row in rows):
            if probed is not None and probe is not None:
                probe.compare([row[1] for row in rows])
            return
        with FailTogether(self._collectives, call, facts.as_text()):
            pass
        raise AssertionError("the digests differ, but the facts do not")


class DeferredStatus:
    """Reads the flags one step later, so that the host never waits for the accelerator.

    A rank that failed raises at once, after it has taken part in the step's collectives. The other ranks raise in their
    next step, before they send anything.
    """

    is_deferred = True

    def __init__(self, collectives: Collectives, flags: DeferredFlags) -> None:
        self._collectives, self._flags = collectives, flags

    def clear(self) -> None:
        """Forget the flags of the last step."""
        self._flags.clear()

    def check_previous(self) -> None:
        """Wait for the flags of the previous step, and raise if they tell of a failure."""
        self._flags.check_all()

    def exchange(
        self,
        facts: StepFacts,
        failure: Exception | None,
        call: str = CALL,
        probe: GradientProbe | None = None,
        guard: NonfiniteGuard | None = None,
    ) -> None:
        """Check the flags of the previous step, then start the exchange of this step's."""
        self._flags.check_older()
        probed = probe.take_flag() if probe is not None else None
        flags = [int(failure is not None), NO_FLAG, *facts.digests()]
        computed = {} if probed is None else {1: probed}
        if guard is not None:
            found = guard.take_flag()
            computed |= {} if found is None else {len(flags): found}
            flags.append(0)
        with self._collectives.explained_errors(call):
            rows, work = self._collectives.start_all_gather_flags(flags, computed)
        work = self._collectives.explained_work(work, call)
        self._flags.put(rows, work, partial(self._check, call, None if probed is None else probe, guard))
        self._flags.end_step()

    def _check(self, call: str, probe: GradientProbe | None, guard: NonfiniteGuard | None, rows: Tensor) -> None:
        here = self._collectives.group_rank
        failed = rows[:, 0].nonzero().flatten().tolist()
        if failed:
            raise PeerFailedError(f"rank {here}: {_previous(call)} failed on ranks {failed}; see their own errors")
        if guard is not None:
            guard.found(rows[:, 5].tolist())
        odd = (rows[:, 2:5] != rows[here, 2:5]).any(dim=1).nonzero().flatten().tolist()
        if odd:
            raise RanksDisagreeError(
                f"rank {here}: in {_previous(call)} ranks {odd} had another layout, other options, or gradients for "
                "other parameters"
            )
        if probe is not None:
            probe.compare(rows[:, 1].tolist())


def _previous(call: str) -> str:
    """Name the call before this one: "the previous step()", "the previous update"."""
    return f"the previous {call.removeprefix('the ')}"


def make_status(collectives: Collectives, flags: DeferredFlags | None = None) -> StepStatus:
    """The status for the device of the flags: deferred on an accelerator, in a queue that others may use, too."""
    status_class = DeferredStatus if collectives.defers_host_reads else ImmediateStatus
    return status_class(collectives, DeferredFlags() if flags is None else flags)
