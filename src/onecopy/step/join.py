"""Uneven inputs: a rank that has run out of them keeps serving its shard.

DDP's join hook leaves a joined rank's gradients as they were, so the active ranks give it what it needs for every
step. One round, in the same order on all ranks:

1. every rank says whether it is active;
2. if one has joined, the lowest active rank broadcasts the groups' options (a joined rank's scheduler no longer runs)
   and which parameters have a gradient, and sends each joined rank the gradients of its ranges (unless the
   reduce-scatter hook has already done that);
3. update, confirm, share, as in any other step.

torch runs a joined rank's hooks once for every forward pass of the active ranks. A step follows each pass that
synchronises gradients, and no other: after a pass under ``no_sync()`` a joined rank takes part in no step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import JoinHook

from onecopy.comm.agreement import agree
from onecopy.comm.packing import receive_ranges, send_ranges
from onecopy.common.flat_views import as_bytes, flat_like
from onecopy.common.torch_private import accumulates, joinables_of_caller
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.layout import Shard
from onecopy.step.engine import Engine
from onecopy.step.join_handover import read_handover, write_handover
from onecopy.step.parameter_groups import Group

RULE = (
    "In a join context a rank without inputs expects one step() after each pass outside no_sync(), and none after a "
    "pass under no_sync(): accumulate gradients under no_sync(), and let the last pass before step() synchronise."
)


@contextlib.contextmanager
def naming_the_rule() -> Iterator[None]:
    """Add what must hold in a join context to an error about ranks that are at different calls."""
    try:
        yield
    except (RanksDisagreeError, PeerFailedError) as error:
        raise type(error)(f"{error} {RULE}") from error


class ZeROJoinHook(JoinHook):
    """What a joined rank does while others still have inputs."""

    def __init__(self, serve: Callable[[], None], engine: Engine, groups: Callable[[], Sequence[Group]]) -> None:
        self._serve = serve
        self._engine = engine
        self._groups = groups
        mine = {id(param) for param in engine.params}
        self._models = [
            joinable
            for joinable in joinables_of_caller()
            if isinstance(joinable, nn.Module) and any(id(param) in mine for param in joinable.parameters())
        ]

    def main_hook(self) -> None:
        """Take part in one step of the active ranks, unless they accumulate gradients without one."""
        if not any(accumulates(model) for model in self._models):
            self._serve()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave all ranks with the options of a last one: its scheduler may have run after its last step."""
        collectives, groups = self._engine.collectives, self._groups()
        flags = [row[0] for row in collectives.all_gather_flags([int(is_last_joiner)], "leaving the join context")]
        source, header = flags.index(1), b""
        failure: Exception | None = None
        try:
            if collectives.group_rank == source:
                header = write_handover(groups, [], False)
        except Exception as error:
            failure = error
        header = collectives.broadcast_bytes(header, source)
        agree(collectives, "leaving the join context", [], failure)
        if not is_last_joiner:
            read_handover(header).apply_options(groups)


