"""DDP communication hooks: a step that overlaps with the backward pass, and a reduce-scatter of gradients."""

from onecopy.ddp_hooks.overlap import hook_with_zero_step, hook_with_zero_step_interleaved
from onecopy.ddp_hooks.reduce_scatter import ReduceScatter, reduce_scatter_hook
from onecopy.step.norms import clip_grad_norm_, grad_norm

__all__ = [
    "ReduceScatter",
    "clip_grad_norm_",
    "grad_norm",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "reduce_scatter_hook",
]
