"""``state_dict()`` on one rank, several or all, without a call on the others."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.background_service import BackgroundService
from onecopy.errors import PeerFailedError, RanksDisagreeError
from onecopy.state_dict import serving
from onecopy.state_dict.gather import FullState
from tests.support.harness import EVERYTHING, distributed
from tests.support.serving import KINDS, Served, counted_requests
from tests.support.state_dicts import Pair, expect_same


@pytest.mark.parametrize("kind", KINDS)
@distributed(2, 4)
def test_one_rank_alone(world_size: int, kind: str) -> None:
    training = Served(kind)
    for asker in (0, world_size - 1) * 2:
        training.accumulate()
        # The other ranks are in their next pass, and wait there for this one.
        if dist.get_rank() == asker:
            training.expect_plain(training.zero.state_dict())
        training.step()
        if dist.get_rank() == asker:
            training.expect_plain(training.zero.state_dict())
    dist.barrier()


@distributed(1, 3)
def test_all_ranks_at_once(world_size: int) -> None:
    training = Served("element")
    training.step()
    for _ in range(3):
        training.expect_plain(training.zero.state_dict())
        training.step()
    dist.barrier()


@distributed(3)
def test_ranks_that_do_not_read_the_state_cost_nothing(world_size: int) -> None:
    training = Served("parameter")
    training.step()
    with counted_requests() as counts:
        dist.barrier()  # all ranks count
        state_dict = training.zero.state_dict()
        assert state_dict["param_groups"] == training.plain.state_dict()["param_groups"]
        dist.barrier()
        assert counts[0] == (0 if dist.get_rank() == 0 else 1)
        dist.barrier()


@distributed(2)
def test_a_closure_that_waits_for_other_ranks_does_not_hide_the_state(world_size: int) -> None:
    training = Served("element")
    training.step()
    if dist.get_rank() == 0:
        time.sleep(0.3)
        training.expect_plain(training.zero.state_dict())

    def closure() -> float:
        training._pass()
        return 0.0

    training.zero.step(closure)
    training.plain.step()
    if dist.get_rank() == 1:
        training.expect_plain(training.zero.state_dict())
    dist.barrier()


@distributed(2)
def test_a_state_that_is_read_later_raises_and_one_that_was_saved_loads(world_size: int) -> None:
    training = Served("element")
    training.step()
    state_dict, copied, unread = (training.zero.state_dict() for _ in range(3))
    dist.barrier()
    if dist.get_rank() == 1:
        copied = copy.deepcopy(copied)
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        training.expect_plain(torch.load(file))
        training.expect_plain(copied)
        training.plain.load_state_dict(state_dict)
    dist.barrier()
    training.zero.step()
    if dist.get_rank() == 1:
        for use in (pickle.dumps, copy.deepcopy, lambda each: dict(each["state"]), training.plain.load_state_dict):
            with pytest.raises(RuntimeError, match=r"rank 1: .* after step 1, but this rank is at step 2: read, copy"):
                use(unread)
    dist.barrier()


@distributed(2)
def test_a_state_dict_loads_on_all_ranks(world_size: int) -> None:
    training = Served("element")
    training.zero.load_state_dict(training.zero.state_dict())  # as Accelerate does before the first step
    training.step()
    again = Served("parameter")
    again.zero.load_state_dict(training.zero.state_dict())
    if dist.get_rank() == 1:
        expect_same(dict(again.zero.state_dict()["state"]), training.plain.state_dict()["state"])
    dist.barrier()


@distributed(2)
def test_a_rank_that_is_ahead_is_named(world_size: int) -> None:
    pair = Pair().train()
    pair.ours.zero_grad()
    for param in pair.params.values():
        param.grad = torch.ones_like(param)
    if dist.get_rank() == 1:
        pair.ours.step()  # updates, and waits for rank 0
    else:
        limit = time.monotonic() + 20
        ahead = r"rank 0 asks for the state after step 2, but rank 1 is inside step 3"
        with pytest.raises(RanksDisagreeError, match=ahead):  # noqa: PT012 - until rank 1 has begun its step
            while time.monotonic() < limit:
                pair.ours.state_dict()
        pair.ours.step()
    if dist.get_rank() == 0:
        assert len(pair.ours.state_dict()["state"]) == len(pair.params)
    dist.barrier()


@pytest.mark.parametrize("kind", KINDS)
@distributed(2)
def test_an_optimizer_that_another_rank_has_just_deleted_is_still_read(world_size: int, kind: str) -> None:
    training = Served(kind)
    training.step()
    zero = training.zero
    if dist.get_rank() == 1:
        deleted = weakref.ref(zero)
        del zero, training.zero, training.model
        gc.collect()
        assert deleted() is None
    dist.barrier()
    if dist.get_rank() == 0:
        training.expect_plain(zero.state_dict())
    dist.barrier()


@pytest.mark.parametrize("how", ["another one is constructed", "time passes"])
@distributed(2)
def test_an_optimizer_that_another_rank_deleted_is_named(world_size: int, how: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if how == "time passes":
            patch.setattr(serving, "SECONDS_AFTER_DELETION", 0.05)
        training = Served("element")
        training.step()
        zero = training.zero
        if dist.get_rank() == 1:
            del training, zero
            gc.collect()
        if how == "time passes":
            time.sleep(0.5)
        else:
            Served("element")
            gc.collect()
        dist.barrier()
        if dist.get_rank() == 0:
            match = r"no state from rank 1, which no longer has this optimizer.*barrier"
            with pytest.raises(PeerFailedError, match=match):
                zero.state_dict()
        dist.barrier()


@distributed(2)
def test_consolidation_makes_it_free(world_size: int) -> None:
    training = Served("element")
    training.step()
    training.zero.consolidate_state_dict(to=1)
    with counted_requests() as counts:
        if dist.get_rank() == 1:
            state_dict = training.zero.state_dict()
            assert type(state_dict["state"]) is dict
            training.expect_plain(state_dict)
        dist.barrier()
        assert counts[0] == 0
        dist.barrier()


@distributed(2)
def test_off(world_size: int) -> None:
    threads = threading.active_count()
    training = Served("element", serve_state_dict=False)
    assert training.zero.state_dict()["state"] == {}
    training.step()
    with pytest.raises(RuntimeError, match=r"serve_state_dict=False.*consolidate_state_dict\(to=\d\).*checkpoint.save"):
        training.zero.state_dict()
    assert threading.active_count() <= threads + 1  # another test may have started the service
    dist.barrier()
    with pytest.raises(RanksDisagreeError, match=r"serve_state_dict: (True|False)"):
        Served("element", serve_state_dict=dist.get_rank() == 0)


@distributed(2)
def test_a_result_without_memory_names_the_checkpoint_and_lets_the_other_rank_go_on(world_size: int) -> None:
    training = Served("element")
    training.step()
    allocate = FullState.allocate

    def refuse_second(full_state: FullState, header: bytes, source: int) -> list[torch.Tensor]:
        if source == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(full_state, header, source)

    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FullState, "allocate", refuse_second)
            with pytest.raises(RuntimeError, match=r"rank 0 has no memory .*onecopy\.checkpoint\.save"):
                training.zero.state_dict()
    training.step()
    if dist.get_rank() == 0:
        training.expect_plain(training.zero.state_dict())
    dist.barrier()


@distributed(2)
def test_different_state_under_another_key_is_named_and_lets_the_other_rank_go_on(world_size: int) -> None:
    training = Served("element")
    training.step()
    training.zero.state["note"] = dist.get_rank()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(RanksDisagreeError, match=r"rank 0: .*state under 'note'.*; rank 1: .*state under 'note'"):
            training.zero.state_dict()
    dist.barrier()
    del training.zero.state["note"]
    training.step()
    if dist.get_rank() == 0:
        training.expect_plain(training.zero.state_dict())
    dist.barrier()


@distributed(3)
def test_in_a_process_group_without_rank_0(world_size: int) -> None:
    group, _ = dist.new_subgroups_by_enumeration([[0], [1, 2]])  # each rank is in one
    if dist.get_rank() > 0:
        pair = Pair(group=group).train()
        if dist.get_rank() == 2:
            expect_same(pair.ours.state_dict()["param_groups"], pair.plain.state_dict()["param_groups"])
            expect_same(dict(pair.ours.state_dict()["state"]), pair.plain.state_dict()["state"])
    dist.barrier()


@distributed(2, limit=120)
def test_constructions_leave_nothing(world_size: int) -> None:
    def resources() -> tuple[int, int, int]:
        gc.collect()
        service = BackgroundService.of_process()
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(service.subjects)

    def construct() -> None:
        param = nn.Parameter(torch.ones(10))
        zero = ZeroRedundancyOptimizer([param], Adam)
        param.grad = torch.ones_like(param)
        zero.step()
        if dist.get_rank() == 0:
            zero.state_dict()
        dist.barrier()

    construct()
    before = resources()
    for number in range(500 if EVERYTHING else 150):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(10))], Adam)
        if number % 50 == 0:
            construct()
    construct()
    time.sleep(0.2)  # connections of gloo are closed by a thread of its own
    assert resources() == before
    dist.barrier()
