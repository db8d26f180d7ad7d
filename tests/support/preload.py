"""Imported once by the process from which all workers are forked; imports only, because threads do not survive it."""

import importlib

import onecopy
from onecopy.common.torch_private import register_as_torch_zero

for name in (
    "tests.support.harness",
    "pytest",
    "pytorch_optimizer",
    "schedulefree",
    "torch._dynamo",  # the first step of an optimizer would import it, in every rank anew
    "torch.distributed.optim",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.tensor",
    "torch.nn.parallel",
):
    importlib.import_module(name)
register_as_torch_zero(onecopy.ZeroRedundancyOptimizer)
