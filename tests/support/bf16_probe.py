"""Test whether torch's bf16 matmul works on this processor, and set an environment variable if it does not.

Some virtual machines have an Intel processor that advertises AMX although the hypervisor has not enabled it. torch
multiplies bf16 matrices with oneDNN, which then executes an illegal instruction, and SIGILL kills the process. With
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` in the environment oneDNN does not use AMX.

``python tests/support/bf16_probe.py COMMAND...`` runs a command with that variable if it is needed. The Makefile
starts its scripts in this way. This module imports only the standard library, so that it starts quickly.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "ONEDNN_MAX_CPU_ISA"
VALUE = "AVX512_CORE_BF16"

PROBE = [
    sys.executable,
    "-c",
    """
import torch
matrix = torch.ones(256, 256, dtype=torch.bfloat16)
matrix @ matrix
torch.nn.Linear(256, 256, dtype=torch.bfloat16)(matrix).sum().backward()
""",
]
"""The command of a process that multiplies bf16 matrices which are large enough for oneDNN to choose AMX."""

CPUINFO = Path("/proc/cpuinfo")

BEYOND = ("amx", "avx10", "avx512_fp16")
"""Prefixes of processor flags for instructions that oneDNN uses and that ``VALUE`` rules out.

Processors with AMX have the other two, and Linux may omit AMX from its list although oneDNN finds it.
"""


def protect() -> str:
    """Set the variable for this process and its children if torch's bf16 matmul needs it on this processor.

    Another process tries the matmul first, which takes about two seconds, unless the variable is set already or would
    change nothing. oneDNN reads the variable when it is first used, not when torch is imported. Returns a message for
    the user, empty if the matmul works or was not tried.
    """
    if VARIABLE in os.environ or not _has_more_than_the_variable_allows():
        return ""
    code, error = _probe()
    if code == 0:
        return ""
    if code > 0:
        return (
            f"torch's bf16 matmul could not be tried on this processor, so {VARIABLE} is not set: "
            f"the process {ending(code)}: {error}"
        )
    os.environ[VARIABLE] = VALUE
    message = f"torch's bf16 matmul dies with {ending(code).split()[-1]} on this processor: {VARIABLE}={VALUE} is set"
    code, error = _probe()
    if code:
        message += f", but with it, too, the process {ending(code)}" + (f": {error}" if error else "")
    return message


def ending(code: int | None) -> str:
    """Return in words how a process ended, from its exit code in ``subprocess`` or ``multiprocessing``."""
    if code is None:
        return "has not ended"
    names = {each.value: each.name for each in signal.Signals}
    return f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal-{-code}')}"


def _has_more_than_the_variable_allows() -> bool:
    """Return whether Linux lists an instruction set of ``BEYOND``, or lists nothing."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return True
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return any(flag.startswith(BEYOND) for flag in flags)


def _probe() -> tuple[int, str]:
    """Run the probe, and return its exit code and the last line of its error output."""
    done = subprocess.run(PROBE, capture_output=True, text=True, check=False)
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def main(command: list[str]) -> None:
    """Replace this process by a command, with the variable set if it is needed."""
    if not command:
        raise SystemExit("usage: bf16_probe.py COMMAND...")
    message = protect()
    if message:
        logger.warning("%s", message)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
