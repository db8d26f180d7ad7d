"""Optimizer classes: which may be sharded by element, by parameter, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import pytorch_optimizer
import schedulefree  # type: ignore[import-untyped]
import torch
from torch.optim import Optimizer

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.step.optimizer_classes import check_class, check_dtypes, check_options, is_elementwise
from tests.support.harness import distributed


class MyAdamW(torch.optim.AdamW):
    """A user's variation."""


class MyLBFGS(torch.optim.LBFGS):
    """A user's variation."""


KNOWN_ELEMENTWISE = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
]
NEVER_CUT = [
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
    schedulefree.AdamWScheduleFree,
    pytorch_optimizer.Lamb,
    pytorch_optimizer.LARS,
    pytorch_optimizer.Lion,
    MyAdamW,
]


@pytest.mark.parametrize("optimizer_class", [*KNOWN_ELEMENTWISE, *NEVER_CUT])
def test_a_class_is_elementwise_if_it_is_known_or_declared(optimizer_class: type[Optimizer]) -> None:
    check_class(optimizer_class, ZeroRedundancyOptimizer)
    assert is_elementwise(optimizer_class, None) == (optimizer_class in KNOWN_ELEMENTWISE)
    assert is_elementwise(optimizer_class, True)
    assert not is_elementwise(optimizer_class, False)


@pytest.mark.parametrize("optimizer_class", KNOWN_ELEMENTWISE)
def test_a_known_class_updates_a_cut_tensor_bitwise_as_the_whole_one(optimizer_class: type[Optimizer]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(1_000)
    cut = [whole[:128].clone(), whole[128:].clone()]
    plain, sharded = optimizer_class([whole], lr=0.1), optimizer_class(cut, lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        whole.grad = torch.randn(1_000)
        cut[0].grad, cut[1].grad = whole.grad[:128].clone(), whole.grad[128:].clone()
        plain.step()
        sharded.step()
        assert whole.equal(torch.cat(cut))


COMBINING = [
    torch.optim.LBFGS,
    MyLBFGS,
    pytorch_optimizer.Prodigy,
    pytorch_optimizer.DAdaptAdam,
    pytorch_optimizer.DAdaptAdaGrad,
    pytorch_optimizer.DAdaptAdan,
    pytorch_optimizer.DAdaptLion,
    pytorch_optimizer.DAdaptSGD,
    pytorch_optimizer.SAM,
]


@pytest.mark.parametrize("optimizer_class", COMBINING)
def test_a_class_that_combines_parameters_is_refused_with_the_reason(optimizer_class: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{optimizer_class.__name__} cannot be sharded exactly: it .*all "):
        check_class(optimizer_class, ZeroRedundancyOptimizer)


class MyLamb(pytorch_optimizer.Lamb):
    """A user's variation."""


GLOBALLY_CLIPPING: dict[str, Callable[[], Optimizer]] = {
    "as a default": lambda: pytorch_optimizer.Lamb([torch.ones(1)], pre_norm=True, max_grad_norm=1.0),
    "unless told otherwise": lambda: pytorch_optimizer.Lamb([torch.ones(1)], pre_norm=True),
    "as a default that a group cannot change": lambda: pytorch_optimizer.Lamb(
        [{"params": [torch.ones(1)], "max_grad_norm": 0.0}], pre_norm=True, max_grad_norm=1.0
    ),
    "in a subclass": lambda: MyLamb([torch.ones(1)], pre_norm=True, max_grad_norm=1.0),
}


@pytest.mark.parametrize("kind", GLOBALLY_CLIPPING)
def test_lamb_is_refused_while_it_clips_by_the_norm_of_all_gradients(kind: str) -> None:
    with pytest.raises(ValueError, match=r"Lamb with max_grad_norm.*clip_grad_norm_"):
        check_options(GLOBALLY_CLIPPING[kind]())


def test_lamb_without_global_clipping_is_accepted() -> None:
    check_class(pytorch_optimizer.Lamb, ZeroRedundancyOptimizer)
    check_options(pytorch_optimizer.Lamb([torch.ones(1)], max_grad_norm=0.0))


class MyAdafactor(torch.optim.Adafactor):
    """A user's variation."""


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adafactor, MyAdafactor])
def test_adafactor_over_several_dtypes_in_a_group_is_refused(optimizer_class: type[torch.optim.Adafactor]) -> None:
    """torch takes the epsilon of the first parameter's dtype for all parameters of the group."""
    optimizer = optimizer_class([{"params": [torch.ones(2)]}, {"params": [torch.ones(2)]}])
    with pytest.raises(
        ValueError, match=r"Adafactor over .*\(parameter group 1: torch.bfloat16, torch.float32\).*eps="
    ):
        check_dtypes(optimizer, [(0, FLOAT32), (1, FLOAT32), (1, BFLOAT16)])
    check_dtypes(optimizer, [(0, FLOAT32), (1, BFLOAT16), (1, BFLOAT16)])
    optimizer.param_groups[1]["eps"] = (1e-7, 1e-3)
    check_dtypes(optimizer, [(0, FLOAT32), (1, FLOAT32), (1, BFLOAT16)])


def test_another_class_over_several_dtypes_is_accepted() -> None:
    check_dtypes(torch.optim.AdamW([torch.ones(1)]), [(0, FLOAT32), (0, BFLOAT16)])


@distributed(2)
def test_adafactor_is_refused_on_all_ranks_although_each_owns_one_dtype(world_size: int) -> None:
    wide, narrow = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False).bfloat16()
    params = [*wide.parameters(), *narrow.parameters()]
    with pytest.raises(ValueError, match="Adafactor over several dtypes"):
        ZeroRedundancyOptimizer(params, torch.optim.Adafactor)
    ZeroRedundancyOptimizer(params, torch.optim.Adafactor, master_weights=True)
    ZeroRedundancyOptimizer(params, torch.optim.Adafactor, eps=(1e-7, 1e-3))
    optimizer = ZeroRedundancyOptimizer(wide.parameters(), torch.optim.Adafactor)
    optimizer.add_param_group({"params": list(narrow.parameters())})
    with pytest.raises(ValueError, match=r"parameter group 2: torch.bfloat16, torch.float32"):
        optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True), torch.ones(2, dtype=BFLOAT16)]})
    assert len(optimizer.param_groups) == len(optimizer.optim.param_groups) == 2


@distributed(2)
def test_adafactor_is_refused_where_mixed_precision_would_leave_several_dtypes(world_size: int) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adafactor)
    with pytest.raises(ValueError, match="Adafactor over several dtypes"):
        ShardedDataParallel(
            module, optimizer, mixed_precision=MixedPrecision(param_dtype=BFLOAT16, master_weights=False)
        )
    assert {param.dtype for param in module.parameters()} == {FLOAT32}
    ShardedDataParallel(module, optimizer, mixed_precision=MixedPrecision(param_dtype=BFLOAT16))