def active_step(
    engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    """A step of a rank that still has inputs, inside a join context."""
    if not callable(closure):
        return _round(engine, groups, closure, kwargs, active=True)
    # Before anything of ours is sent, because a joined rank runs DDP's hook first and then ours.
    with torch.enable_grad():
        loss = closure()
    _round(engine, groups, lambda: loss, kwargs, active=True)
    return loss


def joined_step(engine: Engine, groups: Sequence[Group]) -> None:
    """A step of a rank that has joined, with gradients from an active one."""
    _round(engine, groups, None, {}, active=False)


def _round(
    engine: Engine,
    groups: Sequence[Group],
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
    active: bool,
) -> Any:
    loss, failure = None, None
    if active and engine.gradients.accumulating:
        raise RuntimeError(
            f"rank {engine.collectives.group_rank}: step() after a pass under no_sync(), in a join context. {RULE}"
        )
    try:
        engine.follow_moved_params()
    except Exception as error:
        failure = error
    with naming_the_rule():
        flags = [row[0] for row in engine.collectives.all_gather_flags([int(active)], "step()")]
    joined = [group_rank for group_rank, is_active in enumerate(flags) if not is_active]
    has_gradient = engine.gradients.has_gradient()
    gradient_shards: dict[int, Tensor] | None = None
    if joined:
        source = flags.index(1)
        if engine.collectives.group_rank == source:
            failure = _send_to_joined(engine, groups, has_gradient, joined) or failure
        else:
            header = engine.collectives.broadcast_bytes(None, source)
            try:
                if not active and header:
                    has_gradient, gradient_shards = _receive_from_active(engine, groups, header, source)
            except Exception as error:
                failure = error
    try:
        if failure is None:
            loss = engine.update(groups, closure, kwargs, gradient_shards)
    except Exception as error:
        failure = error
    engine.confirm_and_share(groups, has_gradient, failure)
    engine.forget_gradients()
    return loss


def _send_to_joined(
    engine: Engine, groups: Sequence[Group], has_gradient: Sequence[bool], joined: Sequence[int]
) -> Exception | None:
    """Give every joined rank options and gradients. If that cannot be done, say so with an empty header."""
    collectives = engine.collectives
    header, failure = b"", None
    ranges: dict[int, list[Tensor]] = {}
    try:
        for group_rank in joined if not engine.gradients.is_reduce_scattered else ():
            shards = _with_gradient(engine, group_rank, has_gradient)
            ranges[group_rank] = [as_bytes(_gradient_range(engine, shard)) for shard in shards]
        header = write_handover(groups, has_gradient, engine.gradients.is_reduce_scattered)
    except Exception as error:
        failure = error
    collectives.broadcast_bytes(header, collectives.group_rank)
    if failure is None:
        for group_rank, pieces in ranges.items():
            send_ranges(
                pieces,
                lambda buffer, to=group_rank: collectives.send(buffer, to),  # type: ignore[misc]
                collectives.control_device,
            )
    return failure


def _receive_from_active(
    engine: Engine, groups: Sequence[Group], header: bytes, source: int
) -> tuple[list[bool], dict[int, Tensor]]:
    """Take an active rank's options, and return which parameters have a gradient and this rank's ranges of them."""
    collectives = engine.collectives
    handover = read_handover(header)
    handover.apply_options(groups)
    has_gradient = list(handover.has_gradient)
    shards = _with_gradient(engine, collectives.group_rank, has_gradient)
    if handover.is_reduce_scattered:
        # Gradients are reduced to joined ranks too: this rank has received its own ranges.
        ranges = engine.gradients.owned_shards() or engine.reduced_shards
        missing = [engine.layout.params[shard.param].name for shard in shards if shard.param not in ranges]
        if missing:
            raise RuntimeError(f"parameters {missing} have a gradient but are in none of DDP's buckets")
        return has_gradient, {shard.param: ranges[shard.param] for shard in shards}
    gradient_shards = {
        shard.param: torch.empty(
            shard.numel, dtype=engine.params[shard.param].dtype, device=engine.params[shard.param].device
        )
        for shard in shards
    }
    receive_ranges(
        [as_bytes(flat) for flat in gradient_shards.values()],
        lambda buffer: collectives.receive(buffer, source),
        collectives.control_device,
    )
    return has_gradient, gradient_shards


def _with_gradient(engine: Engine, group_rank: int, has_gradient: Sequence[bool]) -> list[Shard]:
    return [shard for shard in engine.layout.owned_by(group_rank) if has_gradient[shard.param]]


def _gradient_range(engine: Engine, shard: Shard) -> Tensor:
    param = engine.params[shard.param]
    gradient = param.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"parameter {engine.layout.params[shard.param].name!r} has a sparse gradient, which cannot be handed to "
            "a rank that has run out of inputs"
        )
    return flat_like(gradient, param)[shard.start : shard.stop]
