"""The operation that trains: backward passes and a step, in all the ways of a training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.fuzz.operations import Lines, Operation

if TYPE_CHECKING:
    from tests.fuzz.programs import Program


@dataclass(frozen=True)
class Train(Operation):
    """Backward passes and a step.

    Attributes:
        zero: what becomes of earlier gradients: ``none``, ``zeros``, ``kept``; with ``after``, these are let go too.
        unsynchronised: how many passes under ``no_sync`` come first.
        freeze_between: a part that is frozen after these, and trained again after the step.
        synchronised: how many passes that synchronise.
        closure: whether the one pass runs in a closure.
        max_norm: what gradients are clipped to; 0 is not at all.
        norm_type: the norm.
        by_torch: whether torch's function clips, and not the optimizer's method.
        steps: how many times ``step`` is called.
        in_evaluation: whether the model is in evaluation mode meanwhile.
        scale: the scale of a GradScaler, a power of two; 0 is none.
        edited: a part whose gradients are edited before the step.
        edit: what is done to them.
    """

    zero: str = "none"
    unsynchronised: int = 0
    freeze_between: str = ""
    synchronised: int = 1
    closure: bool = False
    max_norm: float = 0.0
    norm_type: str = "2.0"
    by_torch: bool = True
    steps: int = 1
    in_evaluation: bool = False
    scale: int = 0
    edited: str = ""
    edit: str = "p.grad.mul_(0.5)"

    @property
    def about(self) -> str:
        """The part that is frozen in between, or whose gradients are edited."""
        return self.freeze_between or self.edited

    @property
    def features(self) -> frozenset[str]:
        """What not every level can do."""
        present = {
            "gradients that add up over steps": self.zero == "kept",
            "several synchronising passes": self.synchronised > 1,
            "a closure": self.closure,
            "clipping": self.max_norm > 0,
            "clipping by the largest": self.max_norm > 0 and "inf" in self.norm_type,
            "a second step": self.steps > 1,
            "a pass without a step": self.steps == 0,
            "evaluation mode": self.in_evaluation,
            "a GradScaler": self.scale > 0,
            "no_sync": self.unsynchronised > 0,
            "freezing after no_sync": bool(self.freeze_between),
            "edited gradients": bool(self.edited),
        }
        return frozenset(name for name, holds in present.items() if holds)

    def lines(self, number: int, program: Program) -> Lines:
        """Python."""
        body = self._with_closure(number) if self.closure else self._in_order(number, program)
        if self.in_evaluation:
            body = ["model.eval()", *body, "model.train()"]
        if self.zero in ("none", "after") and not self.closure:
            body = ["optimizer.zero_grad()", *body]
        if self.zero == "zeros" and not self.closure:
            body = ["optimizer.zero_grad(set_to_none=False)", *body]
        if self.steps and program.scheduler:
            body.append("scheduler.step()")
        body.append(f"seen.append(({number}, values(model)))")
        if self.zero == "after" or self.steps == 0:
            body.append("optimizer.zero_grad()")
        return body

    def _with_closure(self, number: int) -> Lines:
        return [
            "def closure():",
            "    optimizer.zero_grad()" if self.zero != "zeros" else "    optimizer.zero_grad(set_to_none=False)",
            f"    result = loss(model, {10 * number})",
            "    result.backward()",
            "    return result",
            *[f"seen.append(({number}, optimizer.step(closure).item()))"] * self.steps,
        ]

    def _in_order(self, number: int, program: Program) -> Lines:
        lines: Lines = [f"scaler = torch.amp.GradScaler('cpu', init_scale={self.scale}.0)"] if self.scale else []
        which = "scaler.scale({})" if self.scale else "{}"
        batches = iter(range(10 * number, 10 * number + 10))
        if self.unsynchronised:
            lines.append("with model.no_sync():")
            for _ in range(self.unsynchronised):
                lines.append(f"    {which.format(f'loss(model, {next(batches)})')}.backward()")
        if self.freeze_between:
            lines.append(f"module.{self.freeze_between}.requires_grad_(False)")
        for _ in range(self.synchronised):
            lines.append(f"{which.format(f'loss(model, {next(batches)})')}.backward()")
        if self.scale:
            lines.append("scaler.unscale_(optimizer)")
        if self.edited:
            lines += [
                f"for p in params_of(module, {self.edited!r}):",
                "    if p.grad is not None:",
                f"        {self.edit}",
            ]
        if self.max_norm:
            lines += self._clip(number, program)
        lines += ["scaler.step(optimizer)" if self.scale else "optimizer.step()"] * self.steps
        if self.freeze_between:
            lines.append(f"module.{self.freeze_between}.requires_grad_(True)")
        return lines

    def _clip(self, number: int, program: Program) -> Lines:
        arguments = f"{self.max_norm}, norm_type={self.norm_type}"
        if not program.scatters:
            clip = f"norm = nn.utils.clip_grad_norm_(module.parameters(), {arguments})"
            return [clip, f"seen.append(({number}, norm))"]
        # The norm is added up in another order: it must be close, and then both sides scale by the same.
        clip = (
            f"nn.utils.clip_grad_norm_(params, {arguments})"
            if self.by_torch
            else f"optimizer.clip_grad_norm_({arguments})"
        )
        return [
            "params = [p for group in optimizer.param_groups for p in group['params'] if p.grad is not None]",
            "if sharded:",
            f"    norms.append({clip})",
            "else:",
            f"    norm = nn.utils.get_total_norm([p.grad for p in params], {self.norm_type})",
            "    ours = norms.pop(0) if norms else norm",
            "    torch.testing.assert_close(ours.double(), norm.double(), rtol=1e-2 if norm.dtype is torch.bfloat16 "
            "else 1e-5, atol=0)",
            f"    nn.utils.clip_grads_with_norm_(params, {self.max_norm}, ours)",
        ]
