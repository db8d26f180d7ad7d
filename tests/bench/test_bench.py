"""The benchmark: its arithmetic on made-up rows, and one small run of the real thing."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onecopy.bench import launching, models, regression_check, result_tables, running, summaries, tables
from onecopy.bench.host_time import PEER
from onecopy.bench.models import MODELS, PARAMETER_SHAPES, Sizes
from onecopy.bench.pictures import draw
from onecopy.bench.results_page import page
from onecopy.bench.variants import ALONE, ALWAYS, THEIRS, VARIANTS, YARDSTICK, chosen
from onecopy.cli.main import app
from tests.support.harness import takes_long
from tests.support.paths import ROOT

TINY = {"vocabulary": 64, "width": 16, "head": 32, "depth": 1, "batch": 1, "length": 4}
RUN = ("reference", 2, "")

BUSY = 0.75
"""Processor time that moving takes on each of two cores, for each second."""


def timed(variant: str, seconds: list[float], wire: float = 0.0, error: str = "", heat: int = 0) -> dict[str, Any]:
    half = [value / 2 for value in seconds]
    return {
        "kind": "time",
        "variant": variant,
        "model": "reference",
        "ranks": 2,
        "link": "",
        "heat": heat,
        "sizes": TINY,
        "error": error,
        "difference": 0.0,
        "seconds": seconds,
        "backward": half,
        "step": half,
        "idle": [0.1] * len(seconds),
        "wire": [wire] * len(seconds),
    }


def rows_of_a_run(ours: float = 0.9) -> list[dict[str, Any]]:
    """Four rounds in which every other one is twice as slow for everybody."""
    noise = [1.0, 2.0, 1.0, 2.0]
    unit = 4.0 * sum(models.elements_of(TINY))
    found = [
        timed(ALONE, [0.5 * each for each in noise]),
        timed(YARDSTICK, noise, 2 * unit),
        timed(THEIRS, [1.2 * each for each in noise], 3 * unit),
        timed("onecopy, ShardedDataParallel", [ours * each for each in noise], 2 * unit),
        timed("DeepSpeed ZeRO-2", [], error="ModuleNotFoundError: No module named 'deepspeed'"),
    ]
    for name, seconds in (("all-reduce", 0.2), ("reduce to owners", 0.1), ("share", 0.1)):
        about = {"model": "reference", "ranks": 2, "link": "", "heat": 0}
        worked = [seconds * BUSY] * 3
        found.append({"kind": "primitive", "name": name, "seconds": [seconds] * 3, "worked": worked, **about})
    return found


def test_ratios_are_taken_round_by_round_so_that_common_noise_cancels() -> None:
    summary = {each["variant"]: each for each in summaries.summaries(rows_of_a_run(), RUN)}
    ours = summary["onecopy, ShardedDataParallel"]
    assert ours["to_ddp"] == pytest.approx(0.9)
    assert ours["to_torch"] == pytest.approx(0.75)
    assert ours["quartiles"] == pytest.approx([0.9, 0.9])
    assert ours["wire"] == pytest.approx(2.0)
    assert "deepspeed" in summary["DeepSpeed ZeRO-2"]["error"]


@pytest.mark.parametrize(("cores", "busy"), [(1, 1.0), (2, BUSY), (64, 0.0)])
def test_the_bound_is_the_work_that_is_left_with_a_share_of_the_update(
    cores: int, busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward 0.375 (median), half of an update of 0.375, and what moving for 0.2 takes of the cores."""
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert summaries.bound(rows_of_a_run(), RUN) == pytest.approx(0.375 + 0.375 / 2 + 0.2 * busy)


