"""Muon for the matrices and AdamW for the rest: plain DDP, onecopy at every level, and other projects, in one run.

torchrun --standalone --nproc-per-node 2 benchmarks/matrix_optimizers.py --rounds 15 --peers FOLDER

The variants take turns. ``update`` is the time from the end of the backward pass to the end of the step, and ``step``
that of a whole iteration; both are ratios to plain DDP with two plain optimizers, the median over the rounds. ``sent``
is the bytes that all ranks send in an iteration, divided by (N - 1) times the bytes of the model; it needs a network
namespace: ``unshare --net --map-root-user sh -c 'ip link set lo up; torchrun ...'``. FOLDER has checkouts of other
projects (KellerJordan/Muon as ``Muon``, karpathy/nanochat, microsoft/dion). One that does not run here says why.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machines import sent_bytes
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils._pytree import tree_leaves
from variants import GPT, Sizes, loss_of
from worker import error_of

import onecopy.optim
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_scatter_hook

SIZES = Sizes(vocabulary=2048, width=320, head=2048, depth=8, batch=2)
PLAIN = "DDP, torch.optim.Muon + AdamW"
MUON: dict[str, Any] = {"lr": 2e-2, "momentum": 0.95, "weight_decay": 0.0}
ADAMW: dict[str, Any] = {"lr": 3e-4, "fused": True}


@dataclass
class Variant:
    """A variant in training and its measurements."""

    model: nn.Module
    step: Callable[[], object]
    state: Callable[[], Any]
    finish: Callable[[], object] = lambda: None
    update: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)


Make = Callable[[GPT], Variant]


def groups_of(model: nn.Module, muon: Any) -> list[dict[str, Any]]:
    """The parameter groups of one object with two classes."""
    return list(onecopy.optim.matrix_groups(model, matrix={"optimizer_class": muon, **MUON}, other={}))


def divided(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrices that Muon updates, and the other parameters."""
    matrices, others = ([param for _, param in group["params"]] for group in groups_of(model, torch.optim.Muon))
    return matrices, others


