"""examples/elastic.py under torchrun's agent: ranks are killed, and the run ends as an undisturbed one.

``make elastic`` does the same with the command torchrun, at random moments, on one and on two machines.
"""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from onecopy import checkpoint
from tests.support.examples import example, result_in
from tests.support.harness import pools

EPOCHS, LAST_STEP = 3, 25
"""The defaults of the example: 25 batches of 12 are 3 epochs of 100 samples. It saves after every fifth."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def worker(root: Path, kill_at: int | None) -> int:
    """Train one rank. In the first attempt the last rank kills itself after a step, before it saves."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sampler = checkpoint.ResumableSampler
    advance = sampler.advance
    is_killed = dist.get_rank() == dist.get_world_size() - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def advance_or_die(self: checkpoint.ResumableSampler) -> None:
        advance(self)
        if is_killed and self.position // self.batch_size == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "advance", advance_or_die)
        first_step = train(root)
    dist.destroy_process_group()
    return first_step


def train(root: Path) -> int:
    """Train one rank of a pool."""
    first_step: int = example("elastic").train(root)
    return first_step


def launch(root: Path, ranks: int, kill_at: int | None = None, restarts: int = 0) -> set[int]:
    """Run the example, and return the first steps of the last attempt on all ranks."""
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=restarts,
        start_method="forkserver",
    )
    handlers = {each: signal.getsignal(each) for each in SIGNALS}  # the agent leaves its own behind
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # docs/clusters.md explains it
            found: dict[int, int] = elastic_launch(config, worker)(root, kill_at)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    return set(found.values())


def result_of(root: Path) -> Tensor:
    """The parameters at the end, after a check that each sample was used once in each epoch."""
    params, loaded = result_in(root)
    assert loaded.step == LAST_STEP
    assert loaded.extra["counts"].tolist() == [EPOCHS] * 100
    return params


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The parameters of a run on two ranks that nothing has disturbed."""
    root = tmp_path_factory.mktemp("undisturbed")
    assert pools.run(2, __name__, "train", {"root": root}) == [0, 0]
    return result_of(root)


def test_a_run_whose_worker_is_killed_ends_as_an_undisturbed_one(undisturbed: Tensor, tmp_path: Path) -> None:
    assert launch(tmp_path, 2, 17, restarts=1) == {15}  # in a batch with samples of two epochs
    assert torch.equal(result_of(tmp_path), undisturbed)


def test_a_run_on_changing_numbers_of_ranks_uses_every_sample_once_per_epoch(
    undisturbed: Tensor, tmp_path: Path
) -> None:
    for ranks, step, saved in ((2, 7, 5), (3, 13, 10), (1, 18, 15)):
        with pytest.raises(ChildFailedError):
            launch(tmp_path, ranks, step)
        assert checkpoint.load(tmp_path).step == saved
    assert launch(tmp_path, 2) == {15}
    # The samples of a step are the same, so only sums over ranks are rounded differently.
    torch.testing.assert_close(result_of(tmp_path), undisturbed, rtol=1e-4, atol=1e-5)
