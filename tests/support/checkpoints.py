"""Sides that are saved and loaded: a small model with one of the kinds of optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.checkpoint import load, save
from onecopy.common.nested_tensors import map_tensors
from tests.support.models import assert_same_tree

WORDS, WIDTH = 300, 16
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Tiny(nn.Module):
    """An embedding tied to the output, which is cut; a channels-last convolution; buffers; a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.conv = nn.Conv2d(WIDTH, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.body = nn.Linear(8, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, words: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.conv(self.embedding(words).permute(0, 3, 1, 2)))).mean((2, 3))
        logits: Tensor = self.head(self.body(self.frozen(hidden)))
        return logits


@dataclass(frozen=True)
class Side:
    """A model, its wrapper, and its optimizers."""

    module: Tiny
    model: nn.Module
    optimizers: list[Optimizer]

    def train(self, steps: Iterable[int], rank: int | None = None) -> None:
        """Forward, backward and step, on data that depends on rank and step alone."""
        rank = dist.get_rank() if rank is None else rank
        for step in steps:
            generator = torch.Generator().manual_seed(1000 * step + rank)
            words = torch.randint(WORDS, (3, 5, 5), generator=generator)
            self.model.zero_grad()
            functional.cross_entropy(self.model(words), words[:, 0, 0]).backward()
            for optimizer in self.optimizers:
                optimizer.step()

    def push(self, steps: Iterable[int]) -> None:
        """Step with gradients that are made up and the same on all ranks, whatever their number."""
        for step in steps:
            for position, param in enumerate(self.module.parameters()):
                if param.requires_grad:
                    generator = torch.Generator().manual_seed(100 * step + position)
                    param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
            for optimizer in self.optimizers:
                optimizer.step()

    def save(self, root: Path | str, step: int, **options: Any) -> Path:
        return save(root, step, model=self.model, optimizer=self.optimizers, **options)

    def load(self, source: Path | str, **options: Any) -> Any:
        return load(source, model=self.model, optimizer=self.optimizers, **options)

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}

    def state(self) -> list[Any]:
        """The state of each optimizer by name, with options and master weights; consolidated, so on rank 0 only."""
        found = []
        by_param = {id(param): name for name, param in self.module.named_parameters()}
        for optimizer in self.optimizers:
            if isinstance(optimizer, ZeroRedundancyOptimizer):
                optimizer.consolidate_state_dict(to=0)
                if optimizer.rank != 0:
                    continue
            saved = optimizer.state_dict()
            names = [by_param[id(param)] for group in optimizer.param_groups for param in group["params"]]
            groups = {
                min(names[index] for index in group["params"]): {key: group[key] for key in ("lr", "weight_decay")}
                for group in saved["param_groups"]
            }
            state = {names[index]: {**values} for index, values in saved["state"].items()}
            masters = {names[index]: value for index, value in saved.get("master_weights", {}).items()}
            found.append({"state": state, "groups": groups, "masters": masters})
        copied: list[Any] = map_tensors(found, Tensor.clone)
        return copied

    def contents(self) -> Any:
        """Everything that this rank holds."""
        states = []
        for each in self.optimizers:
            inner = each.optim if isinstance(each, ZeroRedundancyOptimizer) else each
            states.append([deepcopy(inner.state_dict()), [{**group, "params": 0} for group in each.param_groups]])
        return [self.weights(), states]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "parameter": {},
    "element": {"shard_by": "element"},
    "view": {"parameters_as_bucket_view": True},
    "sharded": {},
    "overlapped": {},
}

STORABLE = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
"""The dtypes that a checkpoint can have."""


def make(
    kind: str,
    seed: int = 0,
    several: bool = False,
    reverse: bool = False,
    bf16: bool = False,
    group: Any = None,
    wrap: bool = True,
    adapters: bool = False,
) -> Side:
    """One way to train the model: one optimizer of two groups, or two optimizers; in whatever order.

    With ``adapters``, everything but ``body`` is frozen, and optimizers have only that.
    """
    torch.manual_seed(seed)
    module = Tiny()
    for param in module.parameters() if bf16 else ():  # buffers stay as they are
        param.data = param.data.to(torch.bfloat16)
    if adapters:
        module.requires_grad_(False).body.requires_grad_(True)
    order = -1 if reverse else 1
    params = [param for param in module.parameters() if param.requires_grad or not adapters][::order]
    matrices = [param for param in params if param.dim() == 2]
    rest = [param for param in params if param.dim() != 2]
    one: list[Any] = [{"params": matrices}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}][::order]
    parts: list[tuple[type[Optimizer], Any, dict[str, Any]]] = [(AdamW, one, ADAMW)]
    if several:
        parts = [(Muon, matrices, {"lr": 1e-2}), (AdamW, rest, ADAMW)]
    optimizers: list[Any] = []
    for cls, chosen, options in parts:
        if kind == "plain":
            optimizers.append(cls(chosen, **options))
        else:
            ours = {**KINDS[kind], "process_group": group, "master_weights": bf16}
            optimizers.append(ZeroRedundancyOptimizer(chosen, cls, **ours, **options))
    if kind in ("sharded", "overlapped"):
        overlap: dict[str, Any] = {"overlap_forward": True} if kind == "overlapped" else {}
        return Side(module, ShardedDataParallel(module, optimizers, bucket_bytes=8192, **overlap), optimizers)
    return Side(module, DistributedDataParallel(module) if wrap else module, optimizers)


def check_any_to_any(root: Path, source: Side, targets: Iterable[Side], **options: Any) -> None:
    """Save half way; every target that loads it holds the same, and goes on as the source did.

    With more than two ranks DDP and ShardedDataParallel add gradients up in different orders, so only two go on.
    """
    more = [2, 3] if dist.get_world_size() == 2 else []
    source.train([0, 1])
    source.save(root, 2, **options)
    state, model = source.state(), source.weights()
    source.train(more)
    found = []
    for target in targets:
        target.train([7])
        assert target.load(root).step == 2
        loaded = (target.weights(), target.state())
        target.train(more)
        found.append((*loaded, target.weights()))
    for number, (ours, mine, continued) in enumerate(found):  # here no rank waits for another
        if dist.get_rank() == 0:
            assert_same_tree(ours, model, f"model of target {number}")
            assert_same_tree(mine, state, f"state of target {number}")
        if more:
            assert_same_tree(continued, source.weights(), f"continued by target {number}")
