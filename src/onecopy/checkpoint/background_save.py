"""Saves in the background: one thread, one save at a time."""

from __future__ import annotations

import logging
import threading

from torch import Tensor

from onecopy.checkpoint.saving import CALL, SaveJob

logger = logging.getLogger(__name__)


class BackgroundSave:
    """Runs at most one save in a thread and keeps its failure until the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._buffers: dict[str, Tensor] = {}  # reused by the next save: fresh pages cost more than the copy

    def start(self, job: SaveJob) -> None:
        """Copy the tensors of a save on all ranks, then write them in a thread. No other save may be running."""
        assert self._thread is None
        with job.ranks.fail_together(CALL):
            job.plan.snapshot(self._buffers)

        def run() -> None:
            try:
                job.run()
            except Exception as error:
                logger.warning("saving in the background failed: %s", error)
                self._failure = error

        thread = threading.Thread(target=run, name="onecopy checkpoint")
        try:
            thread.start()
        except RuntimeError as error:
            # The operating system refuses another thread. The other ranks have begun to save and wait for this rank.
            logger.warning("no thread can be started (%s): the checkpoint is saved before training goes on", error)
            run()
            return
        self._thread = thread

    def finish(self) -> None:
        """Wait for the running save, and raise its exception if it failed."""
        if self._thread is not None:
            self._thread.join()
        self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
