"""State that is a tensor subclass made of other tensors: gathered, loaded and saved in parts, never quantised again.

The optimizer of ``tests/support/quantised.py`` stands for those of torchao. Where torchao and bitsandbytes are
installed, their optimizers are compared with the plain class, too.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import CheckpointMismatchError, PeerFailedError, ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint
from onecopy.checkpoint.convert import to_torch
from onecopy.common import tagged_json
from onecopy.common.nested_tensors import map_tensors
from onecopy.step.parameter_groups import check_tensor
from tests.support.harness import distributed
from tests.support.quantised import BlockMomentum, Int8Blocks, Momentum8bit, UnregisteredMomentum
from tests.support.state_dicts import gathered

WIDTH = 64
WRAPPED = "__bnb_optimizer_quant_state__"
LIMIT = 110.0
"""Seconds for a test; the first one imports the package of its class."""

CASES = [
    ("tests.support.quantised", "BlockMomentum"),
    ("torchao.optim", "AdamW8bit"),
    ("torchao.optim", "AdamW4bit"),
    ("torchao.optim", "AdamWFp8"),
    ("bitsandbytes.optim", "AdamW8bit"),
]


@pytest.fixture
def installed(module: str) -> None:
    pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed")


def class_of(module: str, name: str) -> Any:
    # torchao compiles its update; here it runs as it is, on both sides.
    torch.compiler.set_stance("force_eager")
    return getattr(importlib.import_module(module), name)


def model_of() -> nn.Module:
    """A model with two large weights and small other parameters."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.Linear(WIDTH, 3))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Make steps on data that is equal on all ranks."""
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()


def values_of(model: nn.Module) -> list[Any]:
    return [param.tolist() for param in model.parameters()]


def comparable(value: Any) -> Any:
    """A state dict with lists in place of tensors, and the class and parts of a tensor that consists of others."""

    def as_lists(tensor: Tensor) -> Any:
        if hasattr(type(tensor), "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return type(tensor).__name__, repr(context), [as_lists(getattr(tensor, name)) for name in names]
        return str(tensor.dtype), tuple(tensor.shape), tensor.detach().float().tolist()

    def unwrapped(values: dict[str, Any]) -> dict[str, Any]:
        """Without the inner dict into which bitsandbytes' ``state_dict`` puts some of the state."""
        found = {key: item for key, item in values.items() if key != WRAPPED}
        return dict(sorted({**found, **values.get(WRAPPED, {})}.items()))

    if isinstance(value, dict) and "state" in value:
        value = {**value, "state": {key: unwrapped(values) for key, values in value["state"].items()}}
    return map_tensors(value, as_lists)


def is_quantised(values: dict[str, Any]) -> bool:
    """Whether the state of a parameter has 8 bit or fewer per element."""
    tensors = [value for value in values.values() if isinstance(value, Tensor)]
    return any(hasattr(type(each), "__tensor_flatten__") or each.dtype is torch.uint8 for each in tensors)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("wrapper", [DistributedDataParallel, ShardedDataParallel])
@pytest.mark.parametrize(("module", "name"), CASES)
@distributed(2, 3, limit=LIMIT)
def test_the_state_dict_is_the_plain_one_in_both_directions(
    world_size: int, module: str, name: str, wrapper: type[nn.Module]
) -> None:
    """Train with the plain and the sharded class; each goes on from the other's state dict.

    All ranks have the same data, so that gradients are equal with any number of ranks, except for rounding.
    """
    optimizer_class = class_of(module, name)
    plain_model, inner = model_of(), model_of()
    plain = optimizer_class(plain_model.parameters())
    optimizer = ZeroRedundancyOptimizer(inner.parameters(), optimizer_class)
    model = wrapper(inner, optimizer) if wrapper is ShardedDataParallel else wrapper(inner)
    assert optimizer.layout.cut_params == ()
    exact = world_size == 2  # a mean of three equal gradients is rounded
    train(plain_model, plain, range(3))
    train(model, optimizer, range(3))
    ours, theirs = gathered(optimizer, to=world_size - 1), plain.state_dict()
    before = comparable(theirs)
    assert not exact or comparable(ours) == before
    assert not exact or values_of(inner) == values_of(plain_model)
    # As in the plain class: the two large weights are quantised, and nothing else is.
    assert [index for index, values in ours["state"].items() if is_quantised(values)] == [0, 2]
    plain.load_state_dict(ours)
    assert comparable(plain.state_dict()) == comparable(ours)
    optimizer.load_state_dict(theirs)
    assert comparable(gathered(optimizer)["state"]) == before["state"]
    train(plain_model, plain, range(3, 5))
    train(model, optimizer, range(3, 5))
    assert comparable(theirs) == before, "the loaded dict shares memory with the optimizer"
    assert not exact or values_of(inner) == values_of(plain_model)


@pytest.mark.usefixtures("installed", "fresh_processes")
@pytest.mark.parametrize(("module", "name"), CASES)
@distributed(3, limit=LIMIT)
def test_a_checkpoint_of_three_ranks_loads_on_two_and_into_a_plain_optimizer(
    world_size: int, module: str, name: str, tmp_path: Path
) -> None:
    assert world_size == 3
    optimizer_class, model = class_of(module, name), model_of()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class)
    train(model, optimizer, range(3))
    state = comparable(gathered(optimizer))
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    group = dist.new_group([0, 1])
    on_two = model_of()
    if dist.get_rank() < 2:
        fewer = ZeroRedundancyOptimizer(on_two.parameters(), optimizer_class, process_group=group)
        train(on_two, fewer, range(9, 10))
        checkpoint.load(tmp_path, model=on_two, optimizer=fewer, process_group=group)
        fewer.consolidate_state_dict(to=0)
        assert dist.get_rank() or comparable(fewer.state_dict()) == state
    plain_model = model_of()
    plain = optimizer_class(plain_model.parameters())
    checkpoint.load(tmp_path, model=plain_model, optimizer=plain)
    assert comparable(plain.state_dict()) == state
    train(plain_model, plain, range(3, 5))
    train(model, optimizer, range(3, 5))
    assert values_of(plain_model) == values_of(model)
    if dist.get_rank() == 0:
        to_torch(path, tmp_path / "all.pt")
        content = torch.load(tmp_path / "all.pt", weights_only=True)
        assert comparable(content["optimizer"]["state"]) == state["state"]