def test_the_guard_lets_noise_pass_and_names_a_loss(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    regression_check.record(rows_of_a_run(0.90), recorded)
    assert regression_check.losses(rows_of_a_run(0.92), recorded) == []
    (loss,) = regression_check.losses(rows_of_a_run(0.99), recorded)
    assert loss.variant == "onecopy, ShardedDataParallel"
    assert loss.recorded == pytest.approx(0.9)
    assert loss.now == pytest.approx(0.99)


def test_heats_fit_into_memory_and_each_has_the_variants_that_others_are_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names, sizes = list(VARIANTS), MODELS["reference"]
    monkeypatch.setattr(launching, "free_bytes", lambda: 20 << 30)
    found = running.heats(names, 4, sizes)
    assert len(found) > 1
    assert all(set(ALWAYS) <= set(heat) for heat in found)
    assert {name for heat in found for name in heat} == set(names)
    monkeypatch.setattr(launching, "free_bytes", lambda: 500 << 30)
    assert len(running.heats(names, 4, sizes)) == 1


def test_variants_are_chosen_by_parts_of_their_names() -> None:
    assert set(chosen("FSDP2;fairscale")) > {"FSDP2, resharding", "fairscale OSS, DDP", YARDSTICK, THEIRS}
    assert "DDP" not in chosen("FSDP2")
    assert chosen("") == list(VARIANTS)


def test_the_reference_model_is_the_one_of_the_page() -> None:
    sizes = models.elements_of({})
    assert 24e6 < sum(sizes) < 24.3e6
    assert max(sizes) / sum(sizes) == pytest.approx(0.695, abs=0.005)
    deep = models.elements_of({"vocabulary": 2048, "width": 384, "head": 2048, "depth": 12, "batch": 4})
    assert max(deep) / sum(deep) < 0.05


# The real thing, small


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench") / "rows.jsonl"
    sizes = [text for key, value in TINY.items() for text in ("--size", f"{key}={value}")]
    options = ["--ranks", "2", "--rounds", "2", "--parts", "time", "--variants", "onecopy", "--out", str(out), *sizes]
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.timeout(180)
def test_a_small_run_measures_every_variant_and_all_equal_ddp(measured: list[dict[str, Any]]) -> None:
    found = {row["variant"]: row for row in summaries.select(measured, "time")}
    assert set(found) == set(chosen("onecopy"))
    for name, row in found.items():
        assert not row["error"], f"{name}: {row['error']}"
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) > 0
        assert row["difference"] == 0.0 or name == ALONE, name
    assert {row["name"] for row in summaries.select(measured, "primitive")} == {
        "all-reduce",
        "reduce to owners",
        "share",
    }


def test_a_run_becomes_a_page_with_pictures(measured: list[dict[str, Any]], tmp_path: Path) -> None:
    memory = [
        {"kind": "memory", "variant": name, "rank": rank, "ranks": 2, "model": measured[0]["model"], "sizes": TINY}
        | {"parameters": 4e6, "gradients": 4e6, "state": 8e6 / 2, "other": 0, "between": 1e7}
        | {"peak": 2e7, "resident": 3e7}
        for name in chosen("onecopy")
        for rank in range(2)
    ]
    rows = measured + memory
    pictures = draw(rows, tmp_path)
    sizes = "vocabulary-64-width-16-head-32-depth-1-batch-1-length-4"
    frontier = f"bench-frontier-reference-{sizes}-2-loopback.svg"
    assert {picture.name for picture in pictures} == {"bench-memory-2.svg", frontier}
    assert all("<svg" in picture.read_text()[:500] for picture in pictures)
    text = page(result_tables.from_rows(rows, "a machine", pictures))
    for expected in (
        "a machine",
        "## Memory",
        "## Where onecopy loses",
        "onecopy, ShardedDataParallel",
        "bench-memory-2.svg",
    ):
        assert expected in text
    names = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| onecopy")]
    assert "onecopy, interleaved" in names


def test_the_page_of_the_repository_is_written_from_the_recorded_tables() -> None:
    recorded, checkpoints = ROOT / "benchmarks/results.json", ROOT / "benchmarks/checkpoints.md"
    written = (ROOT / "docs/benchmarks.md").read_text()
    assert written == page(result_tables.read(recorded)) + "\n" + checkpoints.read_text()


def test_tables_are_written_to_a_file_and_read_again(tmp_path: Path) -> None:
    saved: list[dict[str, Any]] = [
        {"kind": "save", "variant": YARDSTICK, "error": "", "save": 1.0},
        {"kind": "save", "variant": THEIRS, "error": "RuntimeError: no"},
    ]
    tables_of_a_run = result_tables.from_rows(rows_of_a_run() + saved, "a machine", [Path("a/bench-scaling.svg")])
    result_tables.write(tables_of_a_run, tmp_path / "tables.json")
    assert page(result_tables.read(tmp_path / "tables.json")) == page(tables_of_a_run)


