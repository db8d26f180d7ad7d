"""Optimizer classes of torch with their options, as they are written in a script."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

Options = tuple[tuple[str, str], ...]
"""Names and values; values are Python expressions."""


@dataclass(frozen=True)
class Class:
    """What is drawn for one class."""

    lr: tuple[str, ...]
    options: dict[str, tuple[str, ...]]  # expressions to choose from for each
    together: tuple[str, ...] = ("foreach", "fused")  # options of which at most one is drawn
    keys: tuple[str, ...] = ()  # entries of the state that have an element for each of the parameter's
    edits: tuple[str, ...] = ("lr",)  # options that may be edited while training
    cuts: bool = True  # whether parameters may be cut
    matrices: bool = False
    smooth: dict[str, str] | None = None  # with these a small change of a gradient is a small change of the update


DECAY = {"weight_decay": ("0.1", "0.01")}
BOTH = {"foreach": ("True", "False"), "maximize": ("True",)}
FUSED = {**BOTH, "fused": ("True", "False")}
ADAM = {**FUSED, **DECAY, "amsgrad": ("True",), "betas": ("(0.8, 0.9)",), "eps": ("1e-6",)}
MOMENTS = ("exp_avg", "exp_avg_sq")

CLASSES = {
    "SGD": Class(
        ("0.1", "0.05", "torch.tensor(0.1)"),
        {**FUSED, **DECAY, "momentum": ("0.9", "0.5"), "nesterov": ("True",), "dampening": ("0.3",)},
        keys=("momentum_buffer",),
        edits=("lr", "momentum", "weight_decay"),
        smooth={},
    ),
    "Adam": Class(
        ("1e-2", "3e-3"), ADAM, keys=(*MOMENTS, "max_exp_avg_sq"), edits=("lr", "eps"), smooth={"eps": "1e-2"}
    ),
    "AdamW": Class(
        ("1e-2", "torch.tensor(1e-2)"), ADAM, keys=MOMENTS, edits=("lr", "weight_decay"), smooth={"eps": "1e-2"}
    ),
    "Adagrad": Class(
        ("1e-2",),
        {**FUSED, **DECAY, "lr_decay": ("0.1",), "initial_accumulator_value": ("0.1",)},
        keys=("sum",),
        edits=("lr", "lr_decay"),
        smooth={"eps": "1e-2"},
    ),
    "RMSprop": Class(
        ("1e-3",),
        {**BOTH, **DECAY, "momentum": ("0.9",), "centered": ("True",), "alpha": ("0.9",)},
        keys=("square_avg",),
        smooth={"eps": "1e-2"},
    ),
    "Adamax": Class(("1e-2",), {**BOTH, **DECAY}, keys=("exp_avg", "exp_inf")),
    "NAdam": Class(("1e-2",), {**BOTH, **DECAY, "decoupled_weight_decay": ("True",)}, keys=MOMENTS),
    "RAdam": Class(("1e-2",), {**BOTH, **DECAY, "decoupled_weight_decay": ("True",)}, keys=MOMENTS),
    "Rprop": Class(("1e-3",), {**BOTH, "etas": ("(0.4, 1.3)",)}, keys=("prev", "step_size")),
    "ASGD": Class(("1e-2",), {**BOTH, **DECAY, "t0": ("2.0",)}, keys=("ax",), smooth={}),
    "Adadelta": Class(("1.0", "0.5"), {**BOTH, **DECAY, "rho": ("0.8",)}, keys=("square_avg", "acc_delta")),
    "Adafactor": Class(("1e-2",), {**BOTH, **DECAY, "d": ("2.0",)}, keys=("variance",), cuts=False),
    "Muon": Class(("1e-2",), {**DECAY, "nesterov": ("False",)}, keys=("momentum_buffer",), cuts=False, matrices=True),
}


def draw_options(random: Random, name: str, smooth: bool) -> Options:
    """The options that a class is constructed with."""
    chosen = CLASSES[name]
    options = {"lr": random.choice(chosen.lr)}
    for option, values in chosen.options.items():
        if random.random() < 0.35:
            options[option] = random.choice(values)
    exclusive = [option for option in chosen.together if option in options]
    for option in exclusive[1:]:
        del options[option]
    if smooth:
        options |= chosen.smooth or {}
    return tuple(valid(name, options).items())


def valid(name: str, options: dict[str, str]) -> dict[str, str]:
    """The options without those that the class itself refuses beside the others."""
    options = dict(options)
    if name == "SGD" and "nesterov" in options:
        options.setdefault("momentum", "0.9")
        options.pop("dampening", None)
    if options["lr"].startswith("torch.") and options.get("foreach") == "True":
        options["lr"] = "0.01"  # torch takes a tensor here for its capturable implementation only
    return options
