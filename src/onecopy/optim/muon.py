"""``Muon`` with the Newton-Schulz iteration on stacks of matrices of equal shape.

One step of a parameter group:

1. momentum: one call for all matrices updates the momentum buffers and computes the updates.
2. stack: matrices of one shape form a stack.
3. orthogonalise: the iteration runs on a whole stack.
4. apply: one call for each stack changes the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.common.torch_private import add_to_each, interpolate_each, interpolated, multiply_each

STACKED_ON_CPU = 128 * 128
"""On the CPU, matrices with more elements are orthogonalised one by one: there a stack of them takes longer."""

ADJUSTMENTS = (None, "original", "match_rms_adamw")

OWN_OPTIONS: dict[str, Any] = {"split": 1, "stack_bytes": 64 << 20}
"""The options that ``torch.optim.Muon`` does not have, with the values that its state dicts are loaded with."""


class Muon(Optimizer):
    """Muon for hidden weight matrices, with the arguments, state and results of :class:`torch.optim.Muon`.

    Matrices of one shape are orthogonalised together, which takes fewer kernels. On the CPU only small matrices are, so
    that no step takes longer. The result of a matrix that is alone equals torch's bit by bit. In a stack it differs by
    the rounding of bfloat16. State dicts go from each class to the other.

    Args:
        params: parameters of two or more dimensions. The dimensions after the first are flattened into one.
        lr: the learning rate.
        weight_decay: the decoupled weight decay.
        momentum: the momentum factor.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: the three coefficients of the Newton-Schulz polynomial.
        eps: the smallest norm by which an update is divided.
        ns_steps: the number of iterations, less than 100.
        adjust_lr_fn: ``"original"`` (the default) or ``"match_rms_adamw"``: how the learning rate follows the shape.
        split: the number of equal parts into which the rows of each matrix are split, to orthogonalise each part by
            itself: 3 for a fused query, key and value weight, or the number of heads.
        stack_bytes: the most bytes of one stack. A step needs a few times as much extra memory.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: int = 1,
        stack_bytes: int = OWN_OPTIONS["stack_bytes"],
    ) -> None:
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": split,
            "stack_bytes": stack_bytes,
        }
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, after its options and the shapes of its parameters are checked.

        Args:
            param_group: a dict with ``params`` and the group's options.
        """
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1], len(self.param_groups) - 1)
        except ValueError:
            del self.param_groups[-1]
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state, also one of ``torch.optim.Muon``."""
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in OWN_OPTIONS.items():
                group.setdefault(name, value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: re-evaluates the model and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                self._step_group(group, params)
        return loss

    def _step_group(self, group: dict[str, Any], params: Sequence[Tensor]) -> None:
        # 1. momentum
        gradients = [_checked_gradient(param) for param in params]
        for param, gradient in zip(params, gradients, strict=True):
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(gradient)
        buffers = [self.state[param]["momentum_buffer"] for param in params]
        interpolate_each(buffers, gradients, 1 - group["momentum"])
        updates = interpolated(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        # 2. stack
        lr = float(group["lr"])
        matrices = [
            matrix
            for param, update in zip(params, updates, strict=True)
            for matrix in zip(_matrices(param, group["split"]), _matrices(update, group["split"]), strict=True)
        ]
        for stack in _stacks(matrices, group["stack_bytes"]):
            targets = [param for param, _ in stack]
            # 3. orthogonalise
            found = _orthogonalised(
                [update for _, update in stack], group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            # 4. apply
            multiply_each(targets, 1 - lr * group["weight_decay"])
            add_to_each(targets, found, -lr * _adjustment(group["adjust_lr_fn"], *targets[0].shape))


def _check_group(group: dict[str, Any], position: int) -> None:
    """Raise ``ValueError`` if an option is out of range, or a parameter is no matrix or cannot be split."""
    for name in ("lr", "momentum", "weight_decay"):
        if isinstance(group[name], Tensor) and group[name].numel() != 1:
            raise ValueError(f"{name} of group {position} must be a number or a tensor with one element")
        if not group[name] >= 0.0:
            raise ValueError(f"{name} of group {position} must be at least 0, got {group[name]}")
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(
            f"adjust_lr_fn of group {position} must be one of {ADJUSTMENTS}, got {group['adjust_lr_fn']!r}"
        )
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients of group {position} must be three numbers, got {group['ns_coefficients']}")
    for name, most in (("ns_steps", 99), ("split", math.inf), ("stack_bytes", math.inf)):
        if not 1 <= group[name] <= most:
            raise ValueError(f"{name} of group {position} must be from 1 to {most}, got {group[name]}")
    for place, param in enumerate(group["params"]):
        name = repr(group["param_names"][place]) if "param_names" in group else f"{place} of group {position}"
        if param.ndim < 2 or param.is_complex():
            raise ValueError(
                f"Muon is for matrices, but parameter {name} has shape {tuple(param.shape)} and type {param.dtype}: "
                "give it to another optimizer, such as AdamW"
            )
        if param.shape[0] % group["split"]:
            raise ValueError(
                f"parameter {name} has {param.shape[0]} rows, which cannot be split into {group['split']} equal parts"
            )


def _checked_gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    if param.grad.layout is not torch.strided:
        raise RuntimeError("Muon does not support sparse gradients; make the embedding dense, or give it to SparseAdam")
    return param.grad


def _matrices(tensor: Tensor, split: int) -> tuple[Tensor, ...]:
    """The matrices of a parameter or its update, as views: one, or ``split`` equal ones."""
    return (tensor if tensor.ndim == 2 else tensor.view(len(tensor), -1)).chunk(split)


def _stacks(matrices: Sequence[tuple[Tensor, Tensor]], stack_bytes: int) -> Iterator[Sequence[tuple[Tensor, Tensor]]]:
    """Divide matrices and their updates into stacks of one shape, type and device, of bounded size."""
    kinds: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for param, update in matrices:
        kinds.setdefault((param.shape, param.dtype, param.device), []).append((param, update))
    for (shape, _, device), same in kinds.items():
        most = max(1, stack_bytes // max(1, shape.numel() * torch.bfloat16.itemsize))
        if device.type == "cpu" and shape.numel() > STACKED_ON_CPU:
            most = 1
        for start in range(0, len(same), most):
            yield same[start : start + most]


def _orthogonalised(
    updates: Sequence[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> Sequence[Tensor]:
    """The updates with singular values near 1, by a Newton-Schulz iteration in bfloat16.

    Args:
        updates: (rows, columns) each
        coefficients: of the polynomial
        steps: the number of iterations
        eps: the smallest norm by which an update is divided
    """
    a, b, c = coefficients
    alone = len(updates) == 1
    add_product = torch.addmm if alone else torch.baddbmm
    # (rows, columns), or (matrices, rows, columns)
    stack = updates[0].bfloat16() if alone else torch.stack([update.bfloat16() for update in updates])
    is_tall = stack.shape[-2] > stack.shape[-1]
    found = stack.mT if is_tall else stack
    # A matrix alone may be the momentum buffer itself.
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = found @ found.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        found = add_product(found, polynomial, found, beta=a)
    found = found.mT if is_tall else found
    return [found] if alone else found.unbind()


def _adjustment(name: str | None, rows: int, columns: int) -> float:
    """The factor by which the learning rate follows the shape of a matrix."""
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))
