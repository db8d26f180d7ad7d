"""State that is a tensor subclass made of other tensors: gathered, loaded and saved in parts, never quantised again.

The optimizer of ``tests/support/quantised.py`` stands for those of torchao. ``tests/step/test_low_bit_optimizers.py``
runs these where torchao is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.nn.parallel import DistributedDataParallel

from onecopy import CheckpointMismatchError, PeerFailedError, ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint
from onecopy.checkpoint.convert import to_torch
from onecopy.common import tagged_json
from onecopy.step.parameter_groups import check_tensor
from tests.support.harness import distributed
from tests.support.low_bit import (
    check_both_directions,
    check_other_numbers_of_ranks,
    comparable,
    gathered,
    model_of,
    train,
)
from tests.support.quantised import BlockMomentum, Int8Blocks, Momentum8bit, UnregisteredMomentum


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, ShardedDataParallel])
@distributed(2, 3)
def test_the_state_dict_is_the_plain_one_in_both_directions(world_size: int, wrapper: type[nn.Module]) -> None:
    ours = check_both_directions(BlockMomentum, wrapper, to=world_size - 1)
    # The same parameters are quantised: those of a layer are, its bias is not.
    assert [type(state["momentum"]) for state in ours["state"].values()] == [Int8Blocks, Tensor] * 2 + [Tensor] * 2


@distributed(3)
def test_a_checkpoint_of_three_ranks_loads_on_two_and_into_a_plain_optimizer(world_size: int, tmp_path: Path) -> None:
    assert world_size == 3
    check_other_numbers_of_ranks(BlockMomentum, tmp_path)


def test_a_checkpoint_converts_to_a_file(tmp_path: Path) -> None:
    model = model_of()
    optimizer = BlockMomentum(model.parameters())
    train(model, optimizer, range(2))
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    to_torch(path, tmp_path / "all.pt")
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert comparable(content["optimizer"]["state"]) == comparable(optimizer.state_dict()["state"])


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
    before = comparable(gathered(optimizer, 0))
    train(model, optimizer, range(2, 3))
    checkpoint.set_optimizer_state_dict(model, optimizer, full, options=options)
    assert comparable(gathered(optimizer, 0)) == before


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


def test_a_parameter_that_consists_of_other_tensors_is_refused() -> None:
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
