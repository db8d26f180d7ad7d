"""Finds infinities and NaN in gradients, and lets all ranks agree whether a step may go on."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.collectives import Collectives
from onecopy.comm.status_flags import flags_on
from onecopy.common.torch_private import sparse_parts
from onecopy.errors import NonfiniteError
from onecopy.layout import Layout
from onecopy.step.sharded_gradient import local_norms

logger = logging.getLogger(__name__)

PLACES = 1 << 31
"""More than there are parameters or ranks: a flag is one number for both."""


def not_finite(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Whether each tensor has an infinity or a NaN, as one tensor on ``device``; False for None."""
    values = [None if each is None else _real_values(each) for each in tensors]
    return local_norms(values, math.inf, device).isfinite().logical_not()


def _real_values(tensor: Tensor) -> Tensor:
    """The values of a tensor as real numbers: the absolute value of a large complex number is an infinity."""
    values: Tensor = sparse_parts(tensor)[1] if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def check_guards(nonfinite: Any, check_replicas_every: Any, overlap_with_ddp: bool) -> None:
    """Raise if an optimizer's argument ``nonfinite`` or ``check_replicas_every`` is wrong."""
    if nonfinite not in (None, "raise", "skip"):
        raise ValueError(f"nonfinite must be None, 'raise' or 'skip', got {nonfinite!r}")
    if nonfinite is not None and overlap_with_ddp:
        raise ValueError(
            "nonfinite cannot be combined with overlap_with_ddp=True, because some parameters are updated before "
            "all gradients are known; leave overlap_with_ddp out and register onecopy.reduce_scatter_hook, which "
            "steps after backward"
        )
    every = check_replicas_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f"check_replicas_every must be None or a number of steps from 1 on, got {every!r}")


class NonfiniteGuard:
    """Lets no update with an infinity or a NaN in a gradient happen unnoticed: all ranks raise, or skip the step.

    The flag of a rank is 0 if its gradients are finite. Otherwise it is larger the earlier the parameter is, and among
    the owners of one parameter the lower the rank. So the largest flag of all ranks names both.

    Attributes:
        agrees_first: whether the ranks read the flags before the update. Otherwise the flags are on an accelerator,
            and are read in the next step with the others.
    """

    def __init__(self, skips: bool, collectives: Collectives) -> None:
        self._skips = skips
        self._collectives = collectives
        self.agrees_first = skips or not collectives.defers_host_reads
        self._flag: Tensor | None = None
        self._flags_by_param: Tensor | None = None
        self._layout: Layout | None = None
        self._skips_now = False

    def look(self, gradients: Mapping[int, Tensor], layout: Layout) -> None:
        """Compute the flag of this step from the gradients of this rank's shards, on the device of the flags."""
        device, count = self._collectives.control_device, len(layout.params)
        if self._flags_by_param is None or len(self._flags_by_param) != count:
            last = PLACES - 1 - self._collectives.global_rank
            self._flags_by_param = flags_on(device, [(PLACES - index) * PLACES + last for index in range(count)])
        found = not_finite([gradients.get(index) for index in range(count)], device)
        self._flag, self._layout = (found * self._flags_by_param).max(), layout

    def take_flag(self) -> Tensor | None:
        """Return the flag of this step, or None if it was taken before, and forget it."""
        flag, self._flag = self._flag, None
        return flag

    def found(self, largest: int) -> None:
        """Raise, or skip this step, if a rank has found something; ``largest`` is the largest flag of all ranks."""
        if not largest:
            return
        assert self._layout is not None
        place, last = divmod(largest, PLACES)
        name = self._layout.params[PLACES - place].name
        owner = f"owned by global rank {PLACES - 1 - last}"
        where = f"the gradient of parameter {name!r} ({owner}) has an infinity or a NaN"
        here = self._collectives.group_rank
        if not self.agrees_first:
            raise NonfiniteError(
                f"rank {here}: in the previous step() {where}. The parameters were updated with it: load a checkpoint "
                "before going on"
            )
        if not self._skips:
            raise NonfiniteError(
                f"rank {here}: {where}. step() has changed nothing on any rank. Look at the loss and the learning rate "
                "of this step; nonfinite='skip' leaves out such steps"
            )
        if here == 0:
            logger.warning("step() is skipped on all ranks: %s", where)
        self._skips_now = True

    def take_skip(self) -> bool:
        """Return whether all ranks skip this step, and forget it."""
        skips, self._skips_now = self._skips_now, False
        return skips
