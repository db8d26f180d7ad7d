"""The script with which a person checks their accelerators, on the simulated one.

As a module, this is one rank of examples/check_gpu.py, for torchrun: the exit code is 1 after a race.
"""

from __future__ import annotations

import sys

import pytest

from tests.accelerator import build, device
from tests.support.check_gpu import load, start
from tests.support.harness import EVERYTHING

SOME = ("level 1, fp16 with GradScaler", "reduce_scatter_hook, clipped", "hook_with_zero_step_interleaved")
"""The trainings that run unless everything does."""


@pytest.mark.timeout(600)
def test_all_checks_pass_without_a_race() -> None:
    if build.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler, and there is no g++ here")
    build.library()
    done = start(["-m", "tests.accelerator.test_check_gpu"], "--quick", "--timeout", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on sim" in done.stdout
    assert "**All checks passed.**" in done.stdout


def main() -> int:
    check_gpu = load()
    if not EVERYTHING:
        check_gpu.TRAININGS = {name: check_gpu.TRAININGS[name] for name in SOME}
        check_gpu.TOLERANCE.pop("bf16")
        check_gpu.PEERS = {}
    with device.simulate(seed=1, host_ahead=6) as run:
        code: int = check_gpu.main(sys.argv[1:])
    print(*(f"race: {report}" for report in run.reports[:10]), sep="\n", file=sys.stderr, flush=True)
    return 1 if run.reports else code


if __name__ == "__main__":
    sys.exit(main())
