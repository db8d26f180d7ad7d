"""Starts the ranks of a training on this machine with torchrun's own agent."""

from __future__ import annotations

import os
import sys
import uuid

from onecopy.bench.bf16_probe import ending
from onecopy.demo.settings import Settings

STOPPED = 130
"""The exit code of a command that was stopped by Ctrl-C, as shells have it."""


class StoppedError(Exception):
    """The training was stopped by a signal, and has saved a checkpoint."""


class RankFailedError(RuntimeError):
    """A rank has failed. The message is empty if the rank has printed its own error."""


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(settings: Settings, ranks: int) -> None:
    """Train on this machine with a number of processes, and wait for their end.

    Raises:
        StoppedError: if a signal has stopped the training.
        RankFailedError: if a rank has failed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
    from torch.distributed.elastic.agent.server import api as agent
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing import api as processes
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for module in (agent, processes):
        module.logger.setLevel("CRITICAL")  # signals and failures are reported here
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "onecopy.demo.worker", settings.to_json())
    except SignalException as error:
        raise StoppedError from error
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        # A rank that exits by itself has printed its error.
        message = f"rank {number} {ending(failure.exitcode)}" if failure.exitcode < 0 else ""
        raise RankFailedError(message) from error
