"""The training of the demo on real ranks: the same losses at every level, less memory, and continuing after a stop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from onecopy.demo.display import frame, line, sparkline
from onecopy.demo.settings import LEVELS, OPTIMIZERS, Result, Settings
from onecopy.demo.training import Progress, StopRequest, train
from onecopy.planning.optimizers import OPTIMIZERS as PLANNED
from tests.support.harness import distributed, pools

SMALL = Settings(steps=6, batch=2, length=12, width=64, layers=2, save_every=2)


def run(settings: Settings, stops: bool = False) -> Result:
    """Train in this process group; with ``stops`` the last rank is asked to stop at once."""
    stop, shown = StopRequest(), []

    def show(progress: Progress) -> None:
        shown.append(line(progress))
        assert progress.settings.name in shown[-1]
        assert frame(progress)

    if stops and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        stop.is_made = True
    result = train(settings, stop, show)
    made = len(result.losses) - result.first_step
    assert len(shown) == (made if torch.distributed.get_rank() == 0 else 0)
    return result


def run_all(folder: str, optimizer: str, precision: str, levels: list[str]) -> list[Result]:
    """Train at some levels, one after the other."""
    jobs = [replace(SMALL, folder=folder, optimizer=optimizer, precision=precision, level=level) for level in levels]
    return [run(job) for job in jobs]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-master"])
def test_every_level_has_the_losses_of_ddp_and_less_memory(optimizer: str, precision: str, tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path), "optimizer": optimizer, "precision": precision, "levels": list(LEVELS)}
    ddp, *others = pools.run(2, __name__, "run_all", arguments)[0]
    assert ddp.losses[-1] < ddp.losses[0]
    for result in others:
        assert result.losses == ddp.losses, result.name
        assert result.finished
        assert result.ddp == pytest.approx(ddp.memory[0], rel=0.02), "the prediction for plain DDP"
        before, after = (sum(ranks[0].values()) for ranks in (ddp.memory, result.memory))
        saves = optimizer != "sgd" or precision == "bf16-master" or result.name == "level 3"
        assert (after < 0.95 * before) == saves, result.name
        assert min(result.resident) > 50e6
        assert result.text


@pytest.mark.parametrize("level", ["ddp", "1", "3"])
@distributed(2)
def test_a_training_that_was_stopped_continues_as_if_it_had_not_been(world_size: int, level: str) -> None:
    import tempfile

    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    whole = run(replace(SMALL, level=level, folder=f"{folder[0]}/whole"))
    job = replace(SMALL, level=level, folder=f"{folder[0]}/stopped")
    first = run(replace(job, steps=3))
    stopped = run(job, stops=True)
    assert (stopped.finished, stopped.first_step, len(stopped.losses)) == (False, 3, 4)
    rest = run(job)
    assert (rest.first_step, rest.finished) == (4, True)
    assert first.losses == whole.losses[:3]
    assert rest.losses == whole.losses
    again = run(job)
    assert (again.first_step, again.losses) == (0, whole.losses), "a finished training begins anew"
    longer = run(replace(job, steps=8))
    assert longer.first_step == 6
    assert run(replace(job, steps=8, fresh=True)).first_step == 0


def test_the_planner_knows_every_optimizer() -> None:
    for name, (optimizer_class, _) in OPTIMIZERS.items():
        assert PLANNED[name].name == f"torch.optim.{optimizer_class.__name__}"


def test_a_sparkline_falls_with_the_loss() -> None:
    assert sparkline([8.0, 4.0, 1.0]) == "█▄▁"
    assert sparkline([1.0]) == "▁"
    assert len(sparkline([float(step) for step in range(500)], 60)) == 60
