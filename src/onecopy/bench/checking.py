"""A guard against getting slower: ratios of a short run compared with recorded ones. Absolute times never count."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onecopy.bench.report import Row, runs_in, summaries, title_of

MARGIN = 0.03
"""How much worse a ratio may be beyond its own quartiles before it counts as a loss."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A ratio to DDP that has grown beyond noise."""

    run: str
    variant: str
    recorded: float
    now: float
    limit: float


def ratios_of(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """For each run and variant of ours the median ratio to DDP, with its quartiles, and bytes on the wire."""
    return {
        title_of(run): {
            each["variant"]: [each["to_ddp"], *each["quartiles"], each["wire"] or 0.0]
            for each in summaries(rows, run)
            if not each["error"] and each["variant"].startswith("onecopy")
        }
        for run in runs_in(rows)
    }


def record(rows: Sequence[Row], path: Path) -> None:
    """Keep the ratios of a run."""
    path.write_text(json.dumps(ratios_of(rows), indent=1) + "\n")


def losses(rows: Sequence[Row], path: Path) -> list[Loss]:
    """Where a run is worse than what was recorded, by more than the quartiles of both and a margin."""
    recorded = json.loads(path.read_text())
    found = []
    for run, variants in ratios_of(rows).items():
        for variant, (now, low, _, wire) in variants.items():
            before = recorded.get(run, {}).get(variant)
            if before is None:
                continue
            limit = max(before[0], before[2]) + MARGIN
            # Slower only if even the lower quartile of now is above the upper quartile of then.
            if low > limit:
                found.append(Loss(run, variant, before[0], now, limit))
            if before[3] and wire > before[3] * 1.02:
                found.append(Loss(run, f"{variant}: bytes on the wire", before[3], wire, before[3] * 1.02))
    return found
