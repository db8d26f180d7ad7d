"""A connection of two ranks for one request, which no other rank knows of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from onecopy.comm.work import Work
from onecopy.common.torch_private import PrefixStore, Store


class Link:
    """A gloo group of the rank that asks and one rank that answers, made by both for one request."""

    def __init__(self, store: Store, name: str, is_caller: bool, timeout: timedelta) -> None:
        group_rank = 0 if is_caller else 1
        self._other = 1 - group_rank
        self._group: Any = dist.ProcessGroupGloo(PrefixStore(f"{name}/link", store), group_rank, 2, timeout)

    def send(self, tensor: Tensor) -> Work:
        """Start sending contiguous CPU memory to the other rank."""
        work: Work = self._group.send([tensor], self._other, 0)
        return work

    def receive(self, tensor: Tensor) -> Work:
        """Start receiving into contiguous CPU memory; messages arrive in the order they were sent."""
        work: Work = self._group.recv([tensor], self._other, 0)
        return work

    def close(self) -> None:
        """End the connection, so that the other rank does not wait for this one."""
        self._group = None
