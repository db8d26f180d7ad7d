"""A check against losses of speed: it compares the ratios of a short run with recorded ratios, never absolute times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onecopy.bench.summaries import Row, runs_in, summaries, title_of

MARGIN = 0.03
"""A ratio may exceed the recorded upper quartile by this much before it counts as a loss."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A ratio to DDP that has grown by more than noise."""

    run: str
    variant: str
    recorded: float
    now: float
    limit: float


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Return for each run and each variant of onecopy the median ratio to DDP, its quartiles, and bytes on the wire."""
    return {
        title_of(run): {
            each["variant"]: [each["to_ddp"], *each["quartiles"], each["wire"] or 0.0]
            for each in summaries(rows, run)
            if not each["error"] and each["variant"].startswith("onecopy")
        }
        for run in runs_in(rows)
    }


def record(rows: Sequence[Row], path: Path) -> None:
    """Write the ratios of a run to a file."""
    path.write_text(json.dumps(ratios_of(rows), indent=1) + "\n")


def losses(rows: Sequence[Row], path: Path) -> list[Loss]:
    """Return the ratios of a run that are worse than the recorded ones by more than both quartiles and a margin."""
    recorded = json.loads(path.read_text())
    found = []
    for run, variants in ratios_of(rows).items():
        for variant, (now, low, _, wire) in variants.items():
            before = recorded.get(run, {}).get(variant)
            if before is None:
                continue
            limit = max(before[0], before[2]) + MARGIN
            # It is slower only if even its lower quartile is above the recorded upper quartile.
            if low > limit:
                found.append(Loss(run, variant, before[0], now, limit))
            if before[3] and wire > before[3] * 1.02:
                found.append(Loss(run, f"{variant}: bytes on the wire", before[3], wire, before[3] * 1.02))
    return found
