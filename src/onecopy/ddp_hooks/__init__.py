"""DDP communication hooks: a step that overlaps with the backward pass, and a reduce-scatter of gradients."""

from onecopy.ddp_hooks.hooks import (
    ReduceScatter,
    clip_grad_norm_,
    grad_norm,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)

__all__ = [
    "ReduceScatter",
    "clip_grad_norm_",
    "grad_norm",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
]
