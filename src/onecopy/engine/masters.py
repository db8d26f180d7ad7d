"""Where the inner optimizer keeps the values it steps: in the parameters, or in copies of its own.

A copy is needed where the parameter is too coarse (bf16 with fp32 master weights) or elsewhere (state in CPU memory).
It exists on the owner only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.engine.torch_private import version_of

KEY = "master_weight"
"""The name of a master weight in an optimizer's state dict."""


@dataclass(frozen=True, slots=True)
class Masters:
    """Which parameters get a copy.

    Attributes:
        precise: keep float32 copies of parameters in bf16 or fp16.
        offload: keep copies, and with them all optimizer state, on the CPU.
    """

    precise: bool = False
    offload: bool = False

    def wanted_for(self, param: Tensor) -> bool:
        """Whether this parameter is stepped through a copy."""
        coarse = param.is_floating_point() and param.dtype.itemsize < 4
        return (self.precise and coarse) or (self.offload and param.device.type != "cpu")

    def copy_of(self, home: Tensor) -> Tensor:
        """A copy of an owned range."""
        dtype = torch.float32 if self.precise and home.is_floating_point() and home.dtype.itemsize < 4 else home.dtype
        return home.detach().to("cpu" if self.offload else home.device, dtype, copy=True)


@dataclass(frozen=True, slots=True)
class Master:
    """A copy, the memory of the parameter whose values it refines, and that parameter."""

    copy: Tensor
    home: Tensor
    param: Tensor


class MasterCopies:
    """All copies of one rank, kept in step with what others write into the parameters."""

    def __init__(self, masters: Sequence[Master]) -> None:
        self.masters = list(masters)
        self._versions: list[int] | None = None  # of the parameters, when copies and homes were last known to agree

    def publish(self, everything: bool) -> None:
        """After a step: give the homes the copies' new values, rounded (those with a gradient, or all)."""
        stepped = [master for master in self.masters if everything or master.copy.grad is not None]
        if stepped:
            torch._foreach_copy_([master.home for master in stepped], [master.copy for master in stepped])

    def note_versions(self) -> None:
        """Remember that copies and homes agree now."""
        self._versions = [version_of(master.param) for master in self.masters]

    def distrust(self) -> None:
        """Compare values before the next step, because either side may have been loaded."""
        self._versions = None

    def take_over_writes(self) -> None:
        """Where someone has written into a parameter since the last step, its value replaces the copy's.

        Elements whose parameter is still the rounded copy keep the copy's precision.
        """
        if not self.masters or self._versions == [version_of(master.param) for master in self.masters]:
            return
        for master in self.masters:
            home = master.home.to(master.copy.device)
            unchanged = master.copy.to(home.dtype) == home
            master.copy.copy_(torch.where(unchanged, master.copy, home.to(master.copy.dtype)))
        self.note_versions()
