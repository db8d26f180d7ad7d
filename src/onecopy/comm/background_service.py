"""One waiting thread in each process that answers requests of other ranks, wherever the main threads are.

Requests go through the store of the default process group. Each process has an *inbox* there: a sequence of keys. The
thread waits for the next one, on a connection of its own, a clone of the store. An answer is one more key. Data go over
a :class:`~onecopy.comm.link.Link`, a gloo group of two ranks that lives for one request.

The thread ends when the default process group is freed, and at the latest before the interpreter ends. Global rank 0,
whose process may be the host of the store, ends the threads of all processes before its own. A process that ends in
order and has something left to answer about keeps its thread until then, for a while: rank 0 often saves when the
others have nothing left to do. It closes the connections of its process groups before, so that no rank waits for it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import logging
import multiprocessing.util
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch.distributed as dist

from onecopy.comm.gloo_threads import wait_for_idle_workers
from onecopy.comm.link import Link
from onecopy.comm.process_groups import close_connections
from onecopy.common.torch_private import (
    Store,
    clone_of,
    default_store,
    groups_of_process,
    is_unreachable,
)
from onecopy.errors import PeerFailedError

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Subjects = weakref.WeakValueDictionary[str, Any]

STOP = "stop"
"""The kind of the request that ends a thread."""

WAKE = "wake"
"""The kind of the request after which a thread looks for watches."""

TICK = 0.1
"""Seconds between two looks for a request while there are watches."""

ALL_SERVICES = "onecopy/services"
"""The key under which the store counts the inboxes of all processes."""

OF_RANK_0 = "onecopy/services/rank 0"
"""The key that tells that global rank 0 has a service, with its inbox."""

LONG_WAIT = timedelta(days=10)
"""One wait for a request; the thread then waits again."""

SECONDS_FOR_RANK_0 = 60.0
"""How long a process that ends in order goes on answering, so that rank 0 can save."""

SECONDS_TO_NOTICE = 15.0
"""How long a request may wait for the thread of another process before that process counts as dead."""

SECONDS_TO_END = 5.0
"""How long a process waits at its end for its thread, and global rank 0 for the threads of all others."""

NO_ANSWER = "has not answered within {:.0f} s: its process has died or is stopped"
BARRIER_HINT = "let all ranks wait for the save, with torch.distributed.barrier() after it"


class Answering:
    """A request, seen by the thread that answers it.

    Attributes:
        request: the entries of the request.
        subject: the object that the request is about; None if it no longer exists in this process.
        is_answered: whether the answer has been sent.
    """

    def __init__(self, request: Message, subject: Any, store: Store) -> None:
        self.request, self.subject, self._store = request, subject, store
        self.is_answered = False

    def answer(self, message: Message) -> None:
        """Send the answer, once."""
        self._store.set(self.request["reply"], json.dumps(message))
        self.is_answered = True

    def link(self) -> Link:
        """Connect to the rank that asks, which connects when it has read the answer."""
        timeout = timedelta(seconds=self.request["seconds"])
        return Link(self._store, self.request["reply"], is_caller=False, timeout=timeout)


Handler = Callable[[Answering], None]

handlers: dict[str, Handler] = {}
"""The functions that answer requests, by kind; they run on the service's thread."""


class Watch(Protocol):
    """A call that the thread makes again and again until it has ended."""

    has_ended: bool

    def look(self, store: Store) -> None:
        """Look for something, and return soon."""


