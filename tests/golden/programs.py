"""The training programs: what each of them does, as a table. A program is run at a level, and with plain DDP."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy

Options = dict[str, Any]
UNUSED = {"find_unused_parameters": True}
VIEW = {"gradient_as_bucket_view": True}


@dataclass(frozen=True)
class Program:
    """One training program; the defaults are the simplest one.

    Attributes:
        level: "ddp", "1", "2", "3", "overlap" or "interleaved".
        optimizer: the name of the class; "Muon+AdamW" are two optimizers.
        options: the options of the class.
        zero, ddp, wrapper: further arguments of ZeroRedundancyOptimizer, DDP and ShardedDataParallel.
        passes, no_sync: backward passes for each step, and whether all but the last are in ``no_sync()``.
        clip: "torch" for torch's function, "ours" for the method.
        resume: "dict" for a consolidated state dict, "checkpoint" for ``checkpoint``.
        resize: the numbers of ranks before and after, through a checkpoint.
        to_none: whether ``zero_grad`` removes the gradients.
        turns: whether the second of two optimizers, over the branch, steps in the pass that does not use the branch.
        frozen_base: whether the model has frozen parameters, one of them of integers.
        new: whether the version that was recorded does not do it yet: it is compared with plain DDP only.
        exact: whether it trains as plain DDP does, bit by bit on two ranks.
    """

    level: str = "ddp"
    optimizer: str = "AdamW"
    options: Options = field(default_factory=lambda: {"lr": 0.01})
    zero: Options = field(default_factory=dict)
    ddp: Options = field(default_factory=dict)
    wrapper: Options = field(default_factory=dict)
    passes: int = 1
    no_sync: bool = True
    clip: str = ""
    freeze: bool = False
    branch: bool = False
    groups: bool = False
    late_group: bool = False
    dtype: str = "float32"
    resume: str = ""
    resize: tuple[int, int] = (0, 0)
    join: bool = False
    scaler: bool = False
    overflow: bool = False
    closure: bool = False
    sparse: bool = False
    to_none: bool = True
    turns: bool = False
    frozen_base: bool = False
    new: bool = False
    exact: bool = True


SGD = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
LEVELS = {"1": "1", "2": "2", "3": "3", "o": "overlap", "i": "interleaved"}

# A row: the levels that it is run at, and what differs from the simplest program.
ROWS: dict[str, tuple[str, Options]] = {
    "AdamW": ("123oi", {}),
    "Adam foreach": ("123i", {"optimizer": "Adam", "options": {"lr": 0.01, "foreach": True}}),
    "Adam fused": ("123oi", {"optimizer": "Adam", "options": {"lr": 0.01, "fused": True}}),
    "Adam amsgrad": ("123", {"optimizer": "Adam", "options": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}}),
    "SGD momentum": ("123oi", {"optimizer": "SGD", "options": SGD}),
    "SGD": ("123", {"optimizer": "SGD", "options": {"lr": 0.1}}),
    "Adagrad": ("123", {"optimizer": "Adagrad", "options": {"lr": 0.01, "initial_accumulator_value": 0.1}}),
    "Adafactor": ("123oi", {"optimizer": "Adafactor"}),
    "Muon and AdamW": ("123", {"optimizer": "Muon+AdamW"}),
    "Lion": ("123", {"optimizer": "Lion", "options": {"lr": 0.003}}),
    "schedule-free": ("13", {"optimizer": "AdamWScheduleFree"}),
    "flat buckets": ("123", {"zero": {"parameters_as_bucket_view": True}}),
    "by element": ("12", {"zero": {"shard_by": "element"}}),
    "accumulation": ("123oi", {"passes": 3}),
    "accumulation synchronised": ("13", {"passes": 3, "no_sync": False, "exact": False}),
    "clipping by torch": ("13", {"clip": "torch"}),
    "clipping": ("123", {"clip": "ours", "exact": False}),
    "accumulation, clipping, momentum": (
        "123",
        {"optimizer": "SGD", "options": SGD, "passes": 2, "clip": "ours", "exact": False},
    ),
    "freezing": ("123", {"freeze": True, "ddp": UNUSED}),
    "freezing, kept gradients": ("13", {"freeze": True, "ddp": UNUSED, "to_none": False}),
    "unused branch": ("123", {"branch": True, "ddp": UNUSED}),
    "unused branch, momentum": ("123", {"branch": True, "ddp": UNUSED, "optimizer": "SGD", "options": SGD}),
    "unused branch, bucket view": ("123", {"branch": True, "ddp": UNUSED | VIEW}),
    "groups and scheduler": ("123oi", {"groups": True}),
    "late group": ("12", {"late_group": True, "groups": True}),
    "bf16": ("123", {"dtype": "bfloat16"}),
    "bf16 masters": ("123", {"dtype": "bfloat16", "zero": {"master_weights": True}, "exact": False}),
    "bf16 masters, clipping": (
        "123",
        {"dtype": "bfloat16", "zero": {"master_weights": True}, "clip": "ours", "exact": False},
    ),
    "bf16 masters, resume": (
        "13",
        {"dtype": "bfloat16", "zero": {"master_weights": True}, "resume": "checkpoint", "exact": False},
    ),
    "mixed precision": ("3", {"wrapper": {"mixed_precision": "bfloat16"}, "exact": False}),
    "overlap_forward": ("3", {"wrapper": {"overlap_forward": True}}),
    "small buckets": ("3", {"wrapper": {"bucket_bytes": 4096}}),
    "resume from a dict": ("123i", {"resume": "dict"}),
    "resume from a checkpoint": ("123", {"resume": "checkpoint", "groups": True}),
    "resume, Adafactor": ("13", {"resume": "dict", "optimizer": "Adafactor"}),
    "3 to 2 ranks": ("123", {"resize": (3, 2)}),
    "2 to 3 ranks, momentum": ("13", {"resize": (2, 3), "optimizer": "SGD", "options": SGD}),
    "uneven inputs": ("12", {"join": True}),
    "uneven inputs, accumulation": ("12", {"join": True, "passes": 2}),
    "GradScaler": ("123", {"scaler": True, "overflow": True}),
    "GradScaler, clipping": ("123", {"scaler": True, "overflow": True, "clip": "ours", "exact": False}),
    "nonfinite skip": ("123", {"zero": {"nonfinite": "skip"}, "overflow": True}),
    "replicas compared": ("123", {"zero": {"check_replicas_every": 2}}),
    "bucket view": ("12oi", {"ddp": VIEW}),
    "bucket view, kept gradients": ("12", {"ddp": VIEW, "to_none": False}),
    "static graph": ("12oi", {"ddp": {"static_graph": True}}),
    "static graph, bucket view": ("12", {"ddp": {"static_graph": True} | VIEW, "to_none": False}),
    "find unused": ("12oi", {"ddp": UNUSED}),
    "kept gradients": ("123oi", {"to_none": False}),
    "closure": ("123", {"closure": True}),
    "sparse gradients": ("1", {"sparse": True, "optimizer": "SGD", "options": {"lr": 0.1}}),
    "accumulation synchronised, level 2": ("2", {"passes": 3, "no_sync": False, "new": True, "exact": False}),
    "accumulation synchronised, kept": ("2", {"passes": 2, "no_sync": False, "to_none": False, "new": True}),
    "clipping by torch, level 2": ("2", {"clip": "torch", "new": True, "exact": False}),
    "clipping, accumulation by torch": ("2", {"clip": "torch", "passes": 2, "new": True, "exact": False, "ddp": VIEW}),
    "unused branch, bucket view, kept": ("12", {"branch": True, "ddp": UNUSED | VIEW, "to_none": False, "new": True}),
    "freezing, bucket view, kept": ("12", {"freeze": True, "ddp": UNUSED | VIEW, "to_none": False, "new": True}),
    "optimizers in turn": (
        "123",
        {"turns": True, "branch": True, "optimizer": "Adagrad+AdamW", "ddp": UNUSED | VIEW, "new": True},
    ),
    "frozen base": ("123oi", {"frozen_base": True, "new": True}),
    "frozen base, checkpoint": ("123", {"frozen_base": True, "resume": "checkpoint", "new": True}),
    "numpy option": ("13", {"options": {"lr": 0.01, "eps": numpy.float32(1e-6)}, "resume": "checkpoint", "new": True}),
    "SparseAdam": ("1", {"sparse": True, "optimizer": "SparseAdam+AdamW"}),
}

PROGRAMS = {
    f"{LEVELS[letter]}: {name}": replace(Program(**row), level=LEVELS[letter])
    for name, (letters, row) in ROWS.items()
    for letter in letters
}


def with_plain_ddp(program: Program) -> Program:
    """What the program is compared with: without interruptions, and without anything of ours."""
    clip = "torch" if program.clip else ""
    return replace(program, level="ddp", new=False, zero={}, wrapper={}, clip=clip, resume="", resize=(0, 0))
