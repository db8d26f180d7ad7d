"""onecopy: one copy of the optimizer state across all data-parallel ranks."""

from onecopy.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from onecopy.errors import OnecopyError, PeerFailedError, RanksDisagreeError
from onecopy.layout import Layout, ParamSpec, Shard
from onecopy.optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = [
    "Layout",
    "OnecopyError",
    "ParamSpec",
    "PeerFailedError",
    "RanksDisagreeError",
    "Shard",
    "ZeroRedundancyOptimizer",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
