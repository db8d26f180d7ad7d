"""Uneven inputs: a rank that has joined (run out of inputs) goes on updating the shards that it owns.

DDP's join hook leaves the gradients of a joined rank as they were, so an active rank sends them in every step.
One step, in the same order on all ranks:

1. The ranks vote whether one has joined, and whether one has failed. A joined rank has allocated its gradients before.
2. If a rank has joined, the lowest active rank broadcasts the groups' options (the scheduler of a
   joined rank no longer runs) and which parameters have a gradient. It sends each joined rank the gradients of its
   shards, unless the reduce-scatter hook has already done that.
3. Update, confirm, share, as in any other step.

torch runs the hooks of a joined rank once for every forward pass of the active ranks. A step follows each pass that
synchronises gradients, and no other. ``Join([ddp, optimizer], model=ddp)`` tells the optimizer which passes these are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel

from onecopy.comm.agreement import FailTogether, FirstFailure
from onecopy.comm.buffers import receive_ranges, send_ranges
from onecopy.common import tagged_json
from onecopy.common.flat_views import as_bytes
from onecopy.common.torch_private import accumulates
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.layout import Shard
from onecopy.step.engine import Engine
from onecopy.step.gradients import gradient_range
from onecopy.step.parameter_groups import Group, options_of, replace_options

CALL = "step() in a join context"

RULE = (
    "In a join context a rank without inputs expects one step() after each pass outside no_sync(), and none after a "
    "pass under no_sync(): write Join([ddp, optimizer], model=ddp), accumulate gradients under no_sync(), and let the "
    "last pass before step() synchronise."
)

JOIN_REFUSAL = (
    "ShardedDataParallel and the overlap hooks need equally many inputs on all ranks: with "
    "torch.distributed.algorithms.Join use DistributedDataParallel and ZeroRedundancyOptimizer, without "
    "overlap_with_ddp, and with or without onecopy.reduce_scatter_hook"
)
"""The error of objects that cannot be given to ``Join``."""


@contextlib.contextmanager
def with_join_rule() -> Iterator[None]:
    """Add the rule of a join context to an error about ranks that are at different calls."""
    try:
        yield
    except (RanksDisagreeError, PeerFailedError) as error:
        if isinstance(error, PeerFailedError) and error.__cause__ is None:
            raise  # a rank has failed for a reason of its own
        raise type(error)(f"{error} {RULE}") from error


class ZeROJoinHook(JoinHook):
    """The hook of a joined rank: it takes part in the steps of the active ranks, after passes of ``model``."""

    def __init__(
        self, step: Callable[[], None], engine: Engine, groups: Callable[[], Sequence[Group]], model: object
    ) -> None:
        if engine.guard is not None:
            raise ValueError(
                "nonfinite cannot be combined with Join: a rank without inputs receives its gradients after the others "
                "have looked at theirs; construct the optimizer without it"
            )
        if model is not None and not isinstance(model, DistributedDataParallel):
            raise TypeError(
                f"model= of Join must be the DistributedDataParallel model, got {type(model).__qualname__}: "
                "Join([ddp, optimizer], model=ddp)"
            )
        self._step = step
        self._engine = engine
        self._groups = groups
        self._model = model

    def check_step(self) -> None:
        """Raise before a step of an active rank, if its last pass ran under ``no_sync()``."""
        if self._model is not None and accumulates(self._model):
            raise RuntimeError(
                f"rank {self._engine.collectives.group_rank}: step() after a pass under no_sync(), in a join context. "
                f"{RULE}"
            )

    def main_hook(self) -> None:
        """Take part in one step of the active ranks, unless their last pass ran under ``no_sync()``."""
        if self._model is None or not accumulates(self._model):
            self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the options of a last joiner, whose scheduler may have run after its last step."""
        self._model = None
        call = "leaving the join context"
        collectives, groups = self._engine.collectives, self._groups()
        with FailTogether(collectives, call):
            header = _header(groups) if is_last_joiner else b""
        flags = [row[0] for row in collectives.all_gather_flags([int(is_last_joiner)], call)]
        header = collectives.broadcast_bytes(header, flags.index(1), call)
        with FailTogether(collectives, call):
            if not is_last_joiner:
                _apply_options(groups, _read_header(header)[0])


def active_step(
    engine: Engine, groups: Sequence[Group], closure: Callable[[], Any] | None, kwargs: dict[str, Any]
) -> Any:
    """The step schedule of a rank that still has inputs, inside a join context."""
    if not callable(closure):
        return _step(engine, groups, closure, kwargs, active=True)
    # The closure runs before anything is sent, because a joined rank runs DDP's hook first and this one then.
    with torch.enable_grad():
        loss = closure()
    _step(engine, groups, lambda: loss, kwargs, active=True)
    return loss


def joined_step(engine: Engine, groups: Sequence[Group]) -> None:
    """The step of a rank that has joined, with gradients from an active rank."""
    _step(engine, groups, None, {}, active=False)


