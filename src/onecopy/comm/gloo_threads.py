"""At the end of a process, waits until the worker threads of gloo have nothing left to do.

A worker thread that has run a collective wakes the threads that wait for it, and only then frees the collective. For
that it takes the lock of the interpreter (the GIL), because tensors, contexts and callbacks of Python belong to it. If
the interpreter begins to end before the thread has got the lock, Python ends the thread inside a C++ destructor, and
the process aborts: "terminate called without an active exception". This is rare, and concerns plain DDP as well.

``destroy_process_group()`` ends these threads only if nothing refers to the group any more. Models and optimizers do.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

WORKER_NAME = "pt_gloo_runloop"
"""The name that torch gives to the worker threads."""

LOOK_EVERY = 0.01
"""Seconds between two looks: a thread that waits for the lock wakes after ``sys.getswitchinterval()``, 5 ms."""

LONGEST_WAIT = 5.0
"""Seconds after which the process ends anyway."""

_ACTIVITY = re.compile(r"^(?:State|\w*ctxt_switches):.*$", re.MULTILINE)


def wait_for_idle_workers() -> None:
    """Wait until no worker thread has run, or wanted to, between two looks; a thread in an unfinished call is idle."""
    limit = time.monotonic() + LONGEST_WAIT
    before = worker_activity()
    while before and time.monotonic() < limit:
        time.sleep(LOOK_EVERY)  # the lock is free meanwhile
        now = worker_activity()
        if now == before and all("State:\tS" in activity for activity in now.values()):
            return
        before = now


def worker_activity() -> dict[int, str]:
    """For each worker thread, by its number: whether it sleeps, and how often it has run. Empty outside Linux."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            if (thread / "comm").read_text().strip() == WORKER_NAME:
                found[int(thread.name)] = "\n".join(_ACTIVITY.findall((thread / "status").read_text()))
    return found
