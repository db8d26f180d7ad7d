"""The ranks that save or load a checkpoint together, with a process group that training does not use.

Without ``torch.distributed`` this process is the only rank, and the same calls work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from onecopy.comm.agreement import REMEDY, FailTogether
from onecopy.comm.collectives import Collectives
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError


class Ranks:
    """The ranks of one save or load. Ranks are numbered in the process group, and all ranks make every call.

    Args:
        process_group: the ranks (default: all ranks; without torch.distributed, this process).
        call: the name of the user's call, for errors.
    """

    def __init__(self, process_group: Any, call: str) -> None:
        self._collectives: Collectives | None = None
        if dist.is_available() and dist.is_initialized():
            collectives = Collectives(process_group)
            with FailTogether(collectives, call):  # all ranks are in this call
                pass
            self._collectives = collectives.cpu_group("checkpoint", call)
        elif process_group is not None:
            raise RuntimeError("a process group was given, but torch.distributed is not initialised")

    @classmethod
    def single(cls) -> Ranks:
        """Return this process as the only rank, even if it is in process groups."""
        made = cls.__new__(cls)
        made._collectives = None
        return made

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._collectives.group_rank if self._collectives else 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._collectives.world_size if self._collectives else 1

    @property
    def global_ranks(self) -> list[int]:
        """The global rank of each rank."""
        return dist.get_process_group_ranks(self._collectives.process_group) if self._collectives else [0]

    def fail_together(self, call: str, remedy: str = REMEDY) -> FailTogether:
        """Return a ``with`` block that raises on all ranks if it raises on one rank or if its facts differ."""
        return FailTogether(self._collectives, call, remedy=remedy)

    def gather_json(self, call: str, text: bytes) -> list[Any]:
        """Return the JSON data of every rank.

        Args:
            call: the name of the call, for error messages.
            text: this rank's data from ``tagged_json.dumps``. A :meth:`fail_together` block encodes it, so that a value
                that cannot be encoded is an error on all ranks.
        """
        texts = [text] if self._collectives is None else self._collectives.all_gather_bytes(text, call)
        return [tagged_json.loads(each) for each in texts]


@contextlib.contextmanager
def explained_os_errors(action: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a :class:`CheckpointError` that names the action."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{action} failed: {error}") from error