@pytest.mark.parametrize(
    ("ours", "swing", "said", "loses"),
    [
        (1.2, 0.0, "slower in 1 of 1 runs", True),
        (1.04, 0.0, "the same, within noise", False),
        (1.2, 0.4, "the same, within noise", False),
        (0.8, 0.4, "the same, within noise", False),
        (0.8, 0.0, "faster in 1 of 1 runs", False),
    ],
)
def test_a_difference_within_noise_is_not_called_a_loss(ours: float, swing: float, said: str, loses: bool) -> None:
    level_2 = "onecopy, reduce-scatter hook"
    ddp = next(row for row in rows_of_a_run() if row["variant"] == YARDSTICK)["seconds"]
    ratios = [ours - swing, ours, ours, ours + swing]
    mine = timed(level_2, [ratio * each for ratio, each in zip(ratios, ddp, strict=True)])
    text = page(result_tables.from_rows([*rows_of_a_run(), mine], "a machine", []))
    assert f"Level 2 is {said}." in text
    assert (f"| Reference model, 2 ranks, plain loopback | {level_2} |" in text) is loses


def test_the_host_time_of_a_step_is_measured_with_the_tensors_of_real_models() -> None:
    found = {
        name: (len(shapes), sum(math.prod(shape) for shape in shapes)) for name, shapes in PARAMETER_SHAPES.items()
    }
    assert found["GPT-2 small"] == (148, 124_439_808)
    assert found["ResNet-50"] == (161, 25_557_032)
    assert found["Llama-like"][0] == 291


@takes_long
@pytest.mark.timeout(180)
def test_the_host_time_of_a_step_becomes_a_table_and_a_picture(tmp_path: Path) -> None:
    rows, error = launching.run(2, ["overhead", "--rounds", "1"])
    assert rows, error
    columns, cells = tables.host_time_columns(rows), tables.host_time_rows(rows)
    assert columns == ["variant", "GPT-2 small, 148 tensors", "ResNet-50, 161 tensors", "Llama-like, 291 tensors"]
    assert [row[0] for row in cells][2:] == [PEER, "onecopy", "onecopy, bucket views"]
    assert all(0 < row["seconds"] < row["whole"] for row in summaries.select(rows, "overhead"))
    planned = {"kind": "planning", "policy": "element", "parameters": 10, "ranks": 256, "seconds": 0.1}
    pictures = draw([*rows, planned], tmp_path)
    assert [picture.name for picture in pictures] == ["bench-growth.svg"]
    text = page(result_tables.from_rows([*rows, planned], "a machine", pictures))
    assert tables.markdown(columns, cells) in text
    assert "bench-growth.svg" in text


def test_a_wrong_model_is_named() -> None:
    result = CliRunner().invoke(app, ["bench", "--model", "huge"])
    assert result.exit_code == 2
    assert "huge" in result.output + result.stderr


def test_launches_become_one_row_and_an_error_in_one_is_the_wholes() -> None:
    first = [
        timed("a", [1.0, 2.0], wire=3.0) | {"difference": 0.5},
        {"kind": "primitive", "name": "share", "seconds": [1]},
    ]
    second = [timed("a", [3.0]), {"kind": "primitive", "name": "share", "seconds": [2]}]
    ours, share = running.merged([first, second])
    assert ours["seconds"] == [1.0, 2.0, 3.0]
    assert ours["wire"] == [3.0, 3.0, 0.0]
    assert ours["difference"] == 0.5
    assert share["seconds"] == [1, 2]
    broken, _ = running.merged([first, [timed("a", [], error="RuntimeError: no")], second])
    assert broken["error"] == "RuntimeError: no"


def test_sizes_are_options() -> None:
    assert running.Plan(names=[], sizes={"depth": 5}).sizes_of("reference") == Sizes(depth=5)
    assert running.Plan(names=[], sizes={"batch": 4}).name_of("deep") == "deep (batch 4)"
    assert running.Plan(names=[]).name_of("deep") == "deep"


def test_a_rank_of_the_benchmark_that_a_signal_kills_is_named(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGILL)\n"
        "time.sleep(60)\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command = [*torchrun, "--nproc-per-node=2", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert launching.failure(done.stderr, done.returncode) == "rank 1 was killed by SIGILL"
    told = "[rank0]: RuntimeError: Connection reset by peer\n" + done.stderr
    expected = "rank 1 was killed by SIGILL; RuntimeError: Connection reset by peer"
    assert launching.failure(told, done.returncode) == expected


def test_failures_without_a_signal_are_reported_by_their_error() -> None:
    assert launching.failure("a\n[rank1]: ValueError: wrong\nraise ChildFailedError(\n", 1) == "ValueError: wrong"
    assert launching.failure("first\nlast\n", 1) == "last"
    assert launching.failure("", 0) == ""
    assert launching.failure("", -signal.SIGKILL) == "torchrun was killed by SIGKILL"
