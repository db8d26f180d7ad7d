"""Optimizer classes: which may be sharded by element, by parameter, or not at all."""

from __future__ import annotations

import pytest
import pytorch_optimizer
import schedulefree  # type: ignore[import-untyped]
import torch
from torch.optim import Optimizer

from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.step.optimizer_classes import ELEMENTWISE, check_class, check_options, is_elementwise
from tests.support.harness import distributed


class MyAdamW(torch.optim.AdamW):
    """A user's variation."""


class MyLBFGS(torch.optim.LBFGS):
    """A user's variation."""


class MyLamb(pytorch_optimizer.Lamb):
    """A user's variation."""


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


@pytest.mark.parametrize("optimizer_class", [*sorted(ELEMENTWISE, key=str), *NEVER_CUT])
def test_a_class_is_elementwise_if_it_is_known_or_declared(optimizer_class: type[Optimizer]) -> None:
    """That a known class updates a cut tensor as the whole one is tested by training, in ``test_parity.py``."""
    check_class(optimizer_class, ZeroRedundancyOptimizer)
    assert is_elementwise(optimizer_class, None) == (optimizer_class not in NEVER_CUT)
    assert is_elementwise(optimizer_class, True)
    assert not is_elementwise(optimizer_class, False)


COMBINING = [torch.optim.LBFGS, MyLBFGS, pytorch_optimizer.Prodigy, pytorch_optimizer.SAM]
COMBINING += [getattr(pytorch_optimizer, f"DAdapt{name}") for name in ("Adam", "AdaGrad", "Adan", "Lion", "SGD")]


@pytest.mark.parametrize("optimizer_class", COMBINING)
def test_a_class_that_combines_parameters_is_refused_with_the_reason(optimizer_class: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{optimizer_class.__name__} cannot be sharded exactly: it .*all "):
        check_class(optimizer_class, ZeroRedundancyOptimizer)


def test_lamb_is_refused_while_it_clips_by_the_norm_of_all_gradients() -> None:
    with pytest.raises(ValueError, match=r"Lamb with max_grad_norm.*clip_grad_norm_"):
        check_options(MyLamb([torch.ones(1)], pre_norm=True))
    check_options(pytorch_optimizer.Lamb([torch.ones(1)], max_grad_norm=0.0))


BFLOAT16 = torch.bfloat16


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
    # Where mixed precision would leave several dtypes.
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adafactor)
    coarse, fine = (MixedPrecision(param_dtype=BFLOAT16, master_weights=fine) for fine in (False, True))
    with pytest.raises(ValueError, match="Adafactor over several dtypes"):
        ShardedDataParallel(module, optimizer, mixed_precision=coarse)
    assert {param.dtype for param in module.parameters()} == {torch.float32}
    ShardedDataParallel(module, optimizer, mixed_precision=fine)
