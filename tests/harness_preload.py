"""Imported once by the process from which all workers are forked; imports only, because threads do not survive it."""

import pytest
import pytorch_optimizer
import schedulefree
import torch
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn.parallel

import harness  # noqa: F401
import onecopy
from onecopy.engine.torch_private import register_as_torch_zero

register_as_torch_zero(onecopy.ZeroRedundancyOptimizer)
assert pytest and torch and pytorch_optimizer and schedulefree
