"""Try lines of a usual DDP script at level 3 and with FSDP2, and print the table of docs/fsdp2.md.

torchrun --standalone --nproc-per-node 2 benchmarks/with_fsdp2.py

The lines stay as they are in a DDP script: nothing is adapted to DTensors. A cell has the largest difference from plain
training on one process after one step, or the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer

Step = Callable[[nn.Module, Any, Tensor], None]


class Model(nn.Module):
    """An embedding, a layer, and a head that may use the weight of the embedding."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 64)
        self.tied = tied

    def forward(self, words: Tensor) -> Tensor:
        """Return a score for each word."""
        hidden = torch.tanh(self.layer(self.embedding(words)))
        return nn.functional.linear(hidden, self.embedding.weight) if self.tied else self.head(hidden)


def usual(model: nn.Module, optimizer: Any, words: Tensor) -> None:
    model(words).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def penalty(model: nn.Module, optimizer: Any, words: Tensor) -> None:
    (model(words).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())).backward()
    optimizer.step()


def average(model: nn.Module, optimizer: Any, words: Tensor) -> None:
    usual(model, optimizer, words)
    averaged = Model(tied=False)
    for mean, param in zip(averaged.parameters(), model.parameters(), strict=True):
        mean.data.lerp_(param.data, 0.1)


def joined(model: nn.Module, optimizer: Any, words: Tensor) -> None:
    if dist.is_initialized():
        joinables: list[Any] = [model, optimizer] if isinstance(optimizer, ZeroRedundancyOptimizer) else [model]
        with Join(joinables):
            usual(model, optimizer, words)
    else:
        usual(model, optimizer, words)


def saved(model: nn.Module, optimizer: Any, words: Tensor) -> None:
    usual(model, optimizer, words)
    weights = getattr(model, "module", model).state_dict()
    Model(tied=False).load_state_dict(weights)


CASES: dict[str, tuple[type, Step, bool, str]] = {
    "AdamW and `clip_grad_norm_`": (torch.optim.AdamW, usual, False, "level 3"),
    "Muon": (torch.optim.Muon, usual, False, "level 3"),
    "Adafactor": (torch.optim.Adafactor, usual, False, "level 3"),
    "a penalty on all parameters in the loss": (torch.optim.AdamW, penalty, False, "level 3"),
    "a head that reads the embedding's weight": (torch.optim.AdamW, usual, True, "level 3"),
    "a moving average of the parameters in a plain model": (torch.optim.AdamW, average, False, "level 3"),
    "`model.state_dict()` of rank 0 into a plain model": (torch.optim.AdamW, saved, False, "level 3"),
    "`Join`, for uneven inputs": (torch.optim.AdamW, joined, False, "level 1"),
}


def train(way: str, optimizer: type, step: Step, tied: bool) -> list[Tensor]:
    """Make one step, and return the parameters of the module."""
    module = Model(tied)
    model: nn.Module = module
    chosen = [p for p in module.parameters() if p.dim() == 2 or optimizer is not torch.optim.Muon]
    for param in module.parameters():
        param.requires_grad_(any(param is each for each in chosen))
    if tied:
        module.head.requires_grad_(False)
        chosen = [p for p in chosen if p.requires_grad]
    batches = [torch.arange(16).view(4, 4) + 16 * each for each in range(2)]
    if way == "plain":
        words = torch.cat(batches)
        step(module, optimizer(chosen, lr=0.01), words)
    else:
        words = batches[dist.get_rank()]
        if way == "FSDP2":
            for child in module.children():
                fully_shard(child)
            fully_shard(module)
            chosen = [p for p in module.parameters() if p.requires_grad]
            step(module, optimizer(chosen, lr=0.01), words)
            return [cast(Any, p.detach()).full_tensor() for p in module.parameters()]
        sharded = ZeroRedundancyOptimizer(chosen, optimizer, lr=0.01)
        model = ShardedDataParallel(module, sharded) if way == "level 3" else DistributedDataParallel(module)
        step(model, sharded, words)
    return [p.detach().clone() for p in module.parameters()]


def cell(way: str, plain: list[Tensor], *case: Any) -> str:
    try:
        ours = train(way, *case)
    except Exception as error:  # the error is the result
        text = re.split(r", need|, but|\. ", str(error).splitlines()[0])[0].rstrip(":")
        return f"`{type(error).__name__}`: {text}"
    return f"{max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)):.0e}"


def main() -> None:
    plain = {name: train("plain", *case[:3]) for name, case in CASES.items()}
    dist.init_process_group("gloo")
    lines = ["| the script has | onecopy | FSDP2 |", "|---|---|---|"]
    for name, case in CASES.items():
        ours, theirs = (cell(way, plain[name], *case[:3]) for way in (case[3], "FSDP2"))
        lines.append(f"| {name} | {case[3]}: {ours} | {theirs} |")
        dist.barrier()
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}\n\n" + "\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
