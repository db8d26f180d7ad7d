"""Saves and loads checkpoints that any number of ranks can load, with checksums and an atomic commit."""

from __future__ import annotations

from onecopy.checkpoint.directories import latest, verify
from onecopy.checkpoint.loading import Loaded, load
from onecopy.checkpoint.sampler import ResumableSampler
from onecopy.checkpoint.saving import save, wait
from onecopy.checkpoint.training_state import PerRank, capture, restore
from onecopy.state_dict.dcp import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = [
    "Loaded",
    "PerRank",
    "ResumableSampler",
    "capture",
    "get_optimizer_state_dict",
    "latest",
    "load",
    "restore",
    "save",
    "set_optimizer_state_dict",
    "verify",
    "wait",
]
