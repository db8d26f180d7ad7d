"""A progress bar for what takes long, where a person is looking and rich is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

LONG_BYTES = 1 << 30


@contextlib.contextmanager
def bar(what: str, total: int, rank: int = 0) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes how many bytes have been done; it shows them on rank 0, on a terminal."""
    if rank != 0 or total < LONG_BYTES or not sys.stderr.isatty():
        yield lambda _: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
