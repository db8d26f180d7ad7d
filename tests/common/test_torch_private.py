"""Private names of torch that the package uses."""

from __future__ import annotations

import torch
from torch import nn

from onecopy.common.torch_private import buffers_of


def test_the_buffers_of_a_module_are_those_that_torch_finds() -> None:
    """In its order, each once, also those of shared submodules, added later, or registered as nothing."""
    shared, own = nn.BatchNorm2d(2), torch.zeros(1)
    inner = nn.Sequential(shared, nn.Linear(2, 2), shared)
    module = nn.Sequential(nn.BatchNorm1d(3), inner, nn.BatchNorm1d(4))
    module.register_buffer("own", own)
    module.register_buffer("nothing", None)
    module[2].register_buffer("again", own)
    module.register_module("no module", None)
    for _ in range(2):
        assert [id(buffer) for buffer in buffers_of(module)] == [id(buffer) for buffer in module.buffers()]
        inner.append(nn.BatchNorm1d(5))
