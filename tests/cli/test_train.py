"""``onecopy train`` as a person types it: started, stopped by Ctrl-C, continued, and as a rank of torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from onecopy.cli.main import app
from tests.support.harness import takes_long

SMALL = ["--width", "32", "--layers", "1", "--batch", "2", "--length", "8"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *SMALL, *map(str, arguments)])


def words_of(result: Result) -> str:
    return " ".join((result.output + result.stderr).replace("│", " ").split())


@pytest.fixture
def as_only_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The variables that torchrun sets, for one rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_only_rank")
def test_a_comparison_as_a_rank_of_torchrun_ends_with_table_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "compare.png"
    result = run("--compare", "--steps", 6, "--folder", tmp_path, "--plot", picture)
    assert result.exit_code == 0, result.output
    text = words_of(result)
    for expected in ("MB per rank", "DDP", "level 1", "level 2", "level 3", "of DDP", "The model writes", "6 steps"):
        assert expected in text, text
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("as_only_rank")
def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    result = run("--level", "3", "--steps", 4, "--folder", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert (found["name"], len(found["losses"]), found["ranks"]) == ("level 3", 4, 1)
    assert found["memory"][0]["state"] > 0
    assert "step 4/4" in result.stderr
    assert (tmp_path / "train.png").exists()


@pytest.mark.usefixtures("as_only_rank")
def test_tensorboard_shows_the_values_of_the_last_run(tmp_path: Path) -> None:
    """The first run makes more steps than the second one, which begins anew: its last steps must not be shown."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'onecopy[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (5, 3):
        result = run("--steps", steps, "--folder", tmp_path, "--tensorboard", tmp_path / "events", "--fresh", "--json")
        assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    (folder,) = (tmp_path / "events").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    shown = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert shown["loss"] == list(enumerate(found["losses"], start=1)), "one rank's fp32 loss is stored exactly"
    kinds = found["memory"][0]
    assert set(shown) == {"loss", "tokens per second", *(f"bytes of rank 0/{kind}" for kind in (*kinds, "process"))}
    for kind, size in kinds.items():
        assert shown[f"bytes of rank 0/{kind}"][-1] == (3, size)


@pytest.mark.usefixtures("as_only_rank")
def test_a_checkpoint_of_another_model_is_refused_in_one_line(tmp_path: Path) -> None:
    assert run("--steps", 2, "--folder", tmp_path).exit_code == 0
    result = run("--steps", 4, "--folder", tmp_path, "--width", 64)
    assert result.exit_code == 1
    assert "tokens.weight" in words_of(result)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (["--compare", "--level", "1"], "leave out --level", 2),
        (["--level", "4"], "Invalid value", 2),
        (["--ranks", "0"], "Invalid value", 2),
        (["--width", "33"], "must be a multiple of 32", 2),
        (["--optimizer", "lion"], "Invalid value", 2),
    ],
)
def test_wrong_commands_have_exit_code_2(arguments: list[str], message: str, code: int) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert message in words_of(result)


@pytest.mark.usefixtures("as_only_rank")
def test_more_ranks_than_torchrun_has_started_are_refused() -> None:
    result = run("--ranks", 3)
    assert result.exit_code == 2
    assert "torchrun has started 1 ranks" in words_of(result)


@pytest.mark.parametrize(
    ("package", "option", "extra"), [("tensorboard", "--tensorboard", "tensorboard"), ("matplotlib", "--plot", "demo")]
)
def test_an_option_whose_package_is_missing_names_the_extra(
    package: str, option: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run(option, tmp_path / "somewhere", "--folder", tmp_path)
    assert result.exit_code == 1
    assert f"{option} needs {package}: pip install 'onecopy[{extra}]'" in words_of(result)


@takes_long
def test_ctrl_c_saves_and_the_same_command_continues(tmp_path: Path) -> None:
    """The real command with two processes. The signal goes to all processes, as from a terminal."""
    steps = 300
    command = [sys.executable, "-m", "onecopy.cli", "train", *SMALL, "--steps", str(steps), "--folder", str(tmp_path)]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--json"], stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while "step " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        code = process.wait(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    text = log.read_text()
    assert code == 130, text
    assert "the same command continues" in text
    assert "Traceback" not in text

    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    found: dict[str, Any] = result
    assert 0 < found["first_step"] < steps
    assert (len(found["losses"]), found["finished"], found["ranks"]) == (steps, True, 2)
    assert found["losses"][-1] < found["losses"][0]