def _step(
    engine: Engine,
    groups: Sequence[Group],
    closure: Callable[[], Any] | None,
    kwargs: dict[str, Any],
    active: bool,
) -> Any:
    loss, failure = None, FirstFailure()
    room: dict[int, Tensor] = {}
    with with_join_rule(), FailTogether(engine.collectives, CALL) as together:
        engine.follow_moved_params()
        if not active and not engine.gradients.without_inputs:
            room = _allocate_gradients(engine)
        together.flag = not active
    has_gradient = engine.gradients.has_gradient()
    gradient_shards: dict[int, Tensor] | None = None
    header, source = _share_header(engine, groups, has_gradient, active) if together.any_flag else (b"", 0)
    with failure:
        if not active:
            has_gradient, gradient_shards = _receive_from_active(engine, groups, header, source, room)
        loss = engine.update(groups, closure, kwargs, gradient_shards)
    engine.confirm_and_share(groups, has_gradient, failure.error)
    engine.gradients.without_inputs.clear()
    return loss


def _share_header(
    engine: Engine, groups: Sequence[Group], has_gradient: Sequence[bool], active: bool
) -> tuple[bytes, int]:
    """Send every joined rank options and gradients of the lowest active rank; return the header, and that rank."""
    collectives = engine.collectives
    flags = [row[0] for row in collectives.all_gather_flags([int(active)], CALL)]
    source, header = flags.index(1), b""
    ranges: dict[int, list[Tensor]] = {}
    with FailTogether(collectives, CALL):
        if collectives.group_rank == source:
            header = _header(groups, has_gradient, engine.gradients.is_reduce_scattered)
            if not engine.gradients.is_reduce_scattered:
                for group_rank, is_active in enumerate(flags):
                    shards = [] if is_active else _with_gradient(engine, group_rank, has_gradient)
                    ranges[group_rank] = [as_bytes(_gradient_shard(engine, shard)) for shard in shards]
    header = collectives.broadcast_bytes(header, source, CALL)
    for group_rank, pieces in ranges.items():
        if pieces:
            start = partial(collectives.send, destination=group_rank, call=CALL)
            send_ranges(pieces, start, collectives.control_device)
    return header, source


def _allocate_gradients(engine: Engine) -> dict[int, Tensor]:
    """Memory for the gradients of all shards of this rank, by parameter."""
    return {
        shard.param: torch.empty(
            shard.numel, dtype=engine.params[shard.param].dtype, device=engine.params[shard.param].device
        )
        for shard in engine.layout.owned_by(engine.collectives.group_rank)
    }


def _receive_from_active(
    engine: Engine, groups: Sequence[Group], header: bytes, source: int, room: dict[int, Tensor]
) -> tuple[list[bool], dict[int, Tensor]]:
    """Take over an active rank's options; return which parameters have a gradient, and this rank's shards of them.

    The gradients are received into ``room`` before anything that may fail, because their sender waits.
    """
    collectives = engine.collectives
    options, has_gradient, is_reduce_scattered = _read_header(header)
    shards = _with_gradient(engine, collectives.group_rank, has_gradient)
    if is_reduce_scattered:
        # Gradients are reduced to joined ranks, too: this rank has its shards already.
        reduced = engine.gradients.without_inputs
        missing = [engine.layout.params[shard.param].name for shard in shards if shard.param not in reduced]
        if missing:
            raise RuntimeError(f"parameters {missing} have a gradient but are in none of DDP's buckets")
        gradient_shards = {shard.param: reduced[shard.param] for shard in shards}
    else:
        room = room or _allocate_gradients(engine)
        gradient_shards = {shard.param: room[shard.param] for shard in shards}
        start = partial(collectives.receive, source=source, call=CALL)
        receive_ranges([as_bytes(flat) for flat in gradient_shards.values()], start, collectives.control_device)
    _apply_options(groups, options)
    return has_gradient, gradient_shards


def _with_gradient(engine: Engine, group_rank: int, has_gradient: Sequence[bool]) -> list[Shard]:
    return [shard for shard in engine.layout.owned_by(group_rank) if has_gradient[shard.param]]


def _gradient_shard(engine: Engine, shard: Shard) -> Tensor:
    gradient = gradient_range(shard, engine.params[shard.param], engine.layout.params[shard.param].name)
    assert gradient is not None
    return gradient


def _apply_options(groups: Sequence[Group], new: Sequence[Group]) -> None:
    for group, options in zip(groups, new, strict=True):
        # A tensor is written in place: the user may hold on to it, and it may be on an accelerator.
        kept = {key: value for key, value in group.items() if _both_tensors(value, options.get(key))}
        for key, tensor in kept.items():
            tensor.copy_(options[key])
        replace_options(group, {**options, **kept})


def _header(groups: Sequence[Group], has_gradient: Sequence[bool] = (), is_reduce_scattered: bool = False) -> bytes:
    """The arguments as JSON. Tensors among the options, such as a learning rate, are written as values."""
    described = []
    for group in groups:
        tensors: list[Tensor] = []
        tree = tagged_json.encode(options_of(group), tensors, "an option of a parameter group")
        described.append([tree, [[tagged_json.describe_tensor(tensor)[0], tensor.tolist()] for tensor in tensors]])
    return tagged_json.dumps([described, [int(has) for has in has_gradient], is_reduce_scattered])


def _read_header(text: bytes) -> tuple[list[Group], list[bool], bool]:
    described, mask, is_reduce_scattered = tagged_json.loads(text)
    options = [
        tagged_json.decode(tree, [torch.tensor(value, dtype=getattr(torch, name)) for name, value in values])
        for tree, values in described
    ]
    return options, [bool(has) for has in mask], is_reduce_scattered


def _both_tensors(current: object, new: object) -> bool:
    return isinstance(current, Tensor) and isinstance(new, Tensor) and current.shape == new.shape
