"""``refuse_nonfinite``: nothing is saved while a parameter is not finite, and older checkpoints stay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from onecopy import NonfiniteError
from onecopy.checkpoint import load, save, wait
from tests.support.checkpoints import make, train
from tests.support.failures import expect_failure_of
from tests.support.harness import distributed

NOT_FINITE = "parameter 'body.weight' has an infinity or a NaN. .*nothing was saved"


@pytest.mark.parametrize("blocking", [True, False], ids=["", "in the background"])
@pytest.mark.parametrize("culprits", [[1], [0, 1]])
@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2)
def test_all_ranks_raise_and_the_last_good_checkpoint_stays(
    world_size: int, kind: str, culprits: list[int], blocking: bool, tmp_path: Path
) -> None:
    side = make(kind)
    train(side, range(2))
    side.module.norm.get_buffer("running_mean")[0] = math.inf  # buffers may be
    arguments: dict[str, Any] = {"model": side.model, "optimizer": side.optimizers, "keep": 1, "blocking": blocking}
    save(tmp_path, 1, **arguments, refuse_nonfinite=True)
    wait()
    weight = side.module.get_parameter("body.weight")
    if dist.get_rank() in culprits:
        weight.detach().view(-1)[-1] = -math.inf
    expect_failure_of(
        culprits, lambda: save(tmp_path, 2, **arguments, refuse_nonfinite=True), NonfiniteError, NOT_FINITE
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    load(tmp_path, model=side.model, optimizer=side.optimizers)
    assert weight.isfinite().all()
    save(tmp_path, 2, **arguments, refuse_nonfinite=True)
    wait()


def test_without_a_model_the_parameters_of_the_optimizers_count(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    save(tmp_path, 1, optimizer=optimizer, refuse_nonfinite=True)
    torch.view_as_real(layer.bias.detach())[1, 1] = math.nan
    save(tmp_path, 2, optimizer=optimizer)
    with pytest.raises(NonfiniteError, match=r"rank 0: parameter 'group0\[1\]' has an infinity or a NaN"):
        save(tmp_path, 3, optimizer=optimizer, refuse_nonfinite=True)
    integers = nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False)])
    save(tmp_path, 3, model=integers, refuse_nonfinite=True)
