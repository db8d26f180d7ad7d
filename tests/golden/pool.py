"""Processes that run programs and mistakes, started once and again after a failure."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from typing import Any

LIMIT = 45.0
LOST = ("none", "no answer", "process ended")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.golden.mistakes"])


def serve(pipe: Any, rank: int, world_size: int, store: str) -> None:
    """In a worker: run what comes through the pipe."""
    import torch
    import torch.distributed as dist

    from tests.golden import mistakes, running

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    limit = timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=limit)
    running.count_collectives()
    while True:
        try:
            kind, given, folder, part = pipe.recv()
        except EOFError:
            os._exit(0)
        if kind == "meet":
            dist.barrier()
            pipe.send({})
            continue
        try:
            pipe.send(running.train(given, folder, part) if kind == "train" else mistakes.made(given, folder))
        except Exception as error:
            pipe.send({"errors": type(error).__name__, "text": traceback.format_exc()})


class Pool:
    """Processes with one group among them; after a failure they are replaced."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.start()

    def start(self) -> None:
        """Start the processes."""
        store, self.pipes, self.processes = tempfile.mktemp(), [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, self.world_size, store)
            self.processes.append(context.Process(target=serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def run(self, *task: Any) -> list[dict[str, Any]]:
        """What every rank returns for one task."""
        answers = self.ask(task, LIMIT)
        if any(answer.get("errors", "none") != "none" for answer in answers):
            all_raised = task[0] == "mistake" and all(answer["errors"] not in LOST for answer in answers)
            if not all_raised or any("errors" in answer for answer in self.ask(("meet", "", "", ""), 5.0)):
                self.close()
                self.start()
        return answers

    def ask(self, task: tuple[Any, ...], limit: float) -> list[dict[str, Any]]:
        """Send a task to all ranks and wait for the answers."""
        for pipe in self.pipes:
            pipe.send(task)
        end, answers = time.monotonic() + limit, []
        for pipe in self.pipes:
            waiting = not pipe.poll(max(0.0, end - time.monotonic()))
            answers.append({"errors": "no answer"} if waiting else received(pipe))
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()


def received(pipe: Any) -> dict[str, Any]:
    """What a rank has sent, if its process lives."""
    try:
        answer: dict[str, Any] = pipe.recv()
    except (EOFError, ConnectionError):
        return {"errors": "process ended"}
    return answer
