"""Models as people have them: a language model of transformers, a ResNet and a small GPT, unchanged, against DDP."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.harness import distributed
from tests.support.models import assert_equal, values
from tests.support.resnet import Bottleneck, convolution

ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
WORDS = 500


# The models


def gpt2() -> nn.Module:
    """GPT-2 of transformers, small, with random weights; its head is its embedding."""
    transformers = importlib.import_module("transformers")  # here, because it takes seconds
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        n_positions=32,
        vocab_size=WORDS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    assert model.get_parameter("lm_head.weight") is model.get_parameter("transformer.wte.weight")
    return model


def gpt2_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    words = torch.randint(WORDS, (2, 16), generator=generator)
    loss: Tensor = model(input_ids=words, labels=words).loss
    return loss


class ShortResNet(nn.Module):
    """The blocks of the ResNet-50 of these tests, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, 16, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.blocks = nn.Sequential(Bottleneck(16, 8, 1), Bottleneck(32, 8, 1), Bottleneck(32, 16, 2))
        self.classify = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.classify(self.blocks(self.stem(image)).mean((2, 3)))
        return logits


def resnet_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, classes = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)
    return functional.cross_entropy(model(images), classes)


class PartlyCompiled(nn.Module):
    """A model with a compiled module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 160)
        self.inner: Any = torch.compile(nn.Sequential(nn.Linear(160, 32), nn.GELU()), backend="eager")
        self.last = nn.Linear(32, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.inner(self.first(inputs)))
        return outputs


def compiled_loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    loss: Tensor = model(torch.randn(3, 8, generator=generator)).square().mean()
    return loss


MakeModel = Callable[[], nn.Module]
Loss = Callable[[nn.Module, int], Tensor]
MODELS = pytest.mark.parametrize(
    ("make", "loss"), [(gpt2, gpt2_loss), (ShortResNet, resnet_loss)], ids=["GPT-2", "ResNet"]
)


def make_same(make: MakeModel) -> nn.Module:
    torch.manual_seed(11)
    return make()


def sharded(make: MakeModel, **options: Any) -> tuple[ShardedDataParallel, ZeroRedundancyOptimizer]:
    inner = make_same(make)
    zero = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.AdamW, **ADAMW)
    return ShardedDataParallel(inner, zero, **options), zero


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def compare_with_ddp(make: MakeModel, loss: Loss, steps: int = 4, **options: Any) -> ShardedDataParallel:
    """Train both, and find the same losses and weights, bit by bit."""
    model, zero = sharded(make, **options)
    plain = DistributedDataParallel(make_same(make))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    start = values(plain.parameters())
    for step in range(steps):
        losses = []
        for each, stepping in ((model, zero), (plain, optimizer)):
            stepping.zero_grad()
            losses.append(loss(each, step))
            losses[-1].backward()
            stepping.step()
        assert torch.equal(*losses), f"loss of step {step}"
    assert_equal(model.parameters(), plain.parameters(), "weights")
    if dist.get_rank() == 0:  # the other ranks' running averages are replaced at the next forward
        assert_equal(model.buffers(), plain.buffers(), "buffers")
    assert not any(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    return model


# Training


@pytest.mark.parametrize("bucket_bytes", [8 << 20, 20_000], ids=["one bucket", "many"])
@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlapping the forward"])
@MODELS
@distributed(2)
def test_training_equals_ddp(
    world_size: int, make: MakeModel, loss: Loss, overlap_forward: bool, bucket_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if bucket_bytes < 1 << 20:  # so that there is something left to wait for behind the first module
            patch.setattr("onecopy.comm.limits.SEGMENT_GROWTH", 0)
        compare_with_ddp(make, loss, overlap_forward=overlap_forward, bucket_bytes=bucket_bytes)


@distributed(2)
def test_a_compiled_module_inside_trains_as_under_ddp(world_size: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # dynamo's own
        for overlap_forward in (False, True):
            compare_with_ddp(PartlyCompiled, compiled_loss, overlap_forward=overlap_forward)


@distributed(2)
def test_gpt2_in_mixed_precision_learns(world_size: int) -> None:
    model, zero = sharded(gpt2, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    before = gpt2_loss(model, 0).item()
    for _ in range(10):
        train(model, zero, gpt2_loss, 1)
    assert gpt2_loss(model, 0).item() < before - 0.5


@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlapping the forward"])
@distributed(2)
def test_save_pretrained_and_from_pretrained(world_size: int, tmp_path: Path, overlap_forward: bool) -> None:
    transformers = importlib.import_module("transformers")
    model, zero = sharded(gpt2, overlap_forward=overlap_forward)
    train(model, zero, gpt2_loss, 2)
    inner: Any = model.module
    inner.save_pretrained(tmp_path)  # rank 0 alone writes
    dist.barrier()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_equal(loaded.parameters(), model.parameters(), "from_pretrained")
    assert torch.equal(gpt2_loss(loaded.train(), 7), gpt2_loss(model, 7))
