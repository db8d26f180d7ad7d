"""A progress bar for long reads and writes, on a terminal and if rich is installed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

LONG_BYTES = 1 << 30
"""The bar appears for at least this many bytes."""


@contextlib.contextmanager
def bar(title: str, total: int, rank: int = 0) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on rank 0 during the block; yield a function that advances it by a number of bytes."""
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
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)
