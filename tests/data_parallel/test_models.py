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
from torch.optim import AdamW

from onecopy import hook_with_zero_step, hook_with_zero_step_interleaved
from tests.support.data_parallel import (
    ADAMW,
    Case,
    Layers,
    Run,
    layers_loss,
    overlapped_run,
    plain_run,
    scattered_run,
    sharded_run,
    side_of,
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


@pytest.mark.parametrize("bucket_bytes", [8 << 20, 20_000], ids=["one bucket", "many"])
@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlapping the forward"])
@pytest.mark.parametrize(
    ("make", "loss"), [(gpt2, gpt2_loss), (PartlyCompiled, layers_loss)], ids=["GPT-2", "partly compiled"]
)
@distributed(2)
def test_training_equals_ddp(
    world_size: int,
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    overlap_forward: bool,
    bucket_bytes: int,
) -> None:
    """The same losses and weights, bit by bit."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        if bucket_bytes < 1 << 20:  # so that there is something left to wait for behind the first module
            patch.setattr("onecopy.comm.limits.SEGMENT_GROWTH", 0)
        options: dict[str, Any] = {"overlap_forward": overlap_forward, "bucket_bytes": bucket_bytes}
        ours, plain = (side_of(which, make, AdamW, ADAMW, **options) for which in (True, False))
        start = values(plain.params)
        for step in range(4):
            losses = []
            for run in (ours, plain):
                run.optimizer.zero_grad()
                losses.append(loss(run.model, step))
                losses[-1].backward()
                run.update()
            assert torch.equal(*losses), f"loss of step {step}"
        assert_equal(ours.params, plain.params, "weights")
        assert not any(torch.equal(a, b) for a, b in zip(start, ours.params, strict=True))


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


def case_of(model: Callable[[], nn.Module]) -> Case:
    # The smallest limit for DDP's buckets that the compiler takes. It breaks the graph at the bounds of buckets.
    return Case(model=model, ddp={"bucket_cap_mb": 1})


def level_3(model: Callable[[], nn.Module], **options: Any) -> Run:
    return side_of(True, model, AdamW, ADAMW, bucket_bytes=1 << 18, **options)


LEVELS: dict[str, Callable[[Any], Run]] = {
    "level 1": lambda model: sharded_run(case_of(model)),
    "reduce_scatter_hook": lambda model: scattered_run(case_of(model)),
    "hook_with_zero_step": lambda model: overlapped_run(case_of(model), hook_with_zero_step),
    "hook_with_zero_step_interleaved": lambda model: overlapped_run(case_of(model), hook_with_zero_step_interleaved),
    "ShardedDataParallel": level_3,
    "ShardedDataParallel, overlap_forward": lambda model: level_3(model, overlap_forward=True),
}
COMPILED = [(level, order) for level in LEVELS for order in ("before", "after")]


def trained(level: Callable[[Any], Run], order: str) -> tuple[list[Tensor], int]:
    """Train with the module compiled before or after it is wrapped, and with a compiled step if it is onecopy's.

    Returns the losses and, after each step, the parameters; and the number of graphs that were compiled.
    """
    torch.compiler.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled: Callable[[Any], Any] = lambda function: torch.compile(function, backend=counter)  # noqa: E731
    run = level(Net if order == "after" else lambda: compiled(Net()))
    call = compiled(run.model) if order == "after" else run.model
    step = compiled(run.optimizer.step) if run.zeros else run.optimizer.step
    found = []
    for number in range(4):
        run.optimizer.zero_grad()
        loss = layers_loss(call, number)
        loss.backward()
        step()
        found += [loss.detach(), *values(run.params)]
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
        expected, graphs = trained(lambda model: plain_run(case_of(model)), order)
        found, ours = trained(LEVELS[level], order)
    assert (graphs == 1) == of_level_3, "DDP breaks the graph at the bounds of its buckets"
    assert ours >= graphs, "with overlap_forward, hooks break the graph of a wrapper that is compiled"
    assert_equal(found, expected, "losses and parameters")
