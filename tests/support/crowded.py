"""Processes that save to and load from one directory at the same time, disks that fail, and damaged files."""

from __future__ import annotations

import contextlib
import errno
import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from onecopy.checkpoint import load, save, storage, verify
from onecopy.errors import CheckpointError, CorruptCheckpointError
from tests.support.hostile import Pair, Seen


def _write(root: Path, first: int, stride: int, count: int, keep: int, ended: Event, results: Any) -> None:
    """Save again and again; stop after this many saves, or when the readers have ended."""
    torch.set_num_threads(1)
    problems, saves = list[str](), 0
    while saves < count and not ended.is_set():
        step = first + stride * saves
        try:
            save(root, step, extra={"step": step, "data": torch.full((500,), float(step))}, keep=keep)
        except Exception as error:
            problems.append(f"saving step {step}: {type(error).__name__}: {error}")
        saves += 1
    results.put((saves, problems))


@contextlib.contextmanager
def _writers(seen: Seen, *settings: tuple[Path, int, int, int, int]) -> Iterator[Event]:
    """Processes that write during the block; the number of their saves and their problems are added to ``seen``."""
    context = multiprocessing.get_context("spawn")
    ended, results = context.Event(), context.Queue()
    writers = [context.Process(target=_write, args=(*each, ended, results), daemon=True) for each in settings]
    for writer in writers:
        writer.start()
    try:
        yield ended
    finally:
        for _ in writers:
            saves, problems = results.get(timeout=600)
            seen.loaded += saves
            seen.problems += problems
        for writer in writers:
            writer.join()


def loads_beside_a_writer(root: Path, count: int) -> Seen:
    """Load this many times while another process saves with ``keep=1``."""
    save(root, 0, extra={"step": 0, "data": torch.zeros(500)})
    seen = Seen()
    with _writers(seen, (root, 1, 1, 1 << 40, 1)) as ended:
        deadline = time.monotonic() + 60
        while (root / "step-00000000").exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # the first save of the writer removes it
        for _ in range(count):
            begun = time.monotonic()
            try:
                loaded = load(root)
                right = torch.equal(loaded.extra["data"], torch.full((500,), float(loaded.step)))
                if not right or loaded.extra["step"] != loaded.step:
                    seen.problems.append(f"step {loaded.step} has other values")
            except Exception as error:
                seen.problems.append(f"{type(error).__name__}: {error}")
            seen.slowest = max(seen.slowest, time.monotonic() - begun)
        ended.set()  # nothing above can raise
    if seen.loaded < 2:
        seen.problems.append(f"the writer saved {seen.loaded} times only")
    seen.tried = count
    return seen


def saves_of_two_writers(root: Path, count: int) -> Seen:
    """Save this many times in each of two processes, odd and even steps, with ``keep=2``."""
    seen, begun = Seen(), time.monotonic()
    with _writers(seen, *((root, first, 2, count // 2, 2) for first in (0, 1))):
        pass
    seen.tried = seen.loaded
    seen.slowest = (time.monotonic() - begun) / max(1, count // 2)
    verify(root)
    left = [name for name in os.listdir(root) if name.startswith(".")]
    if left:
        seen.problems.append(f"leftovers: {left}")
    return seen


def _failing_load(root: Path, name: str, number: int) -> tuple[Pair, Any]:
    """Load while the call of a function of ``storage`` with this number fails; return what came of it."""
    real, calls, pair = getattr(storage, name), itertools.count(), Pair(1)

    def replacement(*arguments: Any) -> Any:
        if next(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    with patch.object(storage, name, replacement):
        try:
            return pair, pair.load(root)
        except Exception as error:
            return pair, error


def disk_faults_of_loads(root: Path) -> Seen:
    """Fail once at every file operation of a load of the newer of two checkpoints.

    Before anything is loaded, the older one must be taken. After that, the optimizer must refuse to step.
    """
    pair, seen = Pair(), Seen()
    pair.step()
    for step in (1, 2):
        pair.save(root, step)
    for name in ("size_of", "open_descriptor", "read_into"):
        for number in itertools.count():
            begun = time.monotonic()
            other, found = _failing_load(root, name, number)
            seen.slowest = max(seen.slowest, time.monotonic() - begun)
            if getattr(found, "step", 0) == 2:
                break  # the load has fewer operations
            seen.tried += 1
            if getattr(found, "step", 0) == 1:
                seen.loaded += 1
            elif isinstance(found, CheckpointError) and _refuses(other):
                seen.refused += 1
            else:
                seen.problems.append(f"{name} {number}: {found!r}")
    return seen


def _refuses(pair: Pair) -> bool:
    """Whether the optimizer refuses to step."""
    try:
        pair.step()
    except CheckpointError:
        return True
    return False


def random_corruption(folder: Path, count: int, seed: int) -> Seen:
    """Change, cut or lengthen a random file of a checkpoint this many times; every load must be refused."""
    generator, seen = random.Random(seed), Seen()
    files = sorted(folder.iterdir())
    for number in range(count):
        path = generator.choice(files)
        before = path.read_bytes()
        content, kind = bytearray(before), generator.randrange(5)
        place = generator.randrange(len(content))
        if kind == 0:
            del content[place:]
        elif kind == 1:
            content += os.urandom(generator.randrange(1, 64))
        elif kind == 2:
            length = min(generator.choice((1, 8, 40, 4096)), len(content) - place)
            content[place : place + length] = generator.randbytes(length)
        else:
            content[place] ^= 1 << generator.randrange(8)
        if content == before:
            continue
        path.write_bytes(content)
        pair = Pair(1)
        seen.tried += 1
        begun = time.monotonic()
        try:
            pair.load(folder)
            seen.problems.append(f"number {number} of seed {seed} was accepted: {path.name}, kind {kind}")
        except CorruptCheckpointError:
            seen.refused += 1
        except Exception as error:
            seen.problems.append(f"number {number} of seed {seed}: {error!r}")
        finally:
            path.write_bytes(before)
        seen.slowest = max(seen.slowest, time.monotonic() - begun)
    return seen
