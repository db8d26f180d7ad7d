"""The script with which a person checks their accelerators, on the simulated one."""

from __future__ import annotations

import pytest

from tests.accelerator import build
from tests.support.check_gpu import start


@pytest.mark.timeout(600)
def test_all_checks_pass_without_a_race() -> None:
    if build.compiler() is None:
        pytest.skip("the simulated accelerator needs a C++ compiler, and there is no g++ here")
    build.library()
    done = start(["-m", "tests.accelerator.check_gpu_rank"], "--quick", "--timeout", "200")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on sim" in done.stdout
    assert "**All checks passed.**" in done.stdout
