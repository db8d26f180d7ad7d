"""Whether torch's own bf16 matmul works on this processor, and a setting for processors on which it does not.

Some virtual machines have an Intel processor that advertises AMX although the hypervisor has not enabled it. There
oneDNN, which torch multiplies bf16 matrices with, runs into an illegal instruction: SIGILL ends the process. With
``ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16`` in the environment oneDNN does not use AMX.

``python src/onecopy/bench/processor.py COMMAND...`` runs a command with that setting if it is needed; the Makefile
starts its scripts so. Only the standard library is imported here, so that this costs next to nothing elsewhere.
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
"""A process that dies where the matmul does; matrices are large enough for oneDNN to choose AMX."""

CPUINFO = Path("/proc/cpuinfo")

BEYOND = ("amx", "avx10", "avx512_fp16")
"""How the flags begin of everything beyond ``VALUE`` that oneDNN uses."""


def protect() -> str:
    """Set the variable for this process and those it starts, if torch's bf16 matmul needs it here.

    A process of its own tries the matmul first; it imports torch, which takes about two seconds. That is left out if
    the variable is set already, or if Linux lists no instructions of the processor that the variable would rule out:
    then it can change nothing. The flags of AVX10 and AVX512_FP16, which processors with AMX have as well, count too:
    Linux may leave AMX out of its list although the processor itself still names it to oneDNN.

    oneDNN reads the variable when it is first used, not when torch is imported.

    Returns:
        What is to be told to the user; empty if the matmul works or was not tried.
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
    told = f"torch's bf16 matmul dies with {ending(code).split()[-1]} on this processor: {VARIABLE}={VALUE} is set"
    code, error = _probe()
    return f"{told}, but with it, too, the process {ending(code)}" + (f": {error}" if error else "") if code else told


def ending(code: int | None) -> str:
    """How a process ended whose exit code this is, as ``subprocess`` and ``multiprocessing`` give it.

    Returns:
        ``"was killed by SIGILL"``, ``"exited with code 3"`` or, for ``None``, ``"has not ended"``.
    """
    if code is None:
        return "has not ended"
    names = {each.value: each.name for each in signal.Signals}
    return f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal-{-code}')}"


def _has_more_than_the_variable_allows() -> bool:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return True
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return any(flag.startswith(BEYOND) for flag in flags)


def _probe() -> tuple[int, str]:
    """The exit code of the probe, and the last line of what it said."""
    done = subprocess.run(PROBE, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    return done.returncode, (done.stderr.strip().splitlines() or [""])[-1]


def main(command: list[str]) -> None:
    """Become this command, with the variable set if it is needed."""
    if not command:
        raise SystemExit("usage: processor.py COMMAND...")
    told = protect()
    if told:
        logger.warning("%s", told)
    os.execvp(command[0], command)  # noqa: S606 - the user's own command


if __name__ == "__main__":
    main(sys.argv[1:])
