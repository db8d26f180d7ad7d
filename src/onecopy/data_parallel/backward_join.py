"""Uneven inputs: a rank that has run out of inputs takes part in the forward and backward passes of the others."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.algorithms.join import JoinHook

from onecopy.comm.collectives import Collectives
from onecopy.errors import RanksDisagreeError
from onecopy.step.join import with_join_rule


class BackwardJoinHook(JoinHook):
    """Lets a rank that has run out of inputs take part in the other ranks' passes.

    Args:
        serve_pass: takes part in one pass.
        leave: is called on all ranks when no rank has inputs left, with whether this rank was one of the last.
    """

    def __init__(self, serve_pass: Callable[[], None], leave: Callable[[bool], None]) -> None:
        self._serve_pass, self._leave = serve_pass, leave

    def main_hook(self) -> None:
        """Take part in one pass."""
        self._serve_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the join context."""
        self._leave(is_last_joiner)


def exchange_pass_flags(collectives: Collectives, active: bool, synchronises: bool) -> tuple[int, bool]:
    """Return the highest rank that has inputs, and whether the backward passes of ranks with inputs synchronise."""
    with with_join_rule():
        flags = collectives.all_gather_flags([int(active), int(synchronises)], "forward()")
    with_inputs = {group_rank: bool(flag[1]) for group_rank, flag in enumerate(flags) if flag[0]}
    if len(set(with_inputs.values())) > 1:
        accumulating = [group_rank for group_rank, flag in with_inputs.items() if not flag]
        raise RanksDisagreeError(
            f"rank {collectives.group_rank}: forward() runs under no_sync() on ranks {accumulating}, and on "
            "the other ranks that have inputs it does not; use no_sync() on all of them or on none"
        )
    return max(with_inputs.items())


def highest_last_joiner(collectives: Collectives, is_last_joiner: bool) -> int:
    """Return the highest of the ranks that had the most inputs."""
    flags = collectives.all_gather_flags([int(is_last_joiner)], "leaving the join context")
    return max(group_rank for group_rank, flag in enumerate(flags) if flag[0])
