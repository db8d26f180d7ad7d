"""Run on gloo as on accelerators: status flags that the host reads later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from onecopy.comm import limits
from onecopy.comm.collectives import Collectives
from tests.support.data_parallel import as_if_large


@contextlib.contextmanager
def as_on_accelerators() -> Iterator[None]:
    """Defer the host's reads of status flags."""
    with (
        mock.patch.object(Collectives, "defers_host_reads", True),
        mock.patch.object(limits, "PADDING_BYTES_PER_RANK", 0),  # small parts are treated as large ones
        as_if_large(),
    ):
        yield