class BackgroundService:
    """The waiting thread of this process, for one default process group.

    Attributes:
        inbox: a number that names this process's inbox in the store, positive and unique.
        subjects: the objects about which other ranks may ask, by keys that are equal on all ranks.
    """

    _by_group: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, BackgroundService]] = weakref.WeakKeyDictionary()

    def __init__(self, store: Store, is_rank_0: bool) -> None:
        self.inbox = secrets.randbits(62) + 1
        self.subjects: Subjects = weakref.WeakValueDictionary()
        # With the store itself, the host's server lives until stop() has ended all threads.
        self._store: Store | None = store
        self._is_rank_0 = is_rank_0
        self._process = os.getpid()
        self._numbers = itertools.count()
        thread_store = clone_of(store)  # waiting on the store itself would block the main thread's calls
        thread_store.set(f"{ALL_SERVICES}/{thread_store.add(ALL_SERVICES, 1)}", str(self.inbox))
        if is_rank_0:
            thread_store.set(OF_RANK_0, str(self.inbox))
        # The thread does not refer to the service, which is freed with the process group.
        self._watches: list[Watch] = []
        arguments = (thread_store, self.inbox, self.subjects, self._watches)
        self._thread = threading.Thread(target=_serve, args=arguments, name="onecopy-service", daemon=True)
        self._thread.start()
        atexit.register(self.end)
        # A child of multiprocessing ends without the interpreter's exit functions, but with these.
        self._at_exit = multiprocessing.util.Finalize(None, self.end, exitpriority=0)

    @classmethod
    def of_process(cls) -> BackgroundService:
        """The service of this process, started if there is none yet."""
        group = dist.group.WORLD
        assert group is not None
        service = cls._by_group.get(group)
        if service is None or not service.is_running:
            service = cls._by_group[group] = cls(default_store(), is_rank_0=dist.get_rank() == 0)
            weakref.finalize(group, service.stop_with_group).atexit = False
        return service

    @property
    def is_running(self) -> bool:
        """Whether the thread has not ended; rank 0 may have ended it."""
        return self._store is not None and self._thread.is_alive()

    def ask(self, inbox: int, request: Message, timeout: timedelta) -> Asking:
        """Send a request to the thread of another process, or of this one.

        Args:
            inbox: the inbox of that process.
            request: its kind, the key of its subject, and further entries.
            timeout: how long the answer, a connection and each message may take.
        """
        if self._store is None:
            raise PeerFailedError("cannot be asked: this process is ending, or has destroyed its process group")
        # A connection of its own, because another thread may use the store: it is closed after the request.
        store, reply = clone_of(self._store), f"onecopy/{self.inbox}/reply/{next(self._numbers)}"
        _post(store, inbox, {**request, "reply": reply, "seconds": timeout.total_seconds()})
        return Asking(store, inbox, reply, timeout)

    def watch(self, watch: Watch) -> None:
        """Let the thread call ``watch.look`` several times per second, until it has ended."""
        if self._store is None:
            return
        self._watches.append(watch)
        _post(self._store, self.inbox, {"kind": WAKE})

    def end(self) -> None:
        """Stop before the interpreter ends. After a normal end of the program, wait for global rank 0 first."""
        if self._may_be_asked():
            wait_for_idle_workers()
            for group in groups_of_process():
                close_connections(group)  # this process may end because of an error: sys.exit(1) shows nowhere
            self._thread.join(SECONDS_FOR_RANK_0)
        self.stop()

    def _may_be_asked(self) -> bool:
        """Whether global rank 0 may still ask this process, which ends in order."""
        if self._store is None or self._is_rank_0 or not self.subjects or os.getpid() != self._process:
            return False
        with contextlib.suppress(RuntimeError):  # the store's host has ended
            return not _has_failed() and not is_unreachable(self._store) and bool(self._store.check([OF_RANK_0]))
        return False

    def stop_with_group(self) -> None:
        """Wait for global rank 0 and stop; it frees the group, too, and the next one may have the same address."""
        store, is_own = self._store, os.getpid() == self._process
        if self._may_be_asked():
            self._thread.join(SECONDS_FOR_RANK_0)
        self.stop()
        if store is not None and is_own and not self._is_rank_0 and not is_unreachable(store):
            with contextlib.suppress(RuntimeError):  # the store's host has ended
                if store.check([OF_RANK_0]):
                    _wait_for(store, [_all_ended(int(store.get(OF_RANK_0)))])
            time.sleep(0.1)  # until rank 0 has ended the server of the store

    def stop(self) -> None:
        """End the thread and wait for its end; on global rank 0, end the threads of all processes first."""
        if self._store is None or os.getpid() != self._process:
            return  # a fork has no thread
        store, self._store = self._store, None
        self._at_exit.cancel()
        atexit.unregister(self.end)
        if is_unreachable(store):
            return  # the thread ends when its call times out
        with contextlib.suppress(RuntimeError):  # the store's host has ended, and with it this thread
            if self._thread.is_alive():
                inboxes = _living(store) if self._is_rank_0 else [self.inbox]
                for inbox in inboxes:
                    _post(store, inbox, {"kind": STOP})
                _wait_for(store, [_ended(inbox) for inbox in inboxes if inbox != self.inbox])
                if self._is_rank_0:
                    store.set(_all_ended(self.inbox), "1")
        if threading.current_thread() is not self._thread:
            self._thread.join(SECONDS_TO_END)


class Asking:
    """A request, seen by the rank that asks."""

    def __init__(self, store: Store, inbox: int, reply: str, timeout: timedelta) -> None:
        self._store = store
        self._inbox = inbox
        self._reply = reply
        self._timeout = timeout

    def answer(self) -> Message:
        """Wait for the answer; raise ``PeerFailedError`` if there is none. Its text continues a sentence."""
        if self._store.check([_closed(self._inbox)]) and not self._store.check([self._reply]):
            raise PeerFailedError(f"has ended, or has destroyed its process group: {BARRIER_HINT}")
        self._wait_until_noticed()
        try:
            self._store.wait([self._reply], self._timeout)
        except RuntimeError as error:
            raise PeerFailedError(NO_ANSWER.format(self._timeout.total_seconds())) from error
        message: Message = json.loads(self._store.get(self._reply))
        self._store.delete_key(self._reply)
        return message

    def _wait_until_noticed(self) -> None:
        """Wait until the thread of the other process has read the request, unless it is answering another one."""
        begun, noticed = time.monotonic(), _noticed(self._reply)
        while not self._store.check([noticed]):
            limit = self._timeout.total_seconds()
            if not self._store.check([_busy(self._inbox)]):
                limit = min(limit, SECONDS_TO_NOTICE)
            if time.monotonic() - begun > limit:
                raise PeerFailedError(NO_ANSWER.format(limit))
            time.sleep(0.005)
        self._store.delete_key(noticed)

    def link(self) -> Link:
        """Connect to the rank that answers."""
        return Link(self._store, self._reply, is_caller=True, timeout=self._timeout)


