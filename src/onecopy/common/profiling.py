"""Names for the parts of a step in torch's profiler, at no cost while nobody is profiling."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.profiler import record_function

from onecopy.common.torch_private import is_profiling

_NOTHING = contextlib.nullcontext()

P = ParamSpec("P")
T = TypeVar("T")


def profile_range(name: str) -> contextlib.AbstractContextManager[object]:
    """A part of a step, as a ``with`` block."""
    return record_function(name) if is_profiling() else _NOTHING


def profiled(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A part of a step that is a function."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with profile_range(name):
                return function(*args, **kwargs)

        return run

    return decorate
