"""What a program is drawn from: optimizer classes, parts of a model, levels with what they refuse, schedulers."""

from __future__ import annotations

from dataclasses import dataclass

Options = tuple[tuple[str, str], ...]
"""Names and values; values are Python expressions."""


@dataclass(frozen=True)
class Class:
    """What is drawn for one optimizer class of torch."""

    lr: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # expressions to choose from for each
    keys: tuple[str, ...]  # entries of the state that have an element for each of the parameter's
    edits: tuple[str, ...] = ("lr",)  # options that may be edited while training
    cuts: bool = True  # whether parameters may be cut
    matrices: bool = False  # whether all parameters must be matrices
    smooth: dict[str, str] | None = None  # with these a small change of a gradient is a small change of the update


DECAY = {"weight_decay": ("0.1", "0.01")}
BOTH = {"foreach": ("True", "False"), "maximize": ("True",)}
FUSED = {**BOTH, "fused": ("True", "False")}
ADAM = {**FUSED, **DECAY, "amsgrad": ("True",), "betas": ("(0.8, 0.9)",), "eps": ("1e-6",)}
SGD = {**FUSED, **DECAY, "momentum": ("0.9", "0.5"), "nesterov": ("True",), "dampening": ("0.3",)}
ADAGRAD = {**FUSED, **DECAY, "lr_decay": ("0.1",), "initial_accumulator_value": ("0.1",)}
RMSPROP = {**BOTH, **DECAY, "momentum": ("0.9",), "centered": ("True",), "alpha": ("0.9",)}
DECOUPLED = {**BOTH, **DECAY, "decoupled_weight_decay": ("True",)}
MOMENTS = ("exp_avg", "exp_avg_sq")
EPS = {"eps": "1e-2"}

CLASSES = {
    "SGD": Class(
        ("0.1", "0.05", "torch.tensor(0.1)"), SGD, ("momentum_buffer",), ("lr", "momentum", "weight_decay"), smooth={}
    ),
    "Adam": Class(("1e-2", "3e-3"), ADAM, (*MOMENTS, "max_exp_avg_sq"), ("lr", "eps"), smooth=EPS),
    "AdamW": Class(("1e-2", "torch.tensor(1e-2)"), ADAM, MOMENTS, ("lr", "weight_decay"), smooth=EPS),
    "Adagrad": Class(("1e-2",), ADAGRAD, ("sum",), ("lr", "lr_decay"), smooth=EPS),
    "RMSprop": Class(("1e-3",), RMSPROP, ("square_avg",), smooth=EPS),
    "Adamax": Class(("1e-2",), {**BOTH, **DECAY}, ("exp_avg", "exp_inf")),
    "NAdam": Class(("1e-2",), DECOUPLED, MOMENTS),
    "RAdam": Class(("1e-2",), DECOUPLED, MOMENTS),
    "Rprop": Class(("1e-3",), {**BOTH, "etas": ("(0.4, 1.3)",)}, ("prev", "step_size")),
    "ASGD": Class(("1e-2",), {**BOTH, **DECAY, "t0": ("2.0",)}, ("ax",), smooth={}),
    "Adadelta": Class(("1.0", "0.5"), {**BOTH, **DECAY, "rho": ("0.8",)}, ("square_avg", "acc_delta")),
    "Adafactor": Class(("1e-2",), {**BOTH, **DECAY, "d": ("2.0",)}, ("variance",), cuts=False),
    "Muon": Class(("1e-2",), {**DECAY, "nesterov": ("False",)}, ("momentum_buffer",), cuts=False, matrices=True),
}


@dataclass(frozen=True)
class Part:
    """A part of a model, which adds something to a hidden vector of 16 elements."""

    init: str  # lines, in which @ stands for the part's attribute
    forward: str = "h = h + torch.tanh(@(h))"  # lines, from h (4 by 16) to h
    trained: bool = True  # whether it is in use and trainable, so that an operation can do something with it
    matrices: bool = False  # whether all of its parameters are matrices, which Muon asks for
    unused: bool = False  # whether DDP must look for unused parameters
    narrow: bool = False  # whether it computes in bf16, in which no two orders of adding are alike


BASE = "base"
"""The part that every model has and that is always trained, so that there is always something to train."""

