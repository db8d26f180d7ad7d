"""Calls in which a rank is lost: it closes its connections at some place of the call, is killed, or does not come.

Every call has a process group of its own, so that many calls can be tried in one run.
"""

from __future__ import annotations

import gc
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
from torch.optim import AdamW

from onecopy import PeerFailedError, ShardedDataParallel, checkpoint, optimizer
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
from tests.accelerator import training
from tests.accelerator.training import Blocks
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
MAKING = "constructing ReduceScatter"
SAVING, LOADING = "saving a checkpoint", "loading a checkpoint"
SETTING, UNSCALING = "set_optimizer_state_dict()", "GradScaler.unscale_()"
FULL = StateDictOptions(full_state_dict=True)


BATCHED: dict[str, Any] = {"model": partial(Blocks, 1, nn.BatchNorm1d), "bucket": 600}
LEVELS = {
    "parameter": training.Case("", training.level_1),
    "reduce-scatter": training.Case("", training.level_2),
    "overlap": training.Case("", training.after_backward),
    "sharded": training.Case("", training.level_3, **BATCHED),
    "overlap forward": training.Case("", training.level_3, wrap={"overlap_forward": True}, **BATCHED),
}


class Trained(training.Training):
    """A model on one level, on a process group of its own, and what a call needs."""

    def __init__(self, case: Case, group: Any, root: str) -> None:
        super().__init__(LEVELS[case.level], training.Place(torch.device("cpu"), group))
        self.root, self.zero, self.passes = root, self.optimizer, 0
        self.scaler = torch.amp.GradScaler("cpu")
        self.state: Any = None
        for _ in range(3 if case.level == "overlap" else case.passes):
            self.forward()
            self.backward()
            self.zero.step()
            self.zero.zero_grad()
        if case.call in ("backward()", UPDATE, MAKING, "step()", NORM, UNSCALING):
            self.forward()
        if case.call in ("step()", NORM):
            self.backward()
        elif case.call == UNSCALING:
            self.scaler.scale(self.last_loss).backward()
        elif case.call == LOADING:
            checkpoint.save(root, 1, **self.what)
        elif case.call == SETTING:
            self.state = checkpoint.get_optimizer_state_dict(self.module, self.zero, options=FULL)

    @property
    def what(self) -> dict[str, Any]:
        """Arguments of checkpoint functions."""
        return {"model": self.model, "optimizer": self.zero, "process_group": self.place.group}

    def forward(self) -> None:
        self.passes += 1
        self.last_loss = self.loss(self.passes)

    def backward(self) -> None:
        self.last_loss.backward()

    def join(self) -> None:
        """Run out of inputs first on the last rank."""
        is_last = self.zero.rank == self.zero.world_size - 1
        with Join([self.model, self.zero]):
            for _ in range(1 if is_last else 3):
                self.forward()
                self.backward()
                self.zero.step()


CALLS: dict[str, Callable[[Trained], object]] = {
    "step()": lambda trained: trained.zero.step(),
    "forward()": lambda trained: trained.forward(),
    **dict.fromkeys(("backward()", MAKING, UPDATE), lambda trained: trained.backward()),
    "constructing the optimizer": lambda trained: trained.add_optimizers(),
    WRAPPING: lambda trained: ShardedDataParallel(trained.module, trained.zero),
    "add_param_group()": lambda trained: trained.zero.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "load_state_dict()": lambda trained: trained.zero.load_state_dict(
        AdamW(trained.module.parameters(), lr=0.01).state_dict()
    ),
    "consolidate_state_dict()": lambda trained: trained.zero.consolidate_state_dict(),
    NORM: lambda trained: trained.zero.clip_grad_norm_(1.0),
    UNSCALING: lambda trained: trained.scaler.unscale_(trained.zero),
    SAVING: lambda trained: checkpoint.save(trained.root, 2, **trained.what),
    LOADING: lambda trained: checkpoint.load(trained.root, **trained.what),
    SETTING: lambda trained: checkpoint.set_optimizer_state_dict(
        trained.module, trained.zero, trained.state, options=FULL
    ),
}
"""The calls by the names that errors give them."""


