"""Errors of checkpoints: every rank raises soon and names the cause and its place, and nothing has changed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer, hook_with_zero_step
from onecopy.checkpoint import latest, load, save, storage, verify, wait
from onecopy.checkpoint.loading import Copy
from onecopy.errors import CheckpointError, CorruptCheckpointError, OnecopyError
from tests.support.checkpoints import Side, contents_of, load_side, make, model_of, push, save_side, train
from tests.support.harness import distributed, pools
from tests.support.logs import logged
from tests.support.models import assert_equal, assert_same_tree, small_ddp, small_loss, values

SOON = 10.0
"""Seconds within which all ranks must have raised; a rank that waits for another in vain takes 30."""


def refused(call: Callable[[], object], *texts: object) -> str:
    """All ranks raise soon, with these texts; returns the message."""
    begun = time.monotonic()
    with pytest.raises((OnecopyError, ValueError, TypeError, OSError)) as caught:
        call()
    assert time.monotonic() - begun < SOON
    for text in texts:
        assert str(text) in str(caught.value), f"{text} is not in: {caught.value}"
    return str(caught.value)


def refused_unchanged(call: Callable[[], object], side: Side, *texts: object) -> None:
    """All ranks raise, are unchanged, and can train on."""
    before = contents_of(side)
    refused(call, *texts)
    assert_same_tree(contents_of(side), before, "after the error")
    push(side, [7])


def saved(root: Path, step: int = 1, kind: str = "element") -> tuple[Side, Path]:
    side = make(kind)
    push(side, range(2))
    return side, save_side(root, step, side)


def everyone_then(change: Callable[[], object]) -> None:
    """Change files on rank 0 while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


# What does not fit


def loads_into(path: Path, side: Side) -> Callable[[], object]:
    return lambda: load_side(path, side)