def plain(model: GPT) -> Variant:
    """Plain DDP and two plain optimizers."""
    matrices, others = divided(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizers = [torch.optim.Muon(matrices, **MUON), AdamW(others, **ADAMW)]
    return Variant(ddp, lambda: [each.step() for each in optimizers], lambda: [each.state for each in optimizers])


def ours(level: int, muon: Any) -> Make:
    """One object with two classes, at a level."""

    def make(model: GPT) -> Variant:
        groups = groups_of(model, muon)
        zero = ZeroRedundancyOptimizer(groups, AdamW, parameters_as_bucket_view=level == 1, **ADAMW)
        if level == 3:
            sharded = ShardedDataParallel(model, zero)
            return Variant(sharded, zero.step, lambda: zero.optim.state, sharded.wait)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if level == 2:
            ddp.register_comm_hook(zero, reduce_scatter_hook)
        return Variant(ddp, zero.step, lambda: zero.optim.state)

    return make


def keller_jordan(peers: Path) -> Make:
    """DDP, and the optimizer of KellerJordan/Muon, which updates matrices in turns and sends them."""

    def make(model: GPT) -> Variant:
        sys.path.insert(0, str(peers / "Muon"))
        from muon import MuonWithAuxAdam  # type: ignore[import-not-found]

        matrices, others = divided(model)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        groups = [{"params": matrices, "lr": 2e-2, "use_muon": True}, {"params": others, "use_muon": False}]
        optimizer = MuonWithAuxAdam(groups)
        return Variant(ddp, optimizer.step, lambda: optimizer.state)

    return make


def nanochat(peers: Path) -> Make:
    """The optimizer of nanochat, which reduces the gradients itself, in place of DDP."""

    def make(model: GPT) -> Variant:
        sys.path.insert(0, str(peers / "nanochat"))
        from nanochat.optim import MuonAdamW  # type: ignore[import-not-found]

        matrices, others = divided(model)
        adamw = {"kind": "adamw", "lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
        muon = {"kind": "muon", "lr": 2e-2, "momentum": 0.95, "ns_steps": 5, "beta2": 0.95, "weight_decay": 0.0}
        shapes = dict.fromkeys(param.shape for param in matrices)
        groups: list[dict[str, Any]] = [{"params": others, **adamw}]
        groups += [{"params": [each for each in matrices if each.shape == shape], **muon} for shape in shapes]
        optimizer = MuonAdamW(groups)
        return Variant(model, optimizer.step, lambda: optimizer.state)

    return make


def dion(peers: Path) -> Make:
    """DDP, the Muon of microsoft/dion, and AdamW."""

    def make(model: GPT) -> Variant:
        sys.path.insert(0, str(peers / "dion"))
        from dion import Muon  # type: ignore[import-not-found]

        matrices, others = divided(model)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
        muon = Muon(matrices, distributed_mesh=dist.group.WORLD, lr=2e-2, weight_decay=0.0, nesterov=True)
        optimizers: list[Any] = [muon, AdamW(others, **ADAMW)]
        return Variant(ddp, lambda: [each.step() for each in optimizers], lambda: [each.state for each in optimizers])

    return make


def variants(peers: Path | None) -> dict[str, Make]:
    """All variants by name; the yardstick is the first."""
    found: dict[str, Make] = {PLAIN: plain}
    for level in (1, 2, 3):
        found[f"onecopy, level {level}, torch.optim.Muon"] = ours(level, torch.optim.Muon)
        found[f"onecopy, level {level}, onecopy.optim.Muon"] = ours(level, onecopy.optim.Muon)
    if peers is not None:
        found["DDP, KellerJordan/Muon"] = keller_jordan(peers)
        found["nanochat"] = nanochat(peers)
        found["DDP, microsoft/dion + AdamW"] = dion(peers)
    return found


def iterate(variant: Variant, number: int) -> tuple[float, float]:
    """Run one iteration; return the seconds of the update and of all of it."""
    tokens = SIZES.tokens(dist.get_rank(), number)
    dist.barrier()
    start = time.perf_counter()
    variant.model.zero_grad()
    loss_of(variant.model, tokens).backward()
    dist.barrier()
    middle = time.perf_counter()
    variant.step()
    variant.finish()
    end = time.perf_counter()
    return end - middle, end - start


def state_bytes(variant: Variant) -> int:
    """The bytes of the optimizer state on the rank with the most."""
    tensors = {each.untyped_storage().data_ptr(): each for each in tree_leaves(_plain(variant.state()))}
    found = torch.tensor(sum(each.untyped_storage().nbytes() for each in tensors.values()))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def _plain(state: Any) -> list[Tensor]:
    mappings = state if isinstance(state, list) else [state]
    values = [value for mapping in mappings for of_param in mapping.values() for value in of_param.values()]
    return [value for value in values if isinstance(value, Tensor)]


def measured(made: dict[str, Variant], rounds: int) -> None:
    """Measure all variants in turns; the first round warms up."""
    for number in range(rounds + 1):
        for variant in made.values():
            sent = sent_bytes("lo")
            update, whole = iterate(variant, number)
            dist.barrier()
            if number:
                variant.update.append(update)
                variant.whole.append(whole)
                variant.sent.append(sent_bytes("lo") - sent)


@contextlib.contextmanager
def collected(errors: dict[str, str], name: str) -> Iterator[None]:
    """Keep the text of an error, so that the other variants are measured."""
    try:
        yield
    except Exception as error:
        errors[name] = error_of(error)


def main() -> None:
    """Measure and print a table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each variant")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    origin, made, errors = SIZES.make(), dict[str, Variant](), dict[str, str]()
    for name, make in variants(options.peers).items():
        with collected(errors, name):
            variant = make(copy.deepcopy(origin))
            iterate(variant, 0)
            made[name] = variant
    measured(made, options.rounds)
    yardstick, ranks = made[PLAIN], dist.get_world_size()
    nbytes = sum(param.nbytes for param in origin.parameters())
    for name, variant in made.items():
        row: dict[str, float | str] = {
            "variant": name,
            "update": ratio(variant.update, yardstick.update),
            "step": ratio(variant.whole, yardstick.whole),
            "sent": statistics.median(variant.sent) / nbytes / max(1, ranks - 1),
            "state MB": state_bytes(variant) / 1e6,
            "update ms": 1e3 * statistics.median(variant.update),
        }
        if dist.get_rank() == 0:
            print(json.dumps(row) if options.json else "  ".join(shown(each) for each in row.values()), flush=True)
    if dist.get_rank() == 0:
        for name, text in errors.items():
            print(f"{name:<45}  did not run: {text}")
    dist.barrier()
    dist.destroy_process_group()


def ratio(values: list[float], of: list[float]) -> float:
    """The median of the ratios round by round."""
    return statistics.median(value / other for value, other in zip(values, of, strict=True))


def shown(value: float | str) -> str:
    """A cell of the table."""
    return f"{value:<45}" if isinstance(value, str) else f"{value:8.3f}"


if __name__ == "__main__":
    main()
