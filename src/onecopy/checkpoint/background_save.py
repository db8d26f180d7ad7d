"""Saving in the background: one thread, one save at a time, on a group that training does not use."""

from __future__ import annotations

import logging
import threading

from torch import Tensor

from onecopy.checkpoint.saving import SaveJob

logger = logging.getLogger(__name__)


class Background:
    """The save that is under way, if there is one."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._memory: dict[str, Tensor] = {}  # kept for the next save: fresh pages cost more than the copy

    def start(self, job: SaveJob) -> None:
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
                logger.warning("saving in the background failed: %s", error)
                self._failure = error

        thread = threading.Thread(target=run, name="onecopy checkpoint")
        thread.start()
        self._thread = thread

    def finish(self) -> None:
        """Wait for the save under way; raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
