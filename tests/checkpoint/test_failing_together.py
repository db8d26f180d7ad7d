"""A failure on one rank inside the calls of ``onecopy.checkpoint``: all ranks raise soon, or all go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from onecopy import RanksDisagreeError, checkpoint
from tests.support.dcp import full_state, make, train
from tests.support.failures import expect_failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_same_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")


class RefusesToLoad(torch.optim.AdamW):
    """Raises after it has loaded, when told to."""

    broken = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if RefusesToLoad.broken:
            raise KeyError("no such state here")


@distributed(2, 3)
@pytest.mark.parametrize("way", ["element", "wrapped"])
def test_shards_that_one_rank_could_not_load_change_nothing_on_any(world_size: int, way: str) -> None:
    model, zero = make(way, optimizer=RefusesToLoad, elementwise=True)
    train(model, zero, range(2))
    before = full_state(model, zero)
    saved = checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(cpu_offload=True))
    train(model, zero, range(2, 3))
    now = full_state(model, zero)
    zero.param_groups[0]["lr"] = 0.5
    RefusesToLoad.broken = dist.get_rank() == 0
    try:
        expect_failure_of([0], lambda: checkpoint.set_optimizer_state_dict(model, zero, saved), KeyError, "no such")
    finally:
        RefusesToLoad.broken = False
    assert zero.param_groups[0]["lr"] == 0.5
    zero.param_groups[0]["lr"] = now["param_groups"][0]["lr"]
    assert_same_tree(full_state(model, zero), now, "nothing has changed")
    train(model, zero, range(3, 4))
    checkpoint.set_optimizer_state_dict(model, zero, saved)
    assert_same_tree(full_state(model, zero), before, "loaded")
    train(model, zero, range(4, 5))


def save_without_a_thread(folder: str) -> int:
    model, zero = make("element")
    train(model, zero, range(2))
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if dist.get_rank() == 1 and thread.name == "onecopy checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        checkpoint.save(folder, 3, model=model, optimizer=zero, blocking=False)
    checkpoint.wait()
    train(model, zero, range(2, 3))
    found = checkpoint.load(folder, model=model, optimizer=zero)
    return found.step


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_save_in_the_background_where_one_rank_can_start_no_thread(tmp_path: Path, world_size: int) -> None:
    assert pools.run(world_size, __name__, "save_without_a_thread", {"folder": str(tmp_path)}) == [3] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("call", ["step", "consolidate_state_dict"])
def test_a_save_while_another_rank_is_in_another_call(tmp_path: Path, call: str, world_size: int) -> None:
    pools.run(world_size, __name__, "save_on_rank_0", {"root": str(tmp_path), "call": call})


def save_on_rank_0(root: str, call: str) -> None:
    """Save on all ranks, which makes the group of saves, and then on rank 0 alone."""
    model, zero = make("element")
    train(model, zero, range(2))
    checkpoint.save(root, 1, model=model, optimizer=zero)
    is_saving, world_size = dist.get_rank() == 0, dist.get_world_size()
    expect_failure_of(
        range(world_size),
        lambda: checkpoint.save(root, 2, model=model, optimizer=zero) if is_saving else getattr(zero, call)(),
        RanksDisagreeError,
        "; ".join(["rank 0: saving a checkpoint", *(f"rank {rank}: {call}.." for rank in range(1, world_size))]),
    )
    assert dist.get_rank() or [path.name for path in Path(root).iterdir() if path.is_dir()] == ["step-00000001"]
