"""Training in mixed precision beside master weights that are kept by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.models import assert_equal, small_inputs, values

HALF = torch.bfloat16
BF16 = MixedPrecision(param_dtype=HALF)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """This rank's loss, of a model that may be in bf16."""
    loss: Tensor = model(small_inputs(dist.get_rank(), step)).float().square().mean()
    return loss


def everything(params: Sequence[Tensor]) -> list[Tensor]:
    return list(params)


def matrices(params: Sequence[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dim() == 2]


def vectors(params: Sequence[Tensor]) -> list[Tensor]:
    return [param for param in params if param.dim() != 2]


@dataclass(frozen=True)
class Part:
    """One optimizer: its class and options, and which of the model's parameters it has."""

    optimizer: type[Optimizer]
    options: dict[str, Any]
    chosen: Callable[[Sequence[Tensor]], list[Tensor]] = everything


ADAMW = Part(torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1})
FUSED = Part(torch.optim.AdamW, {"lr": 1e-3, "fused": True})
SGD = Part(torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9})
ADAFACTOR = Part(torch.optim.Adafactor, {"lr": 1e-3})
MUON = Part(torch.optim.Muon, {"lr": 1e-3}, matrices)
RECIPES = pytest.mark.parametrize(
    "parts",
    [(ADAMW,), (FUSED,), (SGD,), (ADAFACTOR,), (MUON, Part(torch.optim.AdamW, {"lr": 1e-3}, vectors))],
    ids=["AdamW", "fused AdamW", "SGD", "Adafactor", "Muon and AdamW"],
)


class ByHand:
    """The reference: float32 masters of all parameters on every rank, under plain optimizers."""

    def __init__(self, params: Iterable[Tensor], parts: Sequence[Part], exact: Iterable[Tensor] | None = None) -> None:
        self.params = list(params)
        sources = self.params if exact is None else list(exact)
        self.masters = [source.detach().float().clone() for source in sources]
        self.optimizers = [part.optimizer(part.chosen(self.masters), **part.options) for part in parts]

    def step(self, gradients: Sequence[Tensor | None] | None = None) -> None:
        given = [param.grad for param in self.params] if gradients is None else gradients
        for master, gradient in zip(self.masters, given, strict=True):
            master.grad = None if gradient is None else gradient.float()
        for optimizer in self.optimizers:
            optimizer.step()
        self.write_to_params()

    @torch.no_grad()
    def write_to_params(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


def zeros_for(params: Iterable[Tensor], parts: Sequence[Part], **ours: Any) -> list[ZeroRedundancyOptimizer]:
    """The same optimizers sharded; a class that needs whole parameters has them, whatever ``shard_by`` says."""
    held = list(params)
    whole = {key: value for key, value in ours.items() if key != "shard_by"}
    return [
        ZeroRedundancyOptimizer(
            part.chosen(held), part.optimizer, **(whole if part in (ADAFACTOR, MUON) else ours), **part.options
        )
        for part in parts
    ]


def adamw_for(model: nn.Module, **ours: Any) -> ZeroRedundancyOptimizer:
    (zero,) = zeros_for(model.parameters(), [ADAMW], **ours)
    return zero


def made_copies(zero: ZeroRedundancyOptimizer, params: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that the inner optimizer steps outside the parameters' memory."""
    homes = {param.untyped_storage().data_ptr() for param in params}
    stepped = [tensor for group in zero.optim.param_groups for tensor in group["params"]]
    return [tensor for tensor in stepped if tensor.untyped_storage().data_ptr() not in homes]


def wrap(model: nn.Module, parts: Sequence[Part], policy: MixedPrecision, **options: Any) -> ShardedDataParallel:
    return ShardedDataParallel(model, zeros_for(model.parameters(), parts), mixed_precision=policy, **options)


def optimizers_of(model: ShardedDataParallel) -> list[ZeroRedundancyOptimizer]:
    return [optimizer for optimizer, _ in model._pipelines]


def reduced(params: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The mean of all ranks' gradients, scaled and added up in rank order and in this type, or their own."""
    means = []
    for param in params:
        assert param.grad is not None
        mine = param.grad.to(dtype or param.dtype) * (1.0 / dist.get_world_size())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        total = everyone[0]
        for other in everyone[1:]:
            total = total + other
        means.append(total)
    return means


def compare_with_masters_by_hand(
    make: Callable[[], nn.Module], parts: Sequence[Part], policy: MixedPrecision, steps: int = 4, **options: Any
) -> tuple[ShardedDataParallel, ByHand]:
    torch.manual_seed(4)
    plain = make()
    model = wrap(deepcopy(plain), parts, policy, **options)
    exact = values(plain.parameters())
    for param, ours in zip(plain.parameters(), model.parameters(), strict=True):
        param.data = param.data.to(ours.dtype)
    reference = ByHand(plain.parameters(), parts, exact)
    assert any(not torch.equal(a, b) for a, b in zip(exact, plain.parameters(), strict=True))
    for step in range(steps):
        for optimizer in optimizers_of(model):
            optimizer.zero_grad()
        loss_of(model, step).backward()
        for optimizer in optimizers_of(model):
            optimizer.step()
        plain.zero_grad()
        plain(small_inputs(dist.get_rank(), step).to(HALF)).float().square().mean().backward()
        reference.step(reduced(plain.parameters(), policy.reduce_dtype))
        assert_equal(model.parameters(), plain.parameters(), f"step {step}")
    return model, reference
