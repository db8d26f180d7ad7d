"""The ranks that save or load together, or one process alone; they speak on a group that training does not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from onecopy.comm.agreement import Fact, agree
from onecopy.comm.collectives import Collectives
from onecopy.common import tagged_json
from onecopy.errors import CheckpointError, OnecopyError


class Ranks:
    """Who takes part. Group ranks count; every call is made by all of them together."""

    def __init__(self, process_group: Any = None) -> None:
        self._collectives: Collectives | None = None
        if dist.is_available() and dist.is_initialized():
            self._collectives = Collectives(process_group).cpu_group("checkpoint")
        elif process_group is not None:
            raise RuntimeError("a process group was given, but torch.distributed is not initialised")

    @classmethod
    def alone(cls) -> Ranks:
        """This process, whatever groups it is in."""
        made = cls.__new__(cls)
        made._collectives = None
        return made

    @property
    def rank(self) -> int:
        """This one."""
        return self._collectives.group_rank if self._collectives else 0

    @property
    def world_size(self) -> int:
        """How many there are."""
        return self._collectives.world_size if self._collectives else 1

    @property
    def global_ranks(self) -> list[int]:
        """Their numbers among all processes."""
        return dist.get_process_group_ranks(self._collectives.process_group) if self._collectives else [0]

    def agree(self, what: str, facts: Sequence[Fact], failure: Exception | None) -> None:
        """Raise on every rank if one has failed or if they were given different things."""
        if self._collectives is not None:
            agree(self._collectives, what, facts, failure)
        elif failure is not None:
            raise failure

    def vote(self, what: str, failure: Exception | None, content: Any = None, facts: Sequence[Fact] = ()) -> list[Any]:
        """Raise on every rank if one has failed or if facts differ; else return what each has to say, as JSON data."""
        try:
            tagged_json.dumps(content)  # what cannot be said must not stop one rank between the two exchanges
        except Exception as error:
            failure = failure or error
        self.agree(what, facts, failure)
        return self.gather(what, content)

    def gather(self, what: str, content: Any) -> list[Any]:
        """What each has to say, as plain JSON data."""
        if self._collectives is None:
            return [content]
        everyone = self._collectives.all_gather_bytes(tagged_json.dumps(content), what)
        return [tagged_json.loads(text) for text in everyone]


def as_checkpoint_error(what: str, error: Exception) -> Exception:
    """An error of the file system as one that says what failed; others as they are."""
    if isinstance(error, OSError) and not isinstance(error, OnecopyError):
        made = CheckpointError(f"{what} failed: {error}")
        made.__cause__ = error
        return made
    return error