@distributed(2, 3)
def test_other_models_and_optimizers_are_refused_and_named(world_size: int, tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    for kind in ("plain", "element"):
        side = make(kind, 9, wrap=False)
        side.module.extra = nn.Linear(2, 2)
        refused_unchanged(loads_into(path, side), side, "extra.weight", "extra.bias", "strict=False")
        side = make(kind, 9, wrap=False)
        del side.module.frozen
        refused_unchanged(lambda side=side: load(path, model=side.module), side, "frozen.weight")  # type: ignore[misc]
        side = make(kind, 9, wrap=False)
        side.module.norm = nn.BatchNorm2d(9)
        refused_unchanged(lambda side=side: load(path, model=side.module), side, "norm.weight", "(8,)", "(9,)")  # type: ignore[misc]
        side = make(kind, 9, wrap=False)
        side.module.norm.double()
        refused(lambda side=side: load(path, model=side.module), "norm.weight", "float32", "float64")  # type: ignore[misc]
    other, params = make("plain", 9, wrap=False), list(make("plain", 9, wrap=False).module.parameters())
    refused(lambda: load(path, model=other.module, optimizer=SGD(other.module.parameters())), "SGD", "AdamW")
    grouped = AdamW(other.module.parameters())
    refused(lambda: load(path, model=other.module, optimizer=grouped), "grouped otherwise", "body.bias")
    refused(lambda: load(path, model=other.module, optimizer=[*other.optimizers, grouped]), "1 optimizers", "2 were")
    refused(lambda: load(path, optimizer=other.optimizers), "pass model=")
    refused(lambda: load(path, model=other.module, optimizer=AdamW(params)), "not a parameter of the model")
    refused(lambda: save(tmp_path, 2, model=other.module, optimizer=AdamW(params)), "not a parameter of the model")
    fewer = AdamW([{"params": [other.module.body.weight]}])
    refused(lambda: load(path, model=other.module, optimizer=fewer), "other parameters", "conv.weight")
    assert latest(tmp_path) == path


@distributed(2)
def test_a_part_can_be_loaded(world_size: int, tmp_path: Path) -> None:
    side, path = saved(tmp_path)
    other = make("plain", 9, wrap=False)
    del other.module.frozen
    other.module.more = nn.Linear(2, 2)
    loaded = load(path, model=other.module, strict=False)
    assert loaded.missing == ["more.weight", "more.bias"]
    assert loaded.unexpected == ["frozen.weight", "frozen.bias"]
    assert torch.equal(other.module.embedding.weight, side.module.embedding.weight)
    assert not other.optimizers[0].state
    only = make("element", 9)
    save(tmp_path, 2, optimizer=side.optimizers)
    before = model_of(only)
    load(tmp_path, optimizer=only.optimizers)
    assert_same_tree(model_of(only), before, "model")
    assert_same_tree(contents_of(only)[1], contents_of(side)[1], "state")
    refused(lambda: load(tmp_path, model=only.module), "without a model")


@distributed(2)
def test_bad_arguments_are_refused_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    side, path = saved(tmp_path)
    rank = dist.get_rank()
    refused_unchanged(lambda: save_side(tmp_path, 1, side), side, path, "exists already")
    for step in (-1, True, 1.5, "x"):
        refused(lambda step=step: save_side(tmp_path, step, side), "step must be", repr(step))  # type: ignore[misc]
    for keep in (0, -1, 2.5):
        refused(lambda keep=keep: save_side(tmp_path, 2, side, keep=keep), "keep must be", repr(keep))  # type: ignore[misc]
    refused(lambda: save_side(tmp_path, 2 + rank, side), "rank 0: step: 2", "rank 1: step: 3")
    refused(lambda: save_side(tmp_path, 2 if rank else -1, side), "step must be")
    bad = {"a": [object() if rank == 1 else 1]}
    refused_unchanged(lambda: save_side(tmp_path, 2, side, extra=bad), side, "extra['a'][0]", "builtins.object")
    refused(lambda: save(tmp_path, 2, optimizer="Adam"), "optimizer must be")  # type: ignore[arg-type]
    refused(lambda: load_side(tmp_path / "nothing", side), tmp_path / "nothing")
    refused(lambda: load_side(tmp_path / "step-00000009", side), "step-00000009", "missing")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


# What is damaged


def reseal(path: Path, old: bytes, new: bytes) -> None:
    """Change a manifest and give it a checksum that fits."""
    text = path.read_bytes()
    assert old in text
    blank = re.sub(rb'^\{"crc32":"[0-9a-f]{8}"', b'{"crc32":"00000000"', text.replace(old, new, 1))
    path.write_bytes(blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1))


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_suffix(".away"))
    other.rename(one)
    one.with_suffix(".away").rename(other)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "newer": (
        lambda path: reseal(path / "manifest.json", b'"version":1', b'"version":2'),
        "manifest.json",
    ),
    "truncated": (lambda path: os.truncate(path / "rank-00001.safetensors", 999), "rank-00001.safetensors"),
    "missing": (lambda path: (path / "rank-00000.safetensors").unlink(), "rank-00000.safetensors"),
    "swapped": (lambda path: swap(path / "rank-00000.safetensors", path / "rank-00001.safetensors"), "rank-0000"),
    "cut manifest": (lambda path: os.truncate(path / "manifest.json", 300), "manifest.json"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json"),
    "uncovered": (lambda path: reseal(path / "manifest.json", b'"start":0', b'"start":64'), "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@distributed(2)
def test_damaged_checkpoints_are_refused_and_the_file_is_named(world_size: int, damage: str, tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    change, name = DAMAGES[damage]
    everyone_then(lambda: change(path))
    for kind in ("plain", "parameter"):
        side = make(kind, 9)
        push(side, [5])
        refused_unchanged(loads_into(path, side), side, name, path)
    expected = CheckpointError if damage == "newer" else CorruptCheckpointError
    with pytest.raises(expected, match=name):
        verify(path)


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


def flips(path: Path, count: int, seed: int) -> Iterator[tuple[Path, int, int]]:
    """Bits all over a checkpoint: the same number in each of its files."""
    generator = random.Random(seed)
    files = sorted(path.iterdir())
    for file, _ in zip(itertools.cycle(files), range(count), strict=False):
        yield file, generator.randrange(file.stat().st_size), generator.randrange(8)


def save_plainly(root: Path) -> None:
    saved(root)


def test_every_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    pools.run(2, __name__, "save_plainly", {"root": tmp_path})
    path = tmp_path / "step-00000001"
    assert verify(tmp_path) == sum(file.stat().st_size for file in path.iterdir())
    for file, position, bit in flips(path, 1000, seed=1):
        flip(file, position, bit)
        with pytest.raises(CorruptCheckpointError, match=file.name):
            verify(path)
        flip(file, position, bit)
    verify(path)


@distributed(2)
def test_the_newest_that_is_not_damaged_is_loaded(world_size: int, tmp_path: Path) -> None:
    side, first = saved(tmp_path, 1)
    before = model_of(side)
    push(side, [2])
    second = save_side(tmp_path, 2, side)
    everyone_then(lambda: flip(second / "rank-00001.safetensors", 3000, 1))
    other = make("element", 9)
    refused_unchanged(loads_into(second, other), other, "rank-00001.safetensors")
    with logged(logging.WARNING) as lines:
        loaded = load_side(tmp_path, other)
    assert (loaded.step, loaded.path) == (1, first)
    assert_same_tree(model_of(other), before, "model")
    assert len(lines) == 1
    assert "rank-00001.safetensors is damaged" in lines[0]


@pytest.mark.parametrize("kind", ["plain", "element", "overlapped"])
@distributed(2)
def test_a_read_that_fails_half_way_stops_the_optimizer(world_size: int, kind: str, tmp_path: Path) -> None:
    source, path = saved(tmp_path)
    side, calls, read = make(kind, 9), itertools.count(1), storage.read_into
    fails_at = 0

    def failing(*args: Any) -> int:
        if next(calls) == fails_at:
            raise OSError(5, "Input/output error")
        return read(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "read_into", failing)
        load_side(path, side)
        total, calls = next(calls) - 1, itertools.count(1)
        fails_at = total - 3 if dist.get_rank() == 1 else 0
        refused(loads_into(path, side), "rank 1", path, "Input/output error", "refuse to step")
    for optimizer in side.optimizers:
        refused(optimizer.step, path, "load a checkpoint before the next step")
    load_side(path, side)
    assert_same_tree(model_of(side), model_of(source), "model")
    for optimizer in side.optimizers:
        optimizer.step()


@distributed(2)
def test_a_read_that_fails_half_way_stops_updates_in_the_backward_pass(world_size: int, tmp_path: Path) -> None:
    ddp = small_ddp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    for step in range(4):
        small_loss(ddp, step).backward()
        optimizer.step()
        ddp.zero_grad()
    path = save(tmp_path, 4, model=ddp, optimizer=optimizer)

    def failing(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Copy, "run", failing)
        refused(lambda: load(path, model=ddp, optimizer=optimizer), path, "Input/output error")
    before = values(ddp.parameters())
    with contextlib.suppress(Exception):
        small_loss(ddp, 5).backward()
    assert_equal(values(ddp.parameters()), before, "updated in the backward pass")


# What remains on the disk


def fingerprint(path: Path) -> list[Any]:
    found = [(file.name, file.stat().st_mtime_ns, file.read_bytes()) for file in sorted(path.iterdir())]
    return [path.stat().st_mtime_ns, *found]


@distributed(2)
def test_older_checkpoints_go_after_the_new_one_is_there(world_size: int, tmp_path: Path) -> None:
    side, path = saved(tmp_path)
    save_side(tmp_path, 2, side)
    before = fingerprint(path)
    save_side(tmp_path, 3, side, keep=3)
    load_side(tmp_path, side)
    assert fingerprint(path) == before
    dist.barrier()
    newest = save_side(tmp_path, 4, side, keep=2)
    dist.barrier()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert latest(tmp_path) == newest


# In the background


@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2)
def test_a_save_in_the_background_holds_the_values_at_its_call(world_size: int, kind: str, tmp_path: Path) -> None:
    side, flush = make(kind), storage.flush
    train(side, range(2))
    before, go_on = contents_of(side), threading.Event()

    def slow(descriptor: int) -> None:
        assert go_on.wait(SOON)
        flush(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "flush", slow)
        path = save_side(tmp_path, 2, side, blocking=False)
        train(side, [2, 3])
        assert not path.exists()
        go_on.set()
        wait()
    assert latest(tmp_path) == path
    other = make(kind, 9)
    load_side(path, other)
    if dist.get_rank() == 0:
        assert_same_tree(contents_of(other), before, "saved")
    train(other, [2, 3])
    assert_same_tree(model_of(other), model_of(side), "continued")


@pytest.mark.parametrize("next_call", ["wait", "save", "load"])
@distributed(2)
def test_a_failure_in_the_background_is_raised_by_the_next_call(
    world_size: int, next_call: str, tmp_path: Path
) -> None:
    side, path = saved(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(storage, "flush", full)
        save_side(tmp_path, 2, side, blocking=False)
        calls: dict[str, Callable[[], object]] = {
            "wait": wait,
            "save": lambda: save_side(tmp_path, 3, side),
            "load": lambda: load_side(tmp_path, side),
        }
        refused_unchanged(calls[next_call], side, "No space left", "rank-00001.safetensors")
    wait()
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert save_side(tmp_path, 3, side).exists()