@dataclass(frozen=True)
class Case:
    """A call on one level, and the place in which the lost rank closes its connections.

    Attributes:
        call: the name that the error must have.
        level: the level of sharding.
        place: an object and the name of its function in which the rank is lost; None for before the call.
        then: what is called after it, if the error comes there.
        passes: how many steps are made before.
        lost_rank: the rank that is lost, by default the last one. Nobody waits for a rank that only receives.
    """

    call: str
    level: str
    place: tuple[Any, str] | None = None
    then: Callable[[Trained], object] = lambda _: None
    passes: int = 1
    lost_rank: int = -1

    def __str__(self) -> str:
        return f"{self.call} at level {self.level}, {self.place[1] if self.place else 'before the call'}"

    def make(self, trained: Trained) -> None:
        """Make the call."""
        if self.place in JOINING:
            trained.join()
        else:
            CALLS[self.call](trained)
            self.then(trained)


JOINING = ((join, "_receive_from_active"), (optimizer, "joined_step"))
SENDING, FINISHING = (PipelinedStep, "_start_sending"), (PipelinedStep, "_finish_step")
CASES = [
    *(Case("step()", level) for level in ("parameter", "reduce-scatter", "sharded", "overlap forward")),
    *(Case("step()", level, (Engine, "share")) for level in ("parameter", "reduce-scatter")),
    *(Case("step()", "sharded", place) for place in (SENDING, FINISHING)),
    *(Case("step()", "overlap forward", place, lambda each: each.model.wait()) for place in (SENDING, FINISHING)),
    *(Case("step()", "overlap forward", place, lambda each: each.forward()) for place in (SENDING, FINISHING)),
    *(Case("step()", "parameter", place) for place in JOINING),
    *(Case("backward()", level) for level in ("reduce-scatter", "sharded", "overlap forward")),
    Case(MAKING, "reduce-scatter", passes=0),
    Case("backward()", "reduce-scatter", (GradientReducer, "_start")),
    Case("backward()", "sharded", (BackwardReducer, "_launch")),
    *(Case(UPDATE, "overlap", (OverlappedStep, place)) for place in ("_start_sharing", "_finish_iteration")),
    Case("forward()", "sharded", lost_rank=0),
    Case("forward()", "sharded", (ModuleSync, "broadcast_buffers"), lost_rank=0),
    Case("constructing the optimizer", "parameter"),
    Case(WRAPPING, "parameter", passes=0),
    Case(WRAPPING, "parameter", (ModuleSync, "broadcast_all"), passes=0),
    Case("add_param_group()", "parameter"),
    Case("load_state_dict()", "parameter"),
    *(Case("consolidate_state_dict()", level) for level in ("parameter", "sharded")),
    Case("consolidate_state_dict()", "parameter", (gather, "send_ranges")),
    *(Case(NORM, level) for level in ("parameter", "reduce-scatter", "sharded")),
    Case(NORM, "sharded", (norms, "combined_norms")),
    Case(UNSCALING, "sharded"),
    *(Case(SAVING, level) for level in ("parameter", "sharded")),
    *(Case(SAVING, "parameter", (SaveJob, place)) for place in ("_write", "_begin", "_commit")),
    Case(LOADING, "sharded"),
    Case(LOADING, "sharded", (loading, "_load_from")),
    Case(SETTING, "parameter"),
]

WAYS = ["ends", "does not come"]
"""The ways in which a rank is lost."""


def problems(world_size: int, way: str, root: str) -> list[str]:
    """Lose a rank in many calls; return all errors of the others that are not as they should be."""
    pool = Pool(
        world_size, collective_limit=90.0
    )  # a rank that is late, because it waits for a lost one, is waited for
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
    gc.disable()  # a collection would end an earlier case in the middle of a later one, and wait for its lost rank
    comes_late = way == "does not come"
    here, world_size = dist.get_rank(), dist.get_world_size()
    killed_before: list[tuple[Case, Any, Callable[[], object]]] = []
    found = []
    for number, case in enumerate(CASES):
        if comes_late and case.place is not None:
            continue
        folder, timeout = os.path.join(root, str(number)), timedelta(seconds=TIMEOUT if comes_late else 30)
        group = dist.new_group(timeout=timeout)
        call = partial(case.make, Trained(case, group, folder))
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
            time.sleep(1.0)  # until the others have left the barrier, too
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