PARTS = {
    BASE: Part("@ = nn.Linear(16, 16, bias=False)", matrices=True),
    "linear": Part("@ = nn.Linear(16, 16)"),
    "matrix": Part("@ = nn.Linear(16, 16, bias=False)", matrices=True),
    # Above 1,000 elements, so that shard_by="element" cuts them.
    "wide": Part("@ = nn.Sequential(nn.Linear(16, 160), nn.Tanh(), nn.Linear(160, 16))"),
    "embedding": Part("@ = nn.Embedding(40, 16)", "h = h + @(tokens)", matrices=True),
    "large_embedding": Part("@ = nn.Embedding(16384, 16)", "h = h + @(tokens)", matrices=True),
    "tied": Part(
        "@ = nn.ModuleDict({'embed': nn.Embedding(40, 16), 'out': nn.Linear(16, 40, bias=False)})\n"
        "@['out'].weight = @['embed'].weight",
        "h = h + @['embed'](tokens)\nh = h + @['out'](torch.tanh(h)).mean(1, keepdim=True)",
        matrices=True,
    ),
    "conv": Part("@ = nn.Conv2d(1, 16, 3, padding=1)", "h = h + torch.tanh(@(h.view(-1, 1, 4, 4))).mean((2, 3))"),
    "channels_last": Part(
        "@ = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)",
        "h = h + torch.tanh(@(h.view(-1, 4, 2, 2).repeat(1, 1, 2, 2))).reshape(-1, 32)[:, :16]",
    ),
    "batch_norm": Part("@ = nn.BatchNorm1d(16)", "h = h + @(h)"),
    "layer_norm": Part("@ = nn.LayerNorm(16)", "h = h + @(h)"),
    "group_norm": Part("@ = nn.GroupNorm(4, 16)", "h = h + @(h)"),
    "scalar": Part("@ = nn.Parameter(torch.tensor(0.5))", "h = h * @"),
    "empty": Part("@ = nn.Parameter(torch.zeros(0, 4))", "h = h + @.sum()"),
    "strided": Part("@ = nn.Parameter(torch.randn(16, 80).t())", "h = h + torch.tanh(h.matmul(@[:16]))", matrices=True),
    "recurrent": Part("@ = nn.Linear(16, 16)", "h = torch.tanh(@(torch.tanh(@(h))))"),
    # Small ones of the same size are updated together, from 32 on.
    "many": Part(
        "@ = nn.ParameterList([torch.randn(64) * 0.1 for _ in range(36)])",
        "h = h + torch.tanh(torch.stack([w * (i + 1) for i, w in enumerate(@)])).sum(0).view(4, 16)",
    ),
    "many_norms": Part(
        "@ = nn.Sequential(*[nn.LayerNorm(64) for _ in range(34)])", "h = h + @(h.repeat(1, 4))[:, :16]"
    ),
    "fp64": Part("@ = nn.Linear(16, 80).double()", "h = h + torch.tanh(@(h.double()))[:, :16].to(h.dtype)"),
    "bf16": Part(
        "@ = nn.Linear(16, 80).bfloat16()", "h = h + torch.tanh(@(h.bfloat16()))[:, :16].to(h.dtype)", narrow=True
    ),
    "unused": Part("@ = nn.Linear(16, 16)", "", trained=False, unused=True),
    "frozen": Part("@ = nn.Linear(16, 16).requires_grad_(False)", trained=False),
    "integers": Part(
        "@ = nn.Parameter(torch.arange(16, dtype=torch.int8), requires_grad=False)",
        "h = h + (@ * 0.01).to(h.dtype)",
        trained=False,
    ),
    "flags": Part("@ = nn.Parameter(torch.arange(16) > 3, requires_grad=False)", "h = h * @", trained=False),
    # One rank in every step; none of three ranks in some.
    "sometimes": Part(
        "@ = nn.Linear(16, 16)", "if (step // 10) % 4 == RANK:\n    h = h + torch.tanh(@(h))", unused=True
    ),
}

STEPS_IN_BACKWARD = (
    "a closure",
    "a GradScaler",
    "clipping",
    "edited gradients",
    "several synchronising passes",
    "a second step",
    "a pass without a step",
    "Join",
    "two optimizers",
)

REFUSED = {
    "zero": frozenset[str](),
    "overlap": frozenset(STEPS_IN_BACKWARD),
    "scatter": frozenset[str](),
    "sharded": frozenset({"add_param_group", "Join"}),
}
"""The levels, with what docs/ says that each refuses, by feature. Anything else must work."""

OTHER_REFUSED = frozenset({"Join", "a GradScaler", "rolling back", "a checkpoint"})
"""What is not drawn with a second optimizer: it is not saved, joins nothing, and its gradients are not unscaled."""

POLICIES = (
    '"parameter"',
    '"element"',
    "lambda specs, ranks: [(5 * spec.index + 1) % ranks for spec in specs]",
    "lambda specs, ranks: [ranks - 1 for spec in specs]",
)

SCHEDULERS = (
    "StepLR(optimizer, 2, 0.5)",
    "ExponentialLR(optimizer, 0.9)",
    "LambdaLR(optimizer, lambda n: 1 / (1 + n))",
)
