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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from tests.support.harness import distributed, takes_long
from tests.support.models import assert_equal, assert_replicas_equal, values
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


# Weights as other code wants them


@pytest.mark.parametrize("overlap_forward", [False, True], ids=["", "overlapping the forward"])
@MODELS
@distributed(2)
def test_weights_load_into_the_model_itself(
    world_size: int, make: MakeModel, loss: Loss, overlap_forward: bool
) -> None:
    model, zero = sharded(make, overlap_forward=overlap_forward)
    train(model, zero, loss, 2)
    inner = model.module.state_dict()
    prefixed = model.state_dict()
    expected = {name: value.clone() for name, value in make_same(make).state_dict().items()}
    assert list(inner) == list(expected)
    assert list(prefixed) == [f"module.{name}" for name in expected]
    for state in (inner, {name.removeprefix("module."): value for name, value in prefixed.items()}):
        target = make_same(make)
        target.load_state_dict(state)
        assert_equal(target.parameters(), model.parameters(), "loaded")
        assert_equal(target.buffers(), model.buffers(), "loaded buffers")
    assert_replicas_equal(model.parameters())
    for state in (inner, prefixed):
        again, _ = sharded(make)
        again.load_state_dict(state)
        assert_equal(again.parameters(), model.parameters(), "loaded into a wrapped model")


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


@MODELS
@distributed(2)
def test_averages_of_the_weights_equal_those_under_ddp(world_size: int, make: MakeModel, loss: Loss) -> None:
    model, zero = sharded(make)
    plain = DistributedDataParallel(make_same(make))
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    averages = []
    for each, stepping in ((model, zero), (plain, optimizer)):
        average = AveragedModel(each.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for step in range(3):
            stepping.zero_grad()
            loss(each, step).backward()
            stepping.step()
            average.update_parameters(each.module)
        averages.append(average)
    assert_equal(averages[0].parameters(), averages[1].parameters(), "averages")
    assert not any(torch.equal(a, b) for a, b in zip(averages[0].parameters(), model.parameters(), strict=True))
    target = make_same(make)
    target.load_state_dict(averages[0].module.state_dict())
    model.load_state_dict(target.state_dict())
    assert_equal(model.parameters(), averages[1].parameters(), "averages in the wrapped model")


# What master weights are for


TOKENS, WIDTH, SENTENCES, LENGTH = 256, 64, 4, 8
STEPS = 300


class Block(nn.Module):
    """Attention to earlier tokens, then a layer of its own for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.attend(self.before(hidden)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.project(seen.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.think(self.between(hidden))
        return result


class SmallGPT(nn.Module):
    """Weights of order 1 in embedding and head, whose neighbours in bf16 are much further away than 1e-4."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.blocks(self.embed(tokens) + self.place.weight)
        logits: Tensor = self.head(self.last(hidden))
        return logits


def language() -> Tensor:
    """Sentences of a Markov chain: one batch for each step and rank."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.randn(TOKENS, TOKENS, generator=generator).mul(8).softmax(1)
    tokens = [torch.randint(TOKENS, (STEPS * 2 * SENTENCES,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(torch.multinomial(chain[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1).view(STEPS, 2, SENTENCES, LENGTH + 1)


def final_loss(sentences: Tensor, policy: MixedPrecision | None) -> float:
    """The mean of all ranks' losses in the last steps."""
    torch.manual_seed(1)
    inner = SmallGPT()
    zero = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.Adam, lr=1e-4)
    model = ShardedDataParallel(inner, zero, mixed_precision=policy)
    total = torch.zeros(())
    for step in range(STEPS):
        batch = sentences[step, dist.get_rank()]
        loss = functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        zero.zero_grad()
        loss.backward()
        zero.step()
        total += loss.detach() if step >= STEPS - 30 else 0.0
    dist.all_reduce(total)
    return total.item() / 60


@takes_long
@distributed(2, limit=110)
def test_master_weights_learn_like_float32_where_bf16_alone_does_not(world_size: int) -> None:
    sentences = language()
    fine = final_loss(sentences, None)
    mixed = final_loss(sentences, MixedPrecision(param_dtype=torch.bfloat16))
    coarse = final_loss(sentences, MixedPrecision(param_dtype=torch.bfloat16, master_weights=False))
    print(f"float32 {fine:.3f}, bf16 with masters {mixed:.3f}, bf16 {coarse:.3f}")
    assert mixed == pytest.approx(fine, rel=0.01)
    assert coarse > 1.1 * fine
