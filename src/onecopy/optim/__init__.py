"""Optimizer classes made for sharded training. Each works as a plain optimizer, too."""

from onecopy.optim.matrix_groups import matrix_groups
from onecopy.optim.muon import Muon

__all__ = ["Muon", "matrix_groups"]