def _post(store: Store, inbox: int, request: Message) -> None:
    number = store.add(f"onecopy/{inbox}/count", 1)
    store.set(f"onecopy/{inbox}/{number}", json.dumps(request))


def _has_failed() -> bool:
    """Whether an exception ends this process. The interpreter keeps it; a child of multiprocessing is handling it."""
    error = sys.exc_info()[1]
    is_orderly = error is None or (isinstance(error, SystemExit) and not error.code)
    return hasattr(sys, "last_type") or not is_orderly


def _living(store: Store) -> list[int]:
    """The inboxes of all processes whose threads have not ended."""
    keys = [f"{ALL_SERVICES}/{number + 1}" for number in range(store.add(ALL_SERVICES, 0))]
    inboxes = [int(store.get(key)) for key in keys if store.check([key])]
    return [inbox for inbox in inboxes if not store.check([_ended(inbox)])]


def _wait_for(store: Store, keys: list[str]) -> None:
    limit = time.monotonic() + SECONDS_TO_END
    while keys and not store.check(keys) and time.monotonic() < limit:
        time.sleep(0.01)  # a wait of the store's own would print a warning if a process was killed


def _noticed(reply: str) -> str:
    """The key that tells that a request has been read."""
    return f"{reply}/noticed"


def _busy(inbox: int) -> str:
    """The key that tells that the thread is answering a request."""
    return f"onecopy/{inbox}/busy"


def _closed(inbox: int) -> str:
    """The key that tells that later requests are not answered."""
    return f"onecopy/{inbox}/closed"


def _ended(inbox: int) -> str:
    """The key that tells that the thread does not use the store any more."""
    return f"onecopy/{inbox}/ended"


def _all_ended(inbox_of_rank_0: int) -> str:
    """The key that tells that global rank 0 has seen the ends of all threads."""
    return f"onecopy/{inbox_of_rank_0}/all ended"


def _serve(store: Store, inbox: int, subjects: Subjects, watches: list[Watch]) -> None:
    """Answer requests until one of them is ``STOP``, or until the store is gone."""
    number = 0
    try:
        while True:
            number += 1
            key = f"onecopy/{inbox}/{number}"
            _look_until(store, key, watches)
            _wait_long(store, key)
            request = json.loads(store.get(key))
            store.delete_key(key)
            if request["kind"] == STOP:
                break
            if request["kind"] == WAKE:
                continue
            store.set(_busy(inbox), "1")
            store.set(_noticed(request["reply"]), "1")
            _handle(Answering(request, subjects.get(request["subject"]), store))
            store.delete_key(_busy(inbox))
        # A rank that asks from now on finds this key. Those that have asked before get an answer.
        store.set(_closed(inbox), "1")
        _refuse_rest(store, inbox, number)
        store.set(_ended(inbox), "1")
    except RuntimeError as error:  # the host of the store has ended
        logger.debug("the background service has ended: %s", error)


def _look_until(store: Store, key: str, watches: list[Watch]) -> None:
    """Look until there is a request, or no watch is left."""
    while watches and not store.check([key]):
        for watch in list(watches):
            try:
                watch.look(store)
            except dist.DistError:
                raise  # the host of the store has ended
            except Exception as error:
                logger.warning("onecopy no longer watches this loop: %r", error)
                watch.has_ended = True
            if watch.has_ended:
                watches.remove(watch)
        time.sleep(TICK)


def _wait_long(store: Store, key: str) -> None:
    while True:
        begun = time.monotonic()
        try:
            store.wait([key], LONG_WAIT)
            break
        except dist.DistStoreError:
            if time.monotonic() - begun < LONG_WAIT.total_seconds() / 2:
                raise


def _handle(answering: Answering) -> None:
    """Run the handler of a request. An exception goes to the rank that asks, if it has no answer yet."""
    try:
        handlers[answering.request["kind"]](answering)
    except Exception as error:
        logger.debug("a request of another rank has failed", exc_info=True)
        if not answering.is_answered:
            answering.answer({"error": f"answers: {type(error).__name__}: {error}"})


def _refuse_rest(store: Store, inbox: int, number: int) -> None:
    """Answer the requests after the last one that was handled: this process ends."""
    for later in range(number + 1, store.add(f"onecopy/{inbox}/count", 0) + 1):
        key = f"onecopy/{inbox}/{later}"
        if store.check([key]):
            request = json.loads(store.get(key))
            if request["kind"] not in (STOP, WAKE):
                store.set(_noticed(request["reply"]), "1")
                Answering(request, None, store).answer({"error": f"is ending: {BARRIER_HINT}"})
