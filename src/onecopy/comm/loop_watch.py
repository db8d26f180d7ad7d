"""``fail_together``: a block around a training loop that ends on all ranks soon after it has failed on one.

1. An exception that leaves the block is told to all ranks, through the store of the default process group.
2. Then this rank aborts its process groups. With gloo that closes its connections, so every rank that waits for it gets
   an error of the backend at once, also in a backward pass of DDP. With other backends every rank must abort: the
   thread of its background service reads the failure, and does so.
3. A rank that gets an error of the backend reads which rank has failed first, and raises ``PeerFailedError`` with it.
   If none has, because a process was killed, the ranks that do not report the lost connection are named.

The thread also looks for ranks that wait for each other in different calls (``blocked_ranks.py``), which no rank would
notice before the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from onecopy.comm.agreement import ranks_text
from onecopy.comm.backend_errors import is_backend_error
from onecopy.comm.background_service import BackgroundService
from onecopy.comm.blocked_ranks import BlockedRanks, line_of
from onecopy.comm.collectives import Collectives
from onecopy.comm.process_groups import abort_groups
from onecopy.common.torch_private import Store, default_store, is_unreachable
from onecopy.errors import PeerFailedError, RanksDisagreeError

SECONDS = 5.0
"""After how long in one call a rank counts as blocked."""

LOOK_EVERY = 0.5
"""Seconds between two looks at the thread of the loop."""

SECONDS_TO_NOTICE = 3.0
"""How long ranks that have lost a connection wait for the others to notice it too."""

JOIN_HINT = "For inputs of different lengths use torch.distributed.algorithms.Join."

Failure = dict[str, Any]


class LoopWatch:
    """The watch over one ``fail_together`` block of this process.

    Args:
        store: a store that the main thread uses.
        name: names the block in the store, equal on all ranks.
        finds_blocked_ranks: whether to look for ranks that wait for each other.
    """

    def __init__(self, store: Store, name: str, finds_blocked_ranks: bool) -> None:
        self._store = store
        self._prefix = f"onecopy/loops/{name}"
        self._global_rank, self._world_size = dist.get_rank(), dist.get_world_size()
        thread = threading.get_ident()
        self._blocked_ranks = BlockedRanks(self._prefix, self._global_rank, self._world_size, SECONDS, thread)
        self._finds_blocked_ranks = finds_blocked_ranks
        self._next_look = time.monotonic() + LOOK_EVERY
        self._lock = threading.Lock()  # the service's thread looks at this thread, which may be leaving
        self.has_ended = False

    def look(self, store: Store) -> None:
        """Look for failures of other ranks and for ranks that wait for each other; called again and again."""
        with self._lock:
            if self.has_ended or time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + LOOK_EVERY
            has_failed = self._failure(store) is not None
            places = self._blocked_ranks.check(store) if self._finds_blocked_ranks and not has_failed else None
            if places is not None:
                self._tell(store, {"blocked": places})
            self.has_ended = has_failed or places is not None
        if self.has_ended:
            abort_groups()

    def leave(self) -> None:
        """Tell the other ranks that this rank has left the block in order."""
        with self._lock:
            self.has_ended = True
            with contextlib.suppress(RuntimeError):  # the host of the store has ended
                self._blocked_ranks.leave(self._store)

    def fail(self, error: BaseException) -> BaseException:
        """Tell all ranks that an exception leaves the block on this one, abort, and return the exception to raise.

        If the network to the store is cut, no rank can be told, and a rank that tried would wait until it is back.
        """
        if is_unreachable(self._store):
            abort_groups()
            return error
        lost_connection = is_backend_error(error)
        mine: Failure = {"rank": self._global_rank, "error": describe(error), "lost_connection": lost_connection}
        if lost_connection:
            mine["left"] = self._blocked_ranks.first_that_left(self._store)
        with self._lock:
            self.has_ended = True
            failure = self._tell(self._store, mine)
        self._store.set(self._ended_key(self._global_rank), "1")
        abort_groups()
        return (lost_connection and self._error_of(failure)) or error

    def _error_of(self, failure: Failure) -> Exception | None:
        """The error to raise after a lost connection; None if no other rank is known to have caused it."""
        own = f"rank {self._global_rank}"
        if "blocked" in failure:
            return RanksDisagreeError(
                f"{own}: the ranks wait for each other. {failure['blocked']}. All ranks must make the same calls in "
                f"the same order. {JOIN_HINT}"
            )
        if failure.get("left") is not None:
            return PeerFailedError(
                f"{own}: rank {failure['left']} has left the training loop, and this rank waits for it. All ranks must "
                f"make the same number of steps. {JOIN_HINT}"
            )
        if not failure["lost_connection"]:
            return PeerFailedError(f"{own}: training has failed on rank {failure['rank']}: {failure['error']}")
        silent = self._silent_ranks()
        if not silent:
            return None
        return PeerFailedError(
            f"{own}: {ranks_text(silent)} ended without an exception, or does not answer: the process was killed, has "
            f"run out of memory, or its machine is gone. First noticed on rank {failure['rank']}: {failure['error']}"
        )

    def _silent_ranks(self) -> list[int]:
        """The ranks that do not notice, within a few seconds, that a connection was lost."""
        limit = time.monotonic() + SECONDS_TO_NOTICE
        silent = list(range(self._world_size))
        while silent and time.monotonic() < limit:
            silent = [global_rank for global_rank in silent if not self._store.check([self._ended_key(global_rank)])]
            time.sleep(0.05)
        return silent

    def _ended_key(self, global_rank: int) -> str:
        return f"{self._prefix}/ended/{global_rank}"

    def _failure(self, store: Store) -> Failure | None:
        key = f"{self._prefix}/failure"
        return json.loads(store.get(key)) if store.check([key]) else None

    def _tell(self, store: Store, failure: Failure) -> Failure:
        """Store a failure if there is none yet, and return the first one."""
        first: Failure = json.loads(store.compare_set(f"{self._prefix}/failure", "", json.dumps(failure)))
        return first


def describe(error: BaseException) -> str:
    """An exception as text: its type, its message and the line of the program."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return f"{text} (at {line_of(last.filename, last.lineno or 0, last.name)})"


