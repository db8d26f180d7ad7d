"""Finds ranks that wait for each other in different calls, by looking at the thread of the training loop.

A rank is blocked if this thread has stood for a while where threads wait for other ranks, and its process has computed
and sent next to nothing meanwhile. A rank that evaluates, saves or reads data is not blocked, and neither is one that
sends over a slow link, or one that waits in ``state_dict()`` for the background services of others. If *all* ranks are
blocked or have left the loop, and not all are in the same call, none of them can ever go on.

The calls of this module run on the thread of the background service, and only while a ``fail_together`` block is open.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import FrameType

import torch

from onecopy.common.torch_private import Store

BUSY_SHARE = 0.2
"""The share of one processor above which a process counts as computing."""

BYTES_SENT = 1 << 20
"""The bytes from which on a process counts as sending, while its thread stands in one call."""

LEFT = "left"
"""Stands for the call of a rank that has left the block."""

_TORCH = f"{Path(torch.__file__).parent}/"
_ONECOPY = f"{Path(__file__).parents[1]}/"
_WAITING = (
    *(f"{_ONECOPY}{name}" for name in ("comm/", "data_parallel/", "ddp_hooks/", "state_dict/", "step/")),
    *(
        f"{_TORCH}{name}"
        for name in (
            "distributed/distributed_c10d.py",
            "distributed/utils.py",  # DDP's constructor
            "autograd/graph.py",
            "nn/parallel/distributed.py",
        )
    ),
)
"""The files in which the innermost Python frame of a thread is that waits for other ranks."""

_ASKING = f"{_ONECOPY}state_dict/serving.py"
"""The file of a thread that waits for a background service, which answers or is noticed to be gone."""

_DECORATORS = {"wrapper", "inner", "decorate_context", "_wrapped_call_impl", "_call_impl", "_fn"}
"""The names of functions of torch around other functions."""


class BlockedRanks:
    """Tells the other ranks in the store where this rank is blocked, and reads whether all of them are.

    Args:
        prefix: the prefix of the keys in the store, equal on all ranks.
        global_rank: this rank.
        world_size: the number of ranks.
        seconds: after how long in one call a rank counts as blocked.
        thread: the thread of the training loop.
    """

    def __init__(self, prefix: str, global_rank: int, world_size: int, seconds: float, thread: int) -> None:
        self._prefix = prefix
        self._global_rank = global_rank
        self._world_size = world_size
        self._seconds = seconds
        self._thread = thread
        self._position: tuple[int, int] | None = None
        self._since = self._processor_time = 0.0
        self._sent = 0
        self._has_told = False
        self._seen: list[bytes] = []

    def leave(self, store: Store) -> None:
        """Tell the other ranks that this one makes no further calls."""
        store.set(self._key(self._global_rank), json.dumps([LEFT, "", 0]))

    def first_that_left(self, store: Store) -> int | None:
        """The first rank that has left the block."""
        for global_rank in range(self._world_size):
            key = self._key(global_rank)
            if store.check([key]) and json.loads(store.get(key))[0] == LEFT:
                return global_rank
        return None

    def check(self, store: Store) -> str | None:
        """Look at the thread of the loop. Return where each rank is blocked, if none of them can go on."""
        frame = sys._current_frames().get(self._thread)
        position = None if frame is None or not _is_waiting(frame) else (id(frame), frame.f_lasti)
        now, processor_time, sent = time.monotonic(), time.process_time(), bytes_written()
        computes = processor_time - self._processor_time > BUSY_SHARE * (now - self._since) + 0.1
        if position is None or position != self._position or computes or sent - self._sent > BYTES_SENT:
            self._position, self._since, self._processor_time, self._sent = position, now, processor_time, sent
            if self._has_told:
                store.delete_key(self._key(self._global_rank))
                self._has_told = False
            self._seen = []
            return None
        if now - self._since < self._seconds:
            return None
        if not self._has_told:
            assert frame is not None
            call, place = where(frame)
            store.set(self._key(self._global_rank), json.dumps([call, place, self._since]))
            self._has_told = True
        return self._read(store)

    def _read(self, store: Store) -> str | None:
        """Where each rank is blocked, if all of them are, in different calls, and have been at the last look too."""
        keys = [self._key(global_rank) for global_rank in range(self._world_size)]
        if not store.check(keys):
            self._seen = []
            return None
        values = [store.get(key) for key in keys]
        was_seen, self._seen = values == self._seen, values
        places = [json.loads(value) for value in values]
        if not was_seen or len({call for call, _, _ in places}) == 1:
            return None
        return "; ".join(
            f"rank {global_rank}: " + ("has left the training loop" if call == LEFT else f"{call} at {place}")
            for global_rank, (call, place, _) in enumerate(places)
        )

    def _key(self, global_rank: int) -> str:
        return f"{self._prefix}/blocked/{global_rank}"


def where(frame: FrameType) -> tuple[str, str]:
    """The call of torch or of this library in which a thread is, and the line of the program that makes it."""
    call, constructed = frame.f_code.co_name, ""
    outer = frame
    while outer.f_back is not None and _is_library(outer):
        name = outer.f_code.co_name
        if name == "__init__":
            name = type(outer.f_locals.get("self")).__name__
            constructed = name if outer.f_code.co_filename.startswith(_ONECOPY) else constructed
        call = call if name in _DECORATORS else name
        outer = outer.f_back
    # A hook of DDP is constructed in the first backward pass. On a rank without it, the pass is only that of DDP.
    call = f"{constructed}() in {call}" if constructed not in ("", call) else call
    return f"{call}()", line_of(outer.f_code.co_filename, outer.f_lineno, outer.f_code.co_name)


def line_of(path: str, number: int, function: str) -> str:
    """A line of a program as text."""
    return f"{Path(path).name}:{number} in {function}"


def _is_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((_TORCH, _ONECOPY, "<"))


def _is_waiting(frame: FrameType) -> bool:
    if not frame.f_code.co_filename.startswith(_WAITING):
        return False
    outer: FrameType | None = frame
    while outer is not None and _is_library(outer):
        if outer.f_code.co_filename == _ASKING:
            return False
        outer = outer.f_back
    return True


def bytes_written() -> int:
    """The bytes that this process has written to files and connections; 0 outside Linux."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(lines[1].partition(":")[2])
