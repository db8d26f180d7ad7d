"""Starts examples/check_gpu.py with torchrun; as a module, it is one rank of it with configurations that fail."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from tests.support.examples import EXAMPLES, example
from tests.support.paths import ROOT

EXAMPLE = EXAMPLES / "check_gpu.py"


def start(program: list[str], *options: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Run a program with torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=600
    )


def load() -> Any:
    """Return the example as a module."""
    return example("check_gpu")


def main() -> int:
    """Check four configurations: a right one, one with other options, one that raises, one that raises on one rank."""
    check_gpu = load()

    def other_options(ranks: Any, module: Any) -> Any:
        model, optimizer = check_gpu.level_1(ranks, module)
        optimizer.param_groups[0]["lr"] *= 2
        return model, optimizer

    def raises(ranks: Any, module: Any) -> Any:
        raise ValueError("on all ranks")

    def raises_on_one_rank(ranks: Any, module: Any) -> Any:
        return raises(ranks, module) if ranks.rank == 1 else check_gpu.level_1(ranks, module)

    builds = [check_gpu.level_1, other_options, raises, raises_on_one_rank, check_gpu.level_1]
    check_gpu.TRAININGS = {f"{number} {build.__name__}": ("fp32", build) for number, build in enumerate(builds)}
    check_gpu.RESUMED, check_gpu.TOLERANCE = {}, {"fp32": check_gpu.TOLERANCE["fp32"]}
    code: int = check_gpu.main(sys.argv[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
