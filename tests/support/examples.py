"""The scripts in examples/ as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from onecopy import checkpoint
from onecopy.checkpoint import Loaded
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def result_in(path: Path) -> tuple[Tensor, Loaded]:
    """The parameters in a checkpoint of the elastic examples, or in the newest one in a directory, and all of it."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    loaded = checkpoint.load(path, model=model)
    return torch.cat([param.detach().flatten() for param in model.parameters()]), loaded
