"""Named ranges in torch's profiler, as a context manager and a decorator; almost free while no profiler runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

from onecopy.common.torch_private import is_profiling

_NO_RANGE = contextlib.nullcontext()

P = ParamSpec("P")
T = TypeVar("T")


def profile_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that shows its block under a name in torch's profiler."""
    return record_function(name) if is_profiling() else _NO_RANGE


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that shows every call of a function under a name in torch's profiler."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with profile_range(name):
                return function(*args, **kwargs)

        return run

    return decorate
