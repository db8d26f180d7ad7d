"""Errors of a backend that has lost a rank: how they are recognised, and the error with which calls replace them."""

from __future__ import annotations

import re
from types import TracebackType

import torch.distributed as dist

from onecopy.errors import OnecopyError, PeerFailedError

_TEXT = re.compile(
    r"/gloo/|^Gloo |pair closure|[Cc]onnection (closed|reset|refused)( by peer|$)|Timed out waiting \d+ms|NCCL",
    re.DOTALL,
)
"""Texts of gloo and NCCL; an error of the user may speak of a timeout, too."""


def is_backend_error(error: BaseException) -> bool:
    """Whether an exception, or its cause, comes from a process group that has lost a rank."""
    if isinstance(error, PeerFailedError) and error.__cause__ is not None:
        return is_backend_error(error.__cause__)
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and bool(_TEXT.search(str(error))))


class ExplainedErrors:
    """A ``with`` block that turns a backend's error, such as the timeout, into one that names a call of all ranks.

    All other exceptions pass. It is a class because it is used in every step: a generator would take longer.

    Args:
        call: the name of the call.
        group_rank: this rank.
    """

    __slots__ = ("_call", "_group_rank")

    def __init__(self, call: str, group_rank: int) -> None:
        self._call, self._group_rank = call, group_rank

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, OnecopyError) or not is_backend_error(error):
            return
        raise PeerFailedError(
            f"rank {self._group_rank}: {self._call} has waited for the other ranks in vain. Either one of them does "
            "not make this call, which all ranks must make (not inside `if rank == 0:`), or its process has died: look "
            f"at the logs of the other ranks, and start all processes again from a checkpoint. {error}"
        ) from error
