"""Saving in the background: one thread, one save at a time, on a group that training does not use."""

from __future__ import annotations

import threading

from torch import Tensor

from onecopy.checkpoint.saving import Job


class Background:
    """The save that is under way, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._memory: dict[str, Tensor] = {}  # kept for the next save: fresh pages cost more than the copy

    def start(self, job: Job) -> None:
        """Copy what a save writes, and run it; the one before it has ended."""
        assert self._thread is None
        failure: Exception | None = None
        try:
            job.contents.snapshot(self._memory)
        except Exception as error:
            failure = error
        job.ranks.agree("saving a checkpoint", [], failure)

        def run() -> None:
            try:
                job.run()
            except Exception as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="onecopy checkpoint")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save under way; raise what went wrong in it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
