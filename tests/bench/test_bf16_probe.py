"""The probe of torch's bf16 matmul: its verdict on processes that really die, and where its setting arrives."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onecopy.bench import bf16_probe
from onecopy.cli.main import app
from tests.support.paths import ROOT

MAKEFILE = ROOT / "Makefile"

SETTING = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
DIES = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGILL)"]
DIES_WITHOUT = [
    sys.executable,
    "-c",
    "import os, signal; 'ONEDNN_MAX_CPU_ISA' in os.environ or os.kill(os.getpid(), signal.SIGILL)",
]
WORKS = [sys.executable, "-c", ""]
RAISES = [sys.executable, "-c", "raise ImportError('no torch')"]

SUSPECT = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n"


@pytest.fixture
def cpuinfo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A processor with AMX and no setting; the environment is as before after the test."""
    path = tmp_path / "cpuinfo"
    path.write_text(SUSPECT)
    monkeypatch.setattr(bf16_probe, "CPUINFO", path)
    monkeypatch.setenv(bf16_probe.VARIABLE, "")
    monkeypatch.delenv(bf16_probe.VARIABLE)
    return path


def setting() -> str | None:
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


def run_with_a_probe_that_dies(cpuinfo: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, after the probe was replaced by one that dies without the setting."""
    replace = f"bf16_probe.PROBE, bf16_probe.CPUINFO = {DIES_WITHOUT!r}, pathlib.Path({str(cpuinfo)!r})"
    return subprocess.run(
        [sys.executable, "-c", f"import pathlib\nfrom onecopy.bench import bf16_probe\n{replace}\n{code}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )


def test_a_probe_that_dies_of_a_signal_sets_the_variable(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", DIES_WITHOUT)
    assert bf16_probe.protect() == f"torch's bf16 matmul dies with SIGILL on this processor: {SETTING} is set"
    assert setting() == "AVX512_CORE_BF16"


def test_a_probe_that_dies_with_the_variable_too_is_said(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", DIES)
    told = bf16_probe.protect()
    assert told.endswith(f"{SETTING} is set, but with it, too, the process was killed by SIGILL")
    assert setting() == "AVX512_CORE_BF16"


def test_a_probe_that_works_sets_nothing(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", WORKS)
    assert bf16_probe.protect() == ""
    assert setting() is None


def test_an_ordinary_error_of_the_probe_is_said_and_sets_nothing(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", RAISES)
    told = bf16_probe.protect()
    assert "could not be tried" in told
    assert told.endswith("the process exited with code 1: ImportError: no torch")
    assert setting() is None


@pytest.mark.parametrize("value", ["AVX2", ""])
def test_a_variable_that_the_user_has_set_is_left(cpuinfo: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", DIES)
    monkeypatch.setenv(bf16_probe.VARIABLE, value)
    assert bf16_probe.protect() == ""
    assert setting() == value


@pytest.mark.parametrize(
    ("text", "is_probed"),
    [
        (SUSPECT, True),
        ("flags : avx512_bf16 avx512_fp16\n", True),
        ("model name : amx\nflags : avx2 avx512_bf16\n", False),
        ("Features : asimd bf16\n", False),
        (None, True),
    ],
)
def test_only_a_processor_for_which_the_variable_can_matter_is_probed(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, is_probed: bool
) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", DIES)
    cpuinfo.unlink()
    if text is not None:
        cpuinfo.write_text(text)
    assert bool(bf16_probe.protect()) == is_probed


def test_the_real_probe_says_nothing_or_helps_on_this_machine(cpuinfo: Path) -> None:
    told = bf16_probe.protect()
    assert told == "" or told.endswith("is set"), told


def test_torch_obeys_a_variable_that_is_set_after_its_import() -> None:
    """oneDNN tells which instructions it uses, in its first line about the processor, when it is first used."""
    code = """
import os
import onecopy, torch
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
torch.nn.functional.conv2d(torch.ones(16, 16, 32, 32), torch.ones(16, 16, 3, 3))
"""
    env = {name: value for name, value in os.environ.items() if name != bf16_probe.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    if "cpu,isa:" not in done.stdout:
        pytest.skip("torch does not use oneDNN here")
    assert "AVX-512" not in done.stdout
    assert "AMX" not in done.stdout


def test_the_setting_reaches_the_tests_and_their_workers(cpuinfo: Path) -> None:
    code = """
from tests import conftest
from tests.bench.test_bf16_probe import setting
from tests.support.harness import pools
print(*conftest.pytest_report_header(), sep="\\n")
print([setting(), *pools.run(2, "tests.bench.test_bf16_probe", "setting", {})])
pools.close()
"""
    lines = run_with_a_probe_that_dies(cpuinfo, code).stdout.splitlines()
    assert lines[1:] == [
        f"torch's bf16 matmul dies with SIGILL on this processor: {SETTING} is set",
        str(3 * ["AVX512_CORE_BF16"]),
    ]


def test_the_setting_reaches_a_command_that_the_makefile_starts(cpuinfo: Path) -> None:
    done = run_with_a_probe_that_dies(cpuinfo, "bf16_probe.main(['sh', '-c', 'echo $ONEDNN_MAX_CPU_ISA; exec true'])")
    assert done.stdout == "AVX512_CORE_BF16\n"
    assert done.stderr == f"torch's bf16 matmul dies with SIGILL on this processor: {SETTING} is set\n"


def test_the_script_runs_a_command_and_passes_its_exit_code_on() -> None:
    command = [sys.executable, bf16_probe.__file__, "sh", "-c", "echo $0 $1; exit 7", "one", "two words"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (7, "one two words\n")
    done = subprocess.run(command[:2], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (1, "usage: bf16_probe.py COMMAND...\n")


def test_all_scripts_that_the_makefile_starts_are_started_safely() -> None:
    text = MAKEFILE.read_text()
    assert (MAKEFILE.parent / re.findall(r"^SAFELY := \S+ (\S+)$", text, re.MULTILINE)[0]).samefile(bf16_probe.__file__)
    started = [
        line
        for line in text.splitlines()
        if re.search(r"^\t.*(torchrun|onecopy train|(benchmarks|examples)/\w+\.py)", line)
    ]
    assert len(started) >= 7
    assert all(re.search(r"\$\(SAFELY\) \$\(BIN\)/(torchrun|python|onecopy) ", line) for line in started)


def test_the_setting_reaches_the_ranks_of_the_benchmark(
    cpuinfo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bf16_probe, "PROBE", DIES_WITHOUT)
    shows = tmp_path / "python"
    shows.write_text('#!/bin/sh\necho "Error: started with $ONEDNN_MAX_CPU_ISA" >&2\nexit 1\n')
    shows.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(shows))
    options = ["--ranks", "2", "--parts", "save", "--out", str(tmp_path / "rows.jsonl")]
    result = CliRunner().invoke(app, ["bench", *options])
    assert f"dies with SIGILL on this processor: {SETTING} is set\n" in result.output
    assert "started with AVX512_CORE_BF16" in result.output


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-signal.SIGILL, "was killed by SIGILL"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-(signal.SIGRTMIN + 1), f"was killed by signal-{signal.SIGRTMIN + 1}"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (None, "has not ended"),
    ],
)
def test_the_end_of_a_process_in_words(code: int | None, words: str) -> None:
    assert bf16_probe.ending(code) == words
