"""The variants that the benchmark compares, each constructed from the same model with the same options."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import (
    MixedPrecision,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT as GPT
from gpt import Sizes as Sizes
from gpt import loss_of as loss_of

MODELS = {
    "reference": Sizes(),
    "deep": Sizes(vocabulary=2048, width=384, head=2048, depth=12, batch=4),
}
"""24M parameters with a dominant embedding and small batches; 23M parameters in 12 equal blocks with larger batches."""

LR = 3e-4
YARDSTICK = "DDP fused, bucket views"
THEIRS = "torch's class, bucket views, fused"
ALWAYS = (YARDSTICK, THEIRS)
"""Variants that always run, because the other variants are compared with them."""


def nothing() -> None:
    """Do nothing: the ``finish`` of variants that have no communication in flight after a step."""


@dataclass(slots=True)
class Trained:
    """A variant in training: the functions of one iteration, and its tensors.

    ``zero``, ``forward_backward`` and ``step`` are the parts of one iteration. ``finish`` waits for communication that
    is in flight after it. ``gradients`` returns gradients that are not in ``param.grad``.
    """

    model: nn.Module
    zero: Callable[[], object]
    forward_backward: Callable[[Tensor], object]
    step: Callable[[], object]
    state: Callable[[], Iterable[Any]]
    finish: Callable[[], object] = nothing
    gradients: Callable[[], Iterable[Any]] = tuple
    optimizer: Any = None
    parameters: Callable[[], list[Tensor]] = field(default=list)


Make = Callable[[GPT], Trained]


def ordinary(model: nn.Module, optimizer: Optimizer, state: Callable[[], Iterable[Any]]) -> Trained:
    """Return a variant with the usual training loop."""

    def forward_backward(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()

    return Trained(
        model,
        optimizer.zero_grad,
        forward_backward,
        optimizer.step,
        state,
        optimizer=optimizer,
        parameters=lambda: list(model.parameters()),
    )


def ddp(views: bool = False, fused: bool | None = None) -> Make:
    """Return a constructor of DDP with the plain optimizer."""

    def make(model: GPT) -> Trained:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        optimizer = AdamW(wrapped.parameters(), lr=LR, fused=fused)
        return ordinary(wrapped, optimizer, lambda: optimizer.state.values())

    return make


def torch_zero(views: bool, fused: bool) -> Make:
    """Return a constructor of DDP with torch's ``ZeroRedundancyOptimizer``."""

    def make(model: GPT) -> Trained:
        with warnings.catch_warnings():
            # Importing it compiles TorchScript, which warns that TorchScript is deprecated.
            warnings.simplefilter("ignore", DeprecationWarning)
            from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        zero = TorchZero(wrapped.parameters(), AdamW, parameters_as_bucket_view=views, lr=LR, fused=fused)
        return ordinary(wrapped, zero, lambda: zero.optim.state.values())

    return make


def level_one(hook: str = "", views: bool = False) -> Make:
    """Return a constructor of DDP with onecopy's ``ZeroRedundancyOptimizer``, and with one of its hooks if asked."""

    def make(model: GPT) -> Trained:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        overlaps = hook in ("after", "interleaved")
        zero = ZeroRedundancyOptimizer(
            wrapped.parameters(),
            AdamW,
            parameters_as_bucket_view=views,
            overlap_with_ddp=overlaps,
            lr=LR,
            fused=True,
        )
        if hook == "after":
            wrapped.register_comm_hook(None, hook_with_zero_step(allreduce_hook, wrapped, zero))
        elif hook == "interleaved":
            wrapped.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, wrapped, zero))
        elif hook == "reduce-scatter":
            wrapped.register_comm_hook(zero, reduce_scatter_hook)
        return ordinary(wrapped, zero, lambda: zero.optim.state.values())

    return make


