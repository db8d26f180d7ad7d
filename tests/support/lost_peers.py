"""Calls in which a rank is lost: it closes its connections at some place of the call, is killed, or does not come.

Every call has a process group of its own, so that many calls can be tried in one run.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import onecopy
from onecopy import PeerFailedError, ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint, optimizer
from onecopy.checkpoint import loading
from onecopy.checkpoint.saving import SaveJob
from onecopy.comm import collectives
from onecopy.comm.work import is_backend_error
from onecopy.data_parallel.backward import BackwardReducer
from onecopy.data_parallel.module_sync import ModuleSync
from onecopy.data_parallel.step import PipelinedStep
from onecopy.ddp_hooks.overlap import OverlappedStep
from onecopy.ddp_hooks.reduce_scatter import GradientReducer
from onecopy.state_dict import gather
from onecopy.step import join, norms
from onecopy.step.engine import Engine
from tests.support.exact_training import allreduce
from tests.support.harness import Pool

LIMIT = 240.0

SECONDS = 15.0
"""No error may take longer: it comes before the timeout of the group, which is 30 seconds if a rank is killed."""

NO_TAG = 2**31 - 1
"""A tag that no message has."""

TIMEOUT = 4.0
"""The timeout of the groups of calls to which a rank does not come."""


NORM = "grad_norm() or clip_grad_norm_()"
UPDATE = "the update inside backward()"
WRAPPING = "constructing ShardedDataParallel"
SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"
SETTING, UNSCALING = "set_optimizer_state_dict()", "GradScaler.unscale_()"


class Trained:
    """A model on one level, on a process group of its own."""

    def __init__(self, level: str, group: Any, passes: int = 1) -> None:
        torch.manual_seed(0)
        sharded = level in ("sharded", "overlap forward")
        # DDP would send the buffers in calls of its own.
        middle = nn.BatchNorm1d(8) if sharded else nn.ReLU()
        self.module = nn.Sequential(nn.Linear(8, 8), middle, nn.Linear(8, 8))
        self.group = group
        self.loss: Any = None
        self.state: Any = None
        self.scaler = torch.amp.GradScaler("cpu")
        if not sharded:
            self.model: Any = DistributedDataParallel(self.module, process_group=group)
        self.zero = ZeroRedundancyOptimizer(
            self.module.parameters(), AdamW, process_group=group, overlap_with_ddp=level == "overlap", lr=0.01
        )
        if sharded:
            self.model = ShardedDataParallel(
                self.module, self.zero, bucket_bytes=300, overlap_forward=level == "overlap forward"
            )
        elif level == "reduce-scatter":
            self.model.register_comm_hook(self.zero, onecopy.reduce_scatter_hook)
        elif level == "overlap":
            self.model.register_comm_hook(None, onecopy.hook_with_zero_step(allreduce, self.model, self.zero))
        for _ in range(3 if level == "overlap" else passes):
            self.forward()
            self.backward()
            self.zero.step()
            self.zero.zero_grad()

    def forward(self) -> None:
        self.loss = self.model(torch.randn(4, 8)).square().mean()

    def backward(self) -> None:
        self.loss.backward()

    def step_and(self, then: Callable[[], object]) -> None:
        """Make a step, and what waits for its parameters."""
        self.zero.step()
        then()

    def join(self) -> None:
        """Run out of inputs first on the last rank."""
        is_last = self.zero.rank == self.zero.world_size - 1
        with Join([self.model, self.zero]):
            for _ in range(1 if is_last else 3):
                self.forward()
                self.backward()
                self.zero.step()

    def prepare(self, call: str, root: str) -> None:
        """Do on all ranks what a call needs."""
        if call.startswith(("backward", "the update", "constructing ReduceScatter")):
            self.forward()
        elif call in ("step()", NORM):
            self.forward()
            self.backward()
        elif call == UNSCALING:
            self.forward()
            self.scaler.scale(self.loss).backward()
        elif call == LOADING:
            checkpoint.save(root, 1, model=self.model, optimizer=self.zero, process_group=self.group)
        elif call == SETTING:
            options = StateDictOptions(full_state_dict=True)
            self.state = checkpoint.get_optimizer_state_dict(self.module, self.zero, options=options)


@dataclass(frozen=True)
class Case:
    """A call on one level, and the place in which the lost rank closes its connections.

    Attributes:
        call: the name that the error must have.
        level: the level of sharding.
        make: makes the call.
        place: an object and the name of its function in which the rank is lost; None for before the call.
        passes: how many steps are made before.
        lost_rank: the rank that is lost, by default the last one. Nobody waits for a rank that only receives.
    """

    call: str
    level: str
    make: Callable[[Trained, str], object]
    place: tuple[Any, str] | None = None
    passes: int = 1
    lost_rank: int = -1

    def __str__(self) -> str:
        return f"{self.call} at level {self.level}, {self.place[1] if self.place else 'before the call'}"


def _step(trained: Trained, _: str) -> None:
    trained.zero.step()


def _backward(trained: Trained, _: str) -> None:
    trained.backward()


def _save(trained: Trained, root: str) -> None:
    checkpoint.save(root, 2, model=trained.model, optimizer=trained.zero, process_group=trained.group)


def _load(trained: Trained, root: str) -> None:
    checkpoint.load(root, model=trained.model, optimizer=trained.zero, process_group=trained.group)


def _zero(trained: Trained, _: str) -> None:
    ZeroRedundancyOptimizer(nn.Linear(4, 4).parameters(), AdamW, process_group=trained.group, lr=0.1)


def _wrap(trained: Trained, _: str) -> None:
    ShardedDataParallel(trained.module, trained.zero)


def _consolidate(trained: Trained, _: str) -> None:
    trained.zero.consolidate_state_dict()


def _load_state(trained: Trained, _: str) -> None:
    plain = AdamW(trained.module.parameters(), lr=0.01)
    trained.zero.load_state_dict(plain.state_dict())


def _set_state(trained: Trained, _: str) -> None:
    options = StateDictOptions(full_state_dict=True)
    checkpoint.set_optimizer_state_dict(trained.module, trained.zero, trained.state, options=options)


def _add_group(trained: Trained, _: str) -> None:
    trained.zero.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def _clip(trained: Trained, _: str) -> None:
    trained.zero.clip_grad_norm_(1.0)


def _join(trained: Trained, _: str) -> None:
    trained.join()


CASES = [
    *(Case("step()", level, _step) for level in ("parameter", "reduce-scatter", "sharded", "overlap forward")),
    *(Case("step()", level, _step, (Engine, "share")) for level in ("parameter", "reduce-scatter")),
    Case("step()", "sharded", _step, (PipelinedStep, "_start_sending")),
    Case("step()", "sharded", _step, (PipelinedStep, "_finish_step")),
    *(
        Case("step()", "overlap forward", lambda each, _: each.step_and(each.model.wait), (PipelinedStep, place))
        for place in ("_start_sending", "_finish_step")
    ),
    Case("step()", "overlap forward", lambda each, _: each.step_and(each.forward), (PipelinedStep, "_start_sending")),
    Case("step()", "overlap forward", lambda each, _: each.step_and(each.forward), (PipelinedStep, "_finish_step")),
    *(Case("backward()", level, _backward) for level in ("reduce-scatter", "sharded", "overlap forward")),
    Case("constructing ReduceScatter", "reduce-scatter", _backward, passes=0),
    Case("backward()", "reduce-scatter", _backward, (GradientReducer, "_start")),
    Case("backward()", "sharded", _backward, (BackwardReducer, "_launch")),
    *(Case(UPDATE, "overlap", _backward, (OverlappedStep, place)) for place in ("_start_sharing", "_finish_iteration")),
    Case("forward()", "sharded", lambda each, _: each.forward(), lost_rank=0),
    Case("forward()", "sharded", lambda each, _: each.forward(), (ModuleSync, "broadcast_buffers"), lost_rank=0),
    Case("constructing the optimizer", "parameter", _zero),
    Case(WRAPPING, "parameter", _wrap, passes=0),
    Case(WRAPPING, "parameter", _wrap, (ModuleSync, "broadcast_all"), passes=0),
    Case("add_param_group()", "parameter", _add_group),
    Case("load_state_dict()", "parameter", _load_state),
    *(Case("consolidate_state_dict()", level, _consolidate) for level in ("parameter", "sharded")),
    Case("consolidate_state_dict()", "parameter", _consolidate, (gather, "send_ranges")),
    *(Case(NORM, level, _clip) for level in ("parameter", "reduce-scatter", "sharded")),
    Case(NORM, "sharded", _clip, (norms, "combined_norms")),
    Case(UNSCALING, "sharded", lambda each, _: each.scaler.unscale_(each.zero)),
    *(Case(SAVING, level, _save) for level in ("parameter", "sharded")),
    Case(SAVING, "parameter", _save, (SaveJob, "_write")),
    Case(SAVING, "parameter", _save, (SaveJob, "_begin")),
    Case(SAVING, "parameter", _save, (SaveJob, "_commit")),
    Case(LOADING, "sharded", _load),
    Case(LOADING, "sharded", _load, (loading, "_load_from")),
    Case(SETTING, "parameter", _set_state),
    Case("step()", "parameter", _join, (join, "_receive_from_active")),
    Case("step()", "parameter", _join, (optimizer, "joined_step")),
]

WAYS = ["ends", "does not come"]
"""The ways in which a rank is lost."""


def problems(world_size: int, way: str, root: str) -> list[str]:
    """Lose a rank in many calls; return all errors of the others that are not as they should be."""
    pool = Pool(world_size)
    try:
        found = pool.run(__name__, "run", {"way": way, "root": root}, LIMIT, {world_size - 1})
    finally:
        pool.close()
    return [text for each in found if each is not None for text in each if text]


def run(way: str, root: str) -> list[str]:
    """Make all calls on this rank; return for each the error that is not as it should be, or an empty text.

    A rank that is lost inside a call closes its connections, and comes to the next call. All calls before which the
    last rank is killed come at the end.
    """
    comes_late = way == "does not come"
    here, world_size = dist.get_rank(), dist.get_world_size()
    killed_before: list[tuple[Case, Any, Callable[[], object]]] = []
    found = []
    for number, case in enumerate(CASES):
        if comes_late and case.place is not None:
            continue
        folder, timeout = os.path.join(root, str(number)), timedelta(seconds=TIMEOUT if comes_late else 30)
        group = dist.new_group(timeout=timeout)
        trained = Trained(case.level, group, case.passes)
        trained.prepare(case.call, folder)
        call = partial(case.make, trained, folder)
        if case.place is None and not comes_late:
            killed_before.append((case, group, call))
            continue
        dist.barrier()
        if here != case.lost_rank % world_size:
            found.append(_problem(case, group, call))
        elif case.place is not None:
            _lose(case.place, group, call)
        dist.barrier()
    if killed_before:
        dist.barrier()
        if here == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    return found + [_problem(case, group, call) for case, group, call in killed_before]


def _lose(place: tuple[Any, str], group: Any, call: Callable[[], object]) -> None:
    """Make a call, and close the connections in the middle of it."""

    def lose(*_arguments: Any, **_options: Any) -> None:
        _close_connections(group)
        raise RuntimeError("this rank is lost")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*place, lose)
        with pytest.raises(RuntimeError):
            call()


def _close_connections(group: Any) -> None:
    """Close the connections of a group and of its side groups, as the end of the process would.

    gloo closes them when a receive has timed out. A receive from a rank whose connection is closed already does not
    time out, so the next rank is tried.
    """
    for each in (group, *collectives._side_groups.get(group, {}).values()):
        for turn in range(1, each.size()):
            try:
                each.recv([torch.empty(1)], (each.rank() + turn) % each.size(), NO_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as error:  # noqa: PERF203 - the next rank is tried
                if "Timed out" in str(error):
                    break


def _problem(case: Case, group: Any, call: Callable[[], object]) -> str:
    """What is wrong with the error of a call on a rank that is left."""
    begun, error = time.monotonic(), None
    try:
        call()
    except BaseException as caught:
        error = caught
    seconds, text = time.monotonic() - begun, str(error)
    _close_connections(group)  # a rank that raises ends, and others may wait for it
    wrong = [
        name
        for name, right in {
            "type": type(error) is PeerFailedError,
            "cause": error is not None and error.__cause__ is not None and is_backend_error(error.__cause__),
            "rank and call": text.startswith(f"rank {dist.get_rank()}: {case.call}"),
            "what to do": "start all processes again from a checkpoint" in text,
            "seconds": seconds < SECONDS,
        }.items()
        if not right
    ]
    return f"{case}: wrong {', '.join(wrong)}: {type(error).__name__} after {seconds:.1f} s: {text}" if wrong else ""
