"""The benchmark: its arithmetic on made-up rows, and one small run of the real thing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

sys.path.append(str(ROOT / "benchmarks"))

import compare
import report
from variants import ALWAYS, THEIRS, VARIANTS, YARDSTICK, Sizes

TINY = {"vocabulary": 64, "width": 16, "head": 32, "depth": 1, "batch": 1, "length": 4}
RUN = ("reference", 2, "")
OURS = "onecopy, ShardedDataParallel"


def timed(variant: str, seconds: list[float], wire: float = 0.0, error: str = "") -> dict[str, Any]:
    half = [value / 2 for value in seconds]
    about = {"kind": "time", "variant": variant, "model": "reference", "ranks": 2, "link": "", "heat": 0, "sizes": TINY}
    lists = {"seconds": seconds, "backward": half, "step": half, "idle": [0.1] * len(seconds)}
    return {**about, **lists, "error": error, "difference": 0.0, "wire": [wire] * len(seconds)}


def remembered(variant: str, rank: int, state: float) -> dict[str, Any]:
    sizes = {"parameters": 4e6, "gradients": 4e6, "state": state, "other": 0, "between": 8e6 + state, "resident": 3e7}
    return {"kind": "memory", "variant": variant, "rank": rank, "ranks": 2, **sizes, "peak": 1e7 + state}


def rows_of_a_run(ours: float = 0.9, swing: float = 0.0) -> list[dict[str, Any]]:
    """Four rounds in which every other one is twice as slow for everybody; ``swing`` is noise of our own variant."""
    noise, unit = [1.0, 2.0, 1.0, 2.0], 4.0 * Sizes(**TINY).elements()
    mine = [factor * each for factor, each in zip((ours - swing, ours, ours, ours + swing), noise, strict=True)]
    return [
        timed(YARDSTICK, noise, 2 * unit),
        timed(THEIRS, [1.2 * each for each in noise], 3 * unit),
        timed(OURS, mine, 2 * unit),
        timed("DeepSpeed ZeRO-2", [], error="ModuleNotFoundError: No module named 'deepspeed'"),
        *(remembered(variant, rank, 8e6 / 2) for variant in (OURS, THEIRS) for rank in range(2)),
        *(remembered("FSDP2, no resharding", rank, 3e6) for rank in range(2)),
        {"kind": "save", "variant": YARDSTICK, "error": "", "save": 1.0},
        {"kind": "save", "variant": THEIRS, "error": "RuntimeError: no"},
    ]


@pytest.mark.parametrize(
    ("ours", "swing", "verdict"),
    [
        (1.2, 0.0, "slower"),
        (1.04, 0.0, "the same"),
        (1.2, 0.4, "the same"),
        (0.8, 0.4, "the same"),
        (0.8, 0.0, "faster"),
    ],
)
def test_a_difference_within_noise_is_not_called_a_loss(ours: float, swing: float, verdict: str) -> None:
    rows = rows_of_a_run(ours, swing)
    (found,) = (report.verdict(each) for each in report.summaries(rows, RUN) if each["variant"] == OURS)
    assert found == verdict
    assert [row[1] for row in report.slower_table(rows).rows] == ([OURS] if verdict == "slower" else [])


def test_the_guard_lets_noise_pass_and_names_a_loss(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(report.ratios_of(rows_of_a_run(0.90))))
    assert report.losses(rows_of_a_run(0.92), recorded) == []
    titles = [table.title for table in report.tables(rows_of_a_run(1.2))]
    assert titles[-2:] == ["slower steps", "less memory than ours"]
    (loss,) = report.losses(rows_of_a_run(0.99), recorded)
    assert loss == f"{report.title_of(RUN)}: {OURS}: 0.900 before, 0.990 now, limit 0.930"


def test_a_run_becomes_a_page_with_its_losses_and_a_picture(tmp_path: Path) -> None:
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs/benchmarks.md").read_text())
    report.write_page(rows_of_a_run(1.2), "a machine", page)
    text = page.read_text()
    for expected in (
        "The machine: a machine.",
        f"| Reference model, 2 ranks, plain loopback | {OURS} | 1.200 | 1.20-1.20 | 1.000 |",
        f"| 2 | {OURS} | 12.0 | 12.0 | 14.0 |",
        "| 2 | FSDP2, no resharding | 11.0 | 11.0 | 13.0 |",
        "| DeepSpeed ZeRO-2 | ModuleNotFoundError: No module named 'deepspeed' |",
        "reference model, 2 ranks, plain loopback](bench-frontier-reference-2-loopback.svg)",
    ):
        assert expected in text
    assert "<svg" in (tmp_path / "bench-frontier-reference-2-loopback.svg").read_text()[:500]
    report.write_page(rows_of_a_run(1.2), "a machine", page)
    assert page.read_text() == text


@pytest.mark.timeout(180)
def test_a_small_run_measures_every_variant_and_all_equal_ddp() -> None:
    names = [*ALWAYS, *(name for name in VARIANTS if name.startswith("onecopy"))]
    worker = ["--names", json.dumps(names), "--sizes", json.dumps(asdict(Sizes(**TINY)))]
    rows, error = compare.torchrun(2, ["time", *worker, "--rounds", "2"])
    assert {row["variant"] for row in rows} == set(names), error
    for row in rows:
        assert (row["error"], len(row["seconds"]), row["difference"]) == ("", 2, 0.0), row
    about = ["--names", json.dumps([OURS, THEIRS]), *worker[2:]]
    rows, error = compare.torchrun(2, ["save", *about, "--rounds", "1"])
    assert [row["error"] for row in rows] == ["", ""], error
    rows, error = compare.torchrun(2, ["memory", *about])
    assert len(rows) == 2, error
    for row in rows:
        assert row["gradients"] == pytest.approx(0.5 * row["parameters"], rel=0.05)
        assert row["state"] == pytest.approx(row["parameters"], rel=0.2)


def test_failures_are_reported_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGILL)\n"
        "time.sleep(60)\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*launcher, "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert compare.failure("[rank0]: RuntimeError: Connection reset\n" + done.stderr) == "rank 1 was killed by SIGILL"
    assert compare.failure("a\n[rank1]: ValueError: wrong\nraise ChildFailedError(\n") == "ValueError: wrong"
    assert (compare.failure("first\nlast\n"), compare.failure("")) == ("last", "no output")
