"""DDP communication hooks that overlap the optimizer's step with the backward pass."""

from __future__ import annotations

from typing import Any


def hook_with_zero_step(hook: Any, ddp: Any, zero: Any, shard_buckets: bool = False) -> Any:
    """Not available yet."""
    raise NotImplementedError("overlap with DDP is not available yet")


def hook_with_zero_step_interleaved(hook: Any, ddp: Any, zero: Any, shard_buckets: bool = False) -> Any:
    """Not available yet."""
    raise NotImplementedError("overlap with DDP is not available yet")
