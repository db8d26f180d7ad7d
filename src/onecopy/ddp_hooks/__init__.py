"""DDP communication hooks: a step that overlaps with the backward pass, and a reduce-scatter of gradients."""

from onecopy.ddp_hooks.hooks import (
    ReduceScatter,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from onecopy.step.gradient_norm import clip_grad_norm_, grad_norm

__all__ = [
    "ReduceScatter",
    "clip_grad_norm_",
    "grad_norm",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
]
