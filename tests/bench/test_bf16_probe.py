"""The probe of torch's bf16 matmul: its verdict on processes that really die, and where its setting arrives."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import bf16_probe
from tests.support.paths import ROOT

SETTING = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"
SET = f"torch's bf16 matmul dies with SIGILL on this processor: {SETTING} is set"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


DIES = python("import os, signal; os.kill(os.getpid(), signal.SIGILL)")
DIES_WITHOUT = python("import os, signal; 'ONEDNN_MAX_CPU_ISA' in os.environ or os.kill(os.getpid(), signal.SIGILL)")
SUSPECT = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile\n"

CASES = {
    "it dies": (DIES_WITHOUT, SUSPECT, None, SET),
    "it dies with it": (DIES, SUSPECT, None, f"{SET}, but with it, too, the process was killed by SIGILL"),
    "it works": (python(""), SUSPECT, None, ""),
    "an ordinary error": (
        python("raise ImportError('no torch')"),
        SUSPECT,
        None,
        "could not be tried on this processor, so ONEDNN_MAX_CPU_ISA is not",
    ),
    "the user has set the variable": (DIES, SUSPECT, "AVX2", ""),
    "a processor without AMX in the list": (DIES_WITHOUT, "flags : avx512_bf16 avx512_fp16\n", None, SET),
    "another processor": (DIES, "model name : amx\nflags : avx2 avx512_bf16\n", None, ""),
    "no list": (DIES_WITHOUT, None, None, SET),
}
"""The command of the probe, the processor, the variable before, and what is told."""


def setting() -> str | None:
    return os.environ.get("ONEDNN_MAX_CPU_ISA")


@pytest.mark.parametrize("case", CASES)
def test_the_variable_is_set_where_the_matmul_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    probe, flags, before, told = CASES[case]
    monkeypatch.setattr(bf16_probe, "PROBE", probe)
    monkeypatch.setattr(bf16_probe, "CPUINFO", tmp_path / "cpuinfo")
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(flags)
    monkeypatch.setenv(bf16_probe.VARIABLE, before or "")  # so that it is as before after the test
    if before is None:
        monkeypatch.delenv(bf16_probe.VARIABLE)
    found = bf16_probe.protect()
    assert told in found
    assert bool(told) == bool(found)
    assert setting() == ("AVX512_CORE_BF16" if SET in told else before)


def test_the_setting_reaches_the_tests_their_workers_and_a_command_of_the_makefile(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(SUSPECT)
    code = f"""
import pathlib
from tests.support import bf16_probe
bf16_probe.PROBE, bf16_probe.CPUINFO = {DIES_WITHOUT!r}, pathlib.Path({str(tmp_path / "cpuinfo")!r})
from tests import conftest
from tests.bench.test_bf16_probe import setting
from tests.support.harness import pools
print(*conftest.pytest_report_header(), sep="\\n")
print([setting(), *pools.run(2, "tests.bench.test_bf16_probe", "setting", {{}})])
pools.close()
"""
    command = "bf16_probe.main(['sh', '-c', 'echo $ONEDNN_MAX_CPU_ISA; exec true'])"
    env = {name: value for name, value in os.environ.items() if name != bf16_probe.VARIABLE}
    in_tests, in_command = (
        subprocess.run(python(each), cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=True)
        for each in (code, code[: code.index("from tests import conftest")] + command)
    )
    assert in_tests.stdout.splitlines()[1:] == [SET, str(3 * ["AVX512_CORE_BF16"])]
    assert (in_command.stdout, in_command.stderr) == ("AVX512_CORE_BF16\n", f"{SET}\n")


def test_the_script_passes_the_exit_code_of_a_command_on() -> None:
    for command, expected in (
        (["sh", "-c", "echo $0 $1; exit 7", "one", "two words"], (7, "one two words\n", "")),
        ([], (1, "", "usage: bf16_probe.py COMMAND...\n")),
    ):
        script = [sys.executable, bf16_probe.__file__, *command]
        done = subprocess.run(script, capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout, done.stderr) == expected


def test_all_scripts_that_the_makefile_starts_are_started_safely() -> None:
    text = (ROOT / "Makefile").read_text()
    assert (ROOT / re.findall(r"^SAFELY := \S+ (\S+)$", text, re.MULTILINE)[0]).samefile(bf16_probe.__file__)
    started = re.findall(r"^\t(.*)\$\(BIN\)/(?:torchrun|python (?:benchmarks|examples)/)", text, re.MULTILINE)
    assert len(started) >= 7
    assert all("$(SAFELY)" in before for before in started)