@contextlib.contextmanager
def fail_together(*, find_blocked_ranks: bool = True) -> Iterator[None]:
    """Run a training loop that ends on all ranks soon after an exception has left it on one.

    Without it, the other ranks wait for the failed one until its process ends, or until the timeout of the process
    group, and get an error of the backend that does not say why.

    All ranks enter the block together and make the same calls in it. When an exception leaves the block on one rank,
    the process groups of all ranks are aborted: end the processes and go on from a checkpoint.

    Example::

        with onecopy.fail_together():
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss(model(inputs), targets).backward()
                optimizer.step()

    Args:
        find_blocked_ranks: also end the block if all ranks wait for each other in different calls, because one of them
            has left out ``step()``, for example. It takes a few seconds. A rank that computes is never taken for one
            that waits. Only for process groups on CPUs.

    Raises:
        PeerFailedError: if the block has failed on another rank. It names that rank and its exception.
        RanksDisagreeError: if the ranks wait for each other. It names the call of each rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        yield
        return
    # A new name for each block: after a restart torchrun may give processes the store of those that have failed.
    names = Collectives().all_gather_flags([secrets.randbits(62)], "entering fail_together")
    watch = LoopWatch(default_store(), str(names[0][0]), find_blocked_ranks)
    BackgroundService.of_process().watch(watch)
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            watch.leave()  # sys.exit() ends a program in order
            raise
        raised = error
        with contextlib.suppress(RuntimeError):  # the host of the store has ended
            raised = watch.fail(error)
        if raised is error:
            raise
        raise raised from error
    else:
        watch.leave()
