"""A failure on one rank inside the calls of ``onecopy.checkpoint``: all ranks raise soon, or all go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions

from onecopy import CheckpointError, PeerFailedError, checkpoint
from onecopy.checkpoint.optimizer_view import OptimizerView
from onecopy.common import tagged_json
from tests.support.dcp import full_state, make, train
from tests.support.failures import expect, expect_failure_of, expect_no_memory, failing, failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_same_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:UserWarning")


@distributed(2, 3)
@pytest.mark.parametrize("calls", [0, 3])
def test_a_rank_without_memory_for_what_the_first_one_sends(world_size: int, calls: int) -> None:
    model, zero = make("element")
    train(model, zero, range(2))
    before = full_state(model, zero)
    train(model, zero, range(2, 3))
    now = full_state(model, zero)
    given = before if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with failing(tagged_json, "empty_from", world_size - 1, calls):
        expect_no_memory(
            world_size - 1, lambda: checkpoint.set_optimizer_state_dict(model, zero, given, options=options)
        )
    assert_same_tree(full_state(model, zero), now, "nothing has changed")
    checkpoint.set_optimizer_state_dict(model, zero, given, options=options)
    assert_same_tree(full_state(model, zero), before, "loaded")


@distributed(2, 3)
def test_state_of_one_rank_that_is_no_dict(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(2))
    state: dict[str, Any] = full_state(model, zero)
    now = full_state(model, zero)
    if dist.get_rank() == 0:
        state["state"][next(iter(state["state"]))] = 3
    expect_failure_of([0], lambda: checkpoint.set_optimizer_state_dict(model, zero, state), TypeError, "int")
    assert_same_tree(full_state(model, zero), now, "nothing has changed")


@distributed(2, 3)
def test_an_optimizer_whose_state_one_rank_could_not_install_refuses_to_step(world_size: int) -> None:
    model, zero = make("element")
    train(model, zero, range(2))
    state = checkpoint.get_optimizer_state_dict(model, zero, options=StateDictOptions(cpu_offload=True))
    with failing(OptimizerView, "install", 0):
        expect_no_memory(0, lambda: checkpoint.set_optimizer_state_dict(model, zero, state))
    expected = CheckpointError if dist.get_rank() == 0 else PeerFailedError
    expect(failure_of(lambda: train(model, zero, range(2, 3))), expected, "has failed half way")
    checkpoint.set_optimizer_state_dict(model, zero, state)
    train(model, zero, range(2, 3))


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
