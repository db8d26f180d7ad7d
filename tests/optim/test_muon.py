"""``onecopy.optim.Muon`` beside ``torch.optim.Muon``: values, state dicts, stacks and errors, without processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from onecopy.optim import Muon, muon

ROUNDING: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2}
"""Of an orthogonalised matrix in bfloat16, relative to its largest value."""

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "alone": [(40, 70)],
    "tall": [(70, 40)],
    "stacked": [(24, 40)] * 5,
    "stacked, tall": [(40, 24)] * 5,
    "mixed": [(24, 40), (40, 24), (24, 40), (8, 8), (300, 300), (300, 300)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "without nesterov": {"nesterov": False},
    "adjusted": {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0, "ns_steps": 3},
    "tensor lr": {"lr": torch.tensor(0.05)},
}


def params_of(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    torch.manual_seed(3)
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def train(optimizer: torch.optim.Optimizer, steps: int = 4, seed: int = 0) -> list[Tensor]:
    """Step with random gradients; the parameters afterwards."""
    torch.manual_seed(seed)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_it_trains_as_torchs_class(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    expected = train(torch.optim.Muon(params_of(shapes), **options))
    found = train(Muon(params_of(shapes), **options))
    alone = Muon(params_of(shapes), stack_bytes=1, **options)  # stacks of one
    for ours, each, theirs in zip(found, train(alone), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **ROUNDING)
        assert torch.equal(each, theirs)


def test_state_dicts_go_both_ways() -> None:
    classes: list[Any] = [torch.optim.Muon, Muon]
    for first, second in (classes, classes[::-1]):
        params = params_of(SHAPES["mixed"])
        whole = first(params, **({"stack_bytes": 1} if first is Muon else {}))
        train(whole, steps=2)
        begun = second([param.detach().clone().requires_grad_() for param in params])
        begun.load_state_dict(copy.deepcopy(whole.state_dict()))
        if second is Muon:
            assert begun.param_groups[0]["split"] == 1
            begun.param_groups[0]["stack_bytes"] = 1
        assert all(map(torch.equal, train(begun, seed=1), train(whole, seed=1)))


def test_more_dimensions_are_flattened_and_rows_are_split() -> None:
    (kernel,), (fused,) = params_of([(8, 4, 3, 3)]), params_of([(48, 16)])
    flat = kernel.detach().view(8, 36).clone().requires_grad_()
    parts = [part.clone().requires_grad_() for part in fused.detach().chunk(3)]
    torch.manual_seed(0)
    kernel.grad, fused.grad = torch.randn(kernel.shape), torch.randn(fused.shape)
    flat.grad = kernel.grad.view(8, 36).clone()
    for part, gradient in zip(parts, fused.grad.chunk(3), strict=True):
        part.grad = gradient.clone()
    Muon([kernel]).step()
    torch.optim.Muon([flat]).step()
    assert torch.equal(kernel.view(8, 36), flat)
    Muon([fused], split=3).step()
    torch.optim.Muon(parts).step()
    torch.testing.assert_close(fused, torch.cat(parts), **ROUNDING)


def test_a_stack_is_bounded_and_a_missing_gradient_is_skipped() -> None:
    updates = [(torch.zeros(16, 16), torch.zeros(16, 16)) for _ in range(7)]
    assert [len(stack) for stack in muon._stacks(updates, 3 * 16 * 16 * 2)] == [3, 3, 1]
    params = params_of([(4, 4)] * 2)
    params[0].grad = torch.ones(4, 4)
    optimizer = Muon(params)
    before = params[1].detach().clone()
    optimizer.step()
    assert torch.equal(params[1], before)
    assert params[1] not in optimizer.state


@pytest.mark.parametrize(
    ("shape", "options", "text"),
    [
        ((4,), {}, r"parameter 0 of group 0 has shape \(4,\)"),
        ((4, 4), {"split": 3}, "4 rows, which cannot be split into 3"),
        ((4, 4), {"lr": -1.0}, "lr of group 0 must be at least 0"),
        ((4, 4), {"momentum": float("nan")}, "momentum of group 0"),
        ((4, 4), {"ns_steps": 100}, "ns_steps of group 0 must be from 1 to 99"),
        ((4, 4), {"adjust_lr_fn": "other"}, "adjust_lr_fn of group 0"),
        ((4, 4), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
    ],
)
def test_bad_arguments_are_refused_by_name_and_no_group_is_added(
    shape: tuple[int, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        Muon([torch.zeros(shape, requires_grad=True)], **options)
    optimizer = Muon([("weight", torch.zeros(4, 4))])
    with pytest.raises(ValueError, match="parameter 'bias' has shape"):
        optimizer.add_param_group({"params": [("bias", torch.zeros(4))]})
    assert len(optimizer.param_groups) == 1
