"""onecopy shards the optimizer state, so that the data-parallel ranks hold one copy of it together."""

from onecopy.data_parallel import MixedPrecision, ShardedDataParallel
from onecopy.ddp_hooks import (
    ReduceScatter,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.ema import ShardedEMA
from onecopy.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CorruptCheckpointError,
    GradientsNotReducedWarning,
    NonfiniteError,
    OnecopyError,
    PeerFailedError,
    RanksDisagreeError,
)
from onecopy.layout import Layout, ParamSpec, Shard
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.step.norms import clip_grad_norm_, grad_norm
from onecopy.step.several_classes import join_state_dicts, split_state_dict

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CorruptCheckpointError",
    "GradientsNotReducedWarning",
    "Layout",
    "MixedPrecision",
    "NonfiniteError",
    "OnecopyError",
    "ParamSpec",
    "PeerFailedError",
    "RanksDisagreeError",
    "ReduceScatter",
    "Shard",
    "ShardedDataParallel",
    "ShardedEMA",
    "ZeroRedundancyOptimizer",
    "clip_grad_norm_",
    "grad_norm",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "join_state_dicts",
    "reduce_scatter_hook",
    "split_state_dict",
]