@distributed(2)
def test_dcp_gets_the_full_state_and_refuses_shards_by_name(world_size: int) -> None:
    model = model_of()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), BlockMomentum)
    train(model, optimizer, range(2))
    with pytest.raises((TypeError, PeerFailedError), match=r"parameter '\d\.weight' is a Int8Blocks|rank"):
        checkpoint.get_optimizer_state_dict(model, optimizer)
    options = StateDictOptions(full_state_dict=True)
    full = checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
    assert isinstance(full["state"]["0.weight"]["momentum"], Int8Blocks)
    before = comparable(gathered(optimizer))
    train(model, optimizer, range(2, 3))
    checkpoint.set_optimizer_state_dict(model, optimizer, full, options=options)
    assert comparable(gathered(optimizer)) == before


@distributed(2)
def test_a_class_that_is_not_a_safe_global_is_refused_by_name_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    model = nn.Linear(16, 16, bias=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), UnregisteredMomentum)
    model.weight.grad = torch.ones(16, 16)
    optimizer.step()
    error = TypeError if optimizer.layout.shards[0].owner == optimizer.rank else PeerFailedError
    for call in (optimizer.consolidate_state_dict, lambda: checkpoint.save(tmp_path, 1, optimizer=optimizer)):
        with pytest.raises(error, match=r"add_safe_globals\(\[UnregisteredBlocks\]\)|rank"):
            call()


@distributed(2)
def test_state_of_a_cut_parameter_is_refused_by_name_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    model = nn.Linear(64, 64, bias=False)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), BlockMomentum, shard_by="element", elementwise=True)
    model.weight.grad = torch.ones(64, 64)
    optimizer.step()
    cut = "is cut among ranks, but its state is a Int8Blocks"
    for call in (optimizer.consolidate_state_dict, lambda: checkpoint.save(tmp_path, 1, optimizer=optimizer)):
        with pytest.raises(TypeError, match=cut):
            call()
    plain = BlockMomentum(model.parameters())
    plain.step()
    with pytest.raises(TypeError, match=cut):
        optimizer.load_state_dict(plain.state_dict())
    checkpoint.save(tmp_path, 2, model=model, optimizer=plain)
    with pytest.raises(CheckpointMismatchError, match="of a subclass, of which a rank cannot"):
        checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="Momentum8bit is not elementwise"):
        ZeroRedundancyOptimizer(model.parameters(), Momentum8bit, elementwise=True)
    with pytest.raises(ValueError, match="parameter 'w' is a Int8Blocks, which consists of other tensors"):
        check_tensor(Int8Blocks.of(torch.ones(64)), "w")


@pytest.mark.parametrize("name", ["os.system", "torchao.optim.no_such.Class", "torch.Tensor", "builtins.eval"])
def test_a_file_cannot_name_a_class_that_is_not_a_safe_global(name: str) -> None:
    tree = ["subclass", [name, ["list", []], ["dict", []], ["list", []], ["list", []]]]
    with pytest.raises(TypeError, match="not among torch's safe globals"):
        tagged_json.decode(tree, [])
    with pytest.raises(TypeError, match="torch has no dtype 'load'"):
        tagged_json.decode(["dtype", ["load"]], [])


def test_parts_keep_their_order_dtype_and_strides() -> None:
    transposed = Int8Blocks.of(torch.randn(64, 64))
    transposed.codes = transposed.codes.t().contiguous().t()
    found: list[Tensor] = []
    tree = tagged_json.encode({"a": [transposed]}, found, "it")
    back = tagged_json.decode(tagged_json.loads(tagged_json.dumps(tree)), found)["a"][0]
    assert comparable(back) == comparable(transposed)
    assert back.codes.stride() == (1, 64)
