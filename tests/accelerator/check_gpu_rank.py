"""One rank of examples/check_gpu.py on the simulated accelerator, for torchrun: the exit code is 1 after a race."""

from __future__ import annotations

import sys

from tests.accelerator import device
from tests.support.check_gpu import load
from tests.support.harness import EVERYTHING

SOME = ("level 1, fp16 with GradScaler", "reduce_scatter_hook, clipped", "hook_with_zero_step_interleaved")
"""The trainings that run unless everything does."""


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
