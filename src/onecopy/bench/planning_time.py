"""The time that each policy takes to plan a layout, over the number of parameters and ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from onecopy.comm import limits
from onecopy.layout import ParamSpec, extend, plan_buckets
from onecopy.planning.models import specs_of

PARAMETERS = (10, 100, 1000, 10_000, 100_000)
RANKS = (1, 16, 256, 4096, 16_384)
MOST_SHARDS = 2_000_000
"""Layouts with more shards than this are not planned: each rank has a shard of each parameter."""


def _specs(count: int) -> tuple[ParamSpec, ...]:
    """Return specs as in a transformer: a few large matrices among many vectors."""
    shapes = ((4096, 1024), (1024,), (1024, 1024), (1024,), (4096,))
    return specs_of({f"p{index}": shapes[index % len(shapes)] for index in range(count)})


def planning() -> list[dict[str, Any]]:
    """Measure the seconds that each policy takes to plan a layout, in this process."""
    rows = []
    for count in PARAMETERS:
        specs = _specs(count)
        order = list(reversed(range(count)))
        for ranks in RANKS:
            plans: dict[str, Callable[[], object]] = {
                "parameter": lambda specs=specs, ranks=ranks: extend(None, specs, ranks, "parameter", True),  # type: ignore[misc]
                "element": lambda specs=specs, ranks=ranks: extend(None, specs, ranks, "element", True),  # type: ignore[misc]
                "bucket": lambda specs=specs, order=order, ranks=ranks: plan_buckets(  # type: ignore[misc]
                    specs, order, ranks, True, limits.BUCKET_BYTES
                ),
            }
            for policy, plan in plans.items():
                if policy != "parameter" and count * ranks > MOST_SHARDS:
                    continue
                start = time.perf_counter()
                plan()
                seconds = time.perf_counter() - start
                rows.append(
                    {"kind": "planning", "policy": policy, "parameters": count, "ranks": ranks, "seconds": seconds}
                )
    return rows
