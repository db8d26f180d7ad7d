"""Models as people have them: a language model of transformers, unchanged, and compiled models on every level."""

from __future__ import annotations

import importlib
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import (
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from tests.support.data_parallel import (
    ADAMW,
    Case,
    Layers,
    Run,
    overlapped_run,
    plain_run,
    scattered_run,
    sharded_run,
)
from tests.support.harness import EVERYTHING, distributed
from tests.support.models import assert_equal, values

WORDS = 500


def gpt2() -> nn.Module:
    """GPT-2 of transformers, small, with random weights; its head is its embedding."""
    transformers = importlib.import_module("transformers")  # here, because it takes seconds
    size = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": WORDS}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**size, **without_dropout, bos_token_id=0, eos_token_id=0)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    return model


def gpt2_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    words = torch.randint(WORDS, (2, 16), generator=generator)
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


class PartlyCompiled(Layers):
    """A model with a compiled module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.middle: Any = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU()), backend="eager")


MakeModel = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int], Tensor]


def sharded(make: MakeModel, **options: Any) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
    torch.manual_seed(5)
    module = make()
    zero = ZeroRedundancyOptimizer(module.parameters(), AdamW, **ADAMW)
    return ShardedDataParallel(module, zero, **options), zero


@pytest.mark.parametrize("bucket_bytes", [8 << 20, 20_000], ids=["one bucket", "many"])
@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlapping the forward"])
@pytest.mark.parametrize(
    ("make", "loss"), [(gpt2, gpt2_loss), (PartlyCompiled, layers_loss)], ids=["GPT-2", "partly compiled"]
)
@distributed(2)
def test_training_equals_ddp(
    world_size: int, make: MakeModel, loss: Loss, overlap_forward: bool, bucket_bytes: int
) -> None:
    """The same losses and weights, bit by bit."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        if bucket_bytes < 1 << 20:  # so that there is something left to wait for behind the first module
            patch.setattr("onecopy.comm.limits.SEGMENT_GROWTH", 0)
        model, zero = sharded(make, overlap_forward=overlap_forward, bucket_bytes=bucket_bytes)
        torch.manual_seed(5)
        plain = DistributedDataParallel(make())
        optimizer = AdamW(plain.parameters(), **ADAMW)
        start = values(plain.parameters())
        for step in range(4):
            losses = []
            for each, stepping in ((model, zero), (plain, optimizer)):
                stepping.zero_grad()
                losses.append(loss(each, step))
                losses[-1].backward()
                stepping.step()
            assert torch.equal(*losses), f"loss of step {step}"
        assert_equal(model.parameters(), plain.parameters(), "weights")
        assert not any(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))


# Models compiled with the backend inductor, beside DDP with the same setting


COMPILER = os.environ.get("CXX", "g++")


class Net(nn.Module):
    """Two layers of 1 MB each. A class of its own, because the compiler skips the forward of nn.Sequential in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 512)
        self.middle = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.first(inputs))
        for layer in self.middle:
            hidden = torch.tanh(self.norm(layer(hidden)))
        outputs: Tensor = self.last(hidden)
        return outputs


def run_on(make: Callable[[Case], Run]) -> Callable[[Any], tuple[nn.Module, Optimizer]]:
    def made(model: Any) -> tuple[nn.Module, Optimizer]:
        # The smallest limit for DDP's buckets that the compiler takes. It breaks the graph at the bounds of buckets.
        run = make(Case(model=model, ddp={"bucket_cap_mb": 1}))
        return run.model, run.optimizer

    return made


LEVELS: dict[str, Callable[[Any], tuple[nn.Module, Optimizer]]] = {
    "level 1": run_on(sharded_run),
    "reduce_scatter_hook": run_on(scattered_run),
    "hook_with_zero_step": run_on(lambda case: overlapped_run(case, hook_with_zero_step)),
    "hook_with_zero_step_interleaved": run_on(lambda case: overlapped_run(case, hook_with_zero_step_interleaved)),
    "ShardedDataParallel": lambda make: sharded(make, bucket_bytes=1 << 18),
    "ShardedDataParallel, overlap_forward": lambda make: sharded(make, bucket_bytes=1 << 18, overlap_forward=True),
}
COMPILED = [(level, order) for level in LEVELS for order in ("before", "after")]


def trained(level: Callable[[Any], tuple[nn.Module, Optimizer]], order: str) -> tuple[list[Tensor], int]:
    """Train with the module compiled before or after it is wrapped, and with a compiled step if it is onecopy's.

    Returns the losses and, after each step, the parameters; and the number of graphs that were compiled.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled: Callable[[Any], Any] = lambda function: torch.compile(function, backend=counter)  # noqa: E731
    model, optimizer = level(Net if order == "after" else lambda: compiled(Net()))
    call = compiled(model) if order == "after" else model
    step = compiled(optimizer.step) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.step
    found = []
    for number in range(4):
        optimizer.zero_grad()
        loss = layers_loss(call, number)
        loss.backward()
        step()
        found += [loss.detach(), *values(model.parameters())]
    return found, counter.frame_count


@pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"inductor needs a C++ compiler, and there is no {COMPILER} here"
)
@pytest.mark.timeout(600)  # a compilation takes seconds
@pytest.mark.parametrize(("level", "order"), COMPILED if EVERYTHING else [("reduce_scatter_hook", "after")])
@distributed(2, limit=300.0)
def test_a_compiled_model_trains_as_under_ddp(world_size: int, level: str, order: str) -> None:
    of_level_3 = level.startswith("ShardedDataParallel")
    with warnings.catch_warnings(), torch._dynamo.config.patch(optimize_ddp=not of_level_3):
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        warnings.filterwarnings("ignore", message=".torch.jit.* is deprecated")  # inductor imports TorchScript
        expected, graphs = trained(run_on(plain_run), order)
        found, ours = trained(LEVELS[level], order)
    assert (graphs == 1) == of_level_3, "DDP breaks the graph at the bounds of its buckets"
    assert ours >= graphs, "with overlap_forward, hooks break the graph of a wrapper that is compiled"
    assert_equal(found, expected, "losses and parameters")
