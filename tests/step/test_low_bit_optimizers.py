"""The optimizers of bitsandbytes and torchao, where they are installed: as the plain class, on any number of ranks."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onecopy import ShardedDataParallel
from tests.support.harness import distributed
from tests.support.low_bit import check_both_directions, check_other_numbers_of_ranks

CLASSES = {
    "torchao.optim": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "bitsandbytes.optim": ("AdamW8bit",),
}
LIMIT = 110.0
"""Seconds for a test; the first one imports the package."""

CASES = [(module, name) for module, names in CLASSES.items() for name in names]


@pytest.fixture
def installed(module: str) -> None:
    pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed")


def class_of(module: str, name: str) -> Any:
    # torchao compiles its update; here it runs as it is, on both sides.
    torch.compiler.set_stance("force_eager")
    return getattr(importlib.import_module(module), name)


def is_quantised(values: dict[str, Any]) -> bool:
    """Whether the state of a parameter has 8 bit or fewer per element."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    return any(hasattr(type(each), "__tensor_flatten__") or each.dtype is torch.uint8 for each in tensors)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, ShardedDataParallel])
@pytest.mark.parametrize(("module", "name"), CASES)
@distributed(2, limit=LIMIT)
def test_training_and_state_dicts_are_those_of_the_plain_class(
    world_size: int, module: str, name: str, wrapper: type[nn.Module]
) -> None:
    state = check_both_directions(class_of(module, name), wrapper, to=world_size - 1)["state"]
    # As in the plain class: the two large weights are quantised, and nothing else is.
    assert [index for index, values in state.items() if is_quantised(values)] == [0, 2]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("module", "name"), CASES)
@distributed(3, limit=LIMIT)
def test_a_checkpoint_loads_on_another_number_of_ranks(world_size: int, module: str, name: str, tmp_path: Path) -> None:
    assert world_size == 3
    check_other_numbers_of_ranks(class_of(module, name), tmp_path)
