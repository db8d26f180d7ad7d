"""``ShardedDataParallel``: in place of DDP, with gradients and optimizer state sharded among the ranks."""

from onecopy.data_parallel.construction import MixedPrecision
from onecopy.data_parallel.wrapper import ShardedDataParallel

__all__ = ["MixedPrecision", "ShardedDataParallel"]