def sharded(overlap_forward: bool = False, bf16: bool = False) -> Make:
    """Return a constructor of onecopy's ``ShardedDataParallel``."""

    def make(model: GPT) -> Trained:
        zero = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR, fused=True)
        policy = MixedPrecision(param_dtype=torch.bfloat16) if bf16 else None
        wrapped = ShardedDataParallel(model, zero, overlap_forward=overlap_forward, mixed_precision=policy)

        def state() -> Iterable[Any]:
            masters = [owned.tensor for owned in zero.engine.inner.owned if owned.param_view is not None]
            return [*zero.optim.state.values(), {"masters": masters}]

        made = ordinary(wrapped, zero, state)
        made.finish = wrapped.wait
        return made

    return make


def fsdp2(reshard: bool) -> Make:
    """Return a constructor of FSDP2 with ``fully_shard`` on each block, the embedding, the head and the model."""

    def make(model: GPT) -> Trained:
        from torch.distributed.fsdp import fully_shard

        for block in (*model.blocks, model.embed, model.head):
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizer = AdamW(model.parameters(), lr=LR, fused=True)
        made = ordinary(model, optimizer, lambda: optimizer.state.values())
        made.parameters = lambda: [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
        return made

    return make


def deepspeed(stage: int) -> Make:
    """Return a constructor of DeepSpeed's engine without gradient clipping, which is at 1.0 by default."""

    def make(model: GPT) -> Trained:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = AdamW(model.parameters(), lr=LR, fused=True)
        engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def forward_backward(tokens: Tensor) -> None:
            engine.backward(loss_of(engine, tokens))

        def state() -> Iterable[Any]:
            return [*optimizer.state.values(), {"masters": zero.single_partition_of_fp32_groups}]

        return Trained(
            engine,
            nothing,
            forward_backward,
            engine.step,
            state,
            gradients=lambda: list(zero.averaged_gradients.values()),
            optimizer=optimizer,
            parameters=lambda: list(model.parameters()),
        )

    return make


def fairscale(sharded_ddp: bool) -> Make:
    """Return a constructor of fairscale's OSS with DDP or with fairscale's own wrapper.

    Gradients of fairscale's wrapper must be zeroed through the model.
    """

    def make(model: GPT) -> Trained:
        from fairscale.nn.data_parallel import ShardedDataParallel as ShardedDDP
        from fairscale.optim.oss import OSS

        oss = OSS(model.parameters(), optim=AdamW, lr=LR, fused=True)
        wrapped = (
            ShardedDDP(model, oss) if sharded_ddp else DistributedDataParallel(model, gradient_as_bucket_view=True)
        )
        made = ordinary(wrapped, oss, lambda: oss.optim.state.values())
        made.zero = wrapped.zero_grad
        made.parameters = lambda: list(model.parameters())
        return made

    return make


VARIANTS: dict[str, Make] = {
    "DDP": ddp(),
    YARDSTICK: ddp(views=True, fused=True),
    "torch's class": torch_zero(views=False, fused=False),
    THEIRS: torch_zero(views=True, fused=True),
    "onecopy": level_one(),
    "onecopy, bucket views": level_one(views=True),
    "onecopy, reduce-scatter hook": level_one("reduce-scatter"),
    "onecopy, hook_with_zero_step": level_one("after"),
    "onecopy, interleaved": level_one("interleaved"),
    "onecopy, ShardedDataParallel": sharded(),
    "onecopy, ShardedDataParallel, overlap_forward": sharded(overlap_forward=True),
    "FSDP2, no resharding": fsdp2(reshard=False),
    "FSDP2, resharding": fsdp2(reshard=True),
    "DeepSpeed ZeRO-1": deepspeed(1),
    "DeepSpeed ZeRO-2": deepspeed(2),
    "fairscale OSS, DDP": fairscale(sharded_ddp=False),
    "fairscale OSS, ShardedDDP": fairscale(sharded_ddp=True),
}

MEMORY_ONLY: dict[str, Make] = {"onecopy, ShardedDataParallel, bf16 + masters": sharded(bf16=True)}
"""Variants of which only the memory is measured, because bf16 is slow on a CPU."""


def chosen(pattern: str) -> list[str]:
    """Return the variants whose names contain one of the texts in ``pattern``, which are separated by semicolons.

    The variants of ``ALWAYS`` are included.
    """
    texts = [text.strip() for text in pattern.split(";") if text.strip()]
    return [name for name in VARIANTS if not texts or name in ALWAYS or any(text in name for text in texts)]
