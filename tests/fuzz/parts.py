"""The parts that a model is made of: each adds something to a hidden vector of 16 elements."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "base"
"""The part that every model has and that is always trained, so that there is always something to train."""


@dataclass(frozen=True)
class Kind:
    """What a part of a model looks like in a script."""

    init: tuple[str, ...]  # lines, in which @ stands for the part's attribute
    forward: tuple[str, ...]  # lines, from h (4 by 16) to h
    trained: bool = True  # whether it is in use and trainable, so that an operation can do something with it
    matrices: bool = False  # whether all of its parameters are matrices, which Muon asks for
    unused: bool = False  # whether DDP must look for unused parameters
    narrow: bool = False  # whether it computes in bf16, in which no two orders of adding are alike


KINDS = {
    BASE: Kind(("@ = nn.Linear(16, 16, bias=False)",), ("h = h + torch.tanh(@(h))",), matrices=True),
    "linear": Kind(("@ = nn.Linear(16, 16)",), ("h = h + torch.tanh(@(h))",)),
    "matrix": Kind(("@ = nn.Linear(16, 16, bias=False)",), ("h = h + torch.tanh(@(h))",), matrices=True),
    # Above 1,000 elements, so that shard_by="element" cuts them.
    "wide": Kind(
        ("@ = nn.Sequential(nn.Linear(16, 160), nn.Tanh(), nn.Linear(160, 16))",), ("h = h + torch.tanh(@(h))",)
    ),
    "embedding": Kind(("@ = nn.Embedding(40, 16)",), ("h = h + @(tokens)",), matrices=True),
    "large_embedding": Kind(("@ = nn.Embedding(16384, 16)",), ("h = h + @(tokens)",), matrices=True),
    "tied": Kind(
        (
            "@ = nn.ModuleDict({'embed': nn.Embedding(40, 16), 'out': nn.Linear(16, 40, bias=False)})",
            "@['out'].weight = @['embed'].weight",
        ),
        ("h = h + @['embed'](tokens)", "h = h + @['out'](torch.tanh(h)).mean(1, keepdim=True)"),
        matrices=True,
    ),
    "conv": Kind(("@ = nn.Conv2d(1, 16, 3, padding=1)",), ("h = h + torch.tanh(@(h.view(-1, 1, 4, 4))).mean((2, 3))",)),
    "channels_last": Kind(
        ("@ = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)",),
        ("h = h + torch.tanh(@(h.view(-1, 4, 2, 2).repeat(1, 1, 2, 2))).reshape(-1, 32)[:, :16]",),
    ),
    "batch_norm": Kind(("@ = nn.BatchNorm1d(16)",), ("h = h + @(h)",)),
    "layer_norm": Kind(("@ = nn.LayerNorm(16)",), ("h = h + @(h)",)),
    "group_norm": Kind(("@ = nn.GroupNorm(4, 16)",), ("h = h + @(h)",)),
    "scalar": Kind(("@ = nn.Parameter(torch.tensor(0.5))",), ("h = h * @",)),
    "empty": Kind(("@ = nn.Parameter(torch.zeros(0, 4))",), ("h = h + @.sum()",)),
    "strided": Kind(
        ("@ = nn.Parameter(torch.randn(16, 80).t())",), ("h = h + torch.tanh(h.matmul(@[:16]))",), matrices=True
    ),
    "recurrent": Kind(("@ = nn.Linear(16, 16)",), ("h = torch.tanh(@(torch.tanh(@(h))))",)),
    # Small ones of the same size are updated together, from 32 on.
    "many": Kind(
        ("@ = nn.ParameterList([torch.randn(64) * 0.1 for _ in range(36)])",),
        ("h = h + torch.tanh(torch.stack([w * (i + 1) for i, w in enumerate(@)])).sum(0).view(4, 16)",),
    ),
    "many_norms": Kind(
        ("@ = nn.Sequential(*[nn.LayerNorm(64) for _ in range(34)])",), ("h = h + @(h.repeat(1, 4))[:, :16]",)
    ),
    "fp64": Kind(("@ = nn.Linear(16, 80).double()",), ("h = h + torch.tanh(@(h.double()))[:, :16].to(h.dtype)",)),
    "bf16": Kind(
        ("@ = nn.Linear(16, 80).bfloat16()",), ("h = h + torch.tanh(@(h.bfloat16()))[:, :16].to(h.dtype)",), narrow=True
    ),
    "unused": Kind(("@ = nn.Linear(16, 16)",), (), trained=False, matrices=False, unused=True),
    "frozen": Kind(("@ = nn.Linear(16, 16).requires_grad_(False)",), ("h = h + torch.tanh(@(h))",), trained=False),
    "integers": Kind(
        ("@ = nn.Parameter(torch.arange(16, dtype=torch.int8), requires_grad=False)",),
        ("h = h + (@ * 0.01).to(h.dtype)",),
        trained=False,
    ),
    "flags": Kind(("@ = nn.Parameter(torch.arange(16) > 3, requires_grad=False)",), ("h = h * @",), trained=False),
    # One rank in every step; none of three ranks in some.
    "sometimes": Kind(
        ("@ = nn.Linear(16, 16)",), ("if (step // 10) % 4 == RANK:", "    h = h + torch.tanh(@(h))"), unused=True
    ),
}


@dataclass(frozen=True)
class Part:
    """One part of a model."""

    kind: str
    name: str

    @property
    def is_like(self) -> Kind:
        """What it looks like."""
        return KINDS[self.kind]

    def init(self) -> list[str]:
        return self._own("init")

    def forward(self) -> list[str]:
        return self._own("forward")

    def _own(self, which: str) -> list[str]:
        lines: tuple[str, ...] = getattr(self.is_like, which)
        return [line.replace("@", f"self.{self.name}") for line in lines]
