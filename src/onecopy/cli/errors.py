"""Errors of commands: one line instead of a traceback. The exit code is 1 for a failure and 2 for a wrong command."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console

from onecopy.errors import OnecopyError

Command = TypeVar("Command", bound=Callable[..., Any])


def guarded(command: Command) -> Command:
    """Let a command print an error that the user can correct as one line, and exit with code 1."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError, too
            raise
        except (OnecopyError, OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
            fail(str(error))

    return run  # type: ignore[return-value]


def fail(message: str) -> NoReturn:
    """Print one line and exit with code 1."""
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1) from None


def need(package: str, option: str, extra: str) -> None:
    """Exit with code 1 if a package is not installed that an option needs, and print the pip command for it."""
    if importlib.util.find_spec(package) is None:
        fail(f"{option} needs {package}: pip install 'onecopy[{extra}]'")
