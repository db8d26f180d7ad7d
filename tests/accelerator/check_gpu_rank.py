"""One rank of examples/check_gpu.py on the simulated accelerator, for torchrun: the exit code is 1 after a race."""

from __future__ import annotations

import sys

from tests.accelerator import device
from tests.support.check_gpu import load


def main() -> int:
    check_gpu = load()
    with device.simulate(seed=1, host_ahead=6) as run:
        code: int = check_gpu.main(sys.argv[1:])
    print(*(f"race: {report}" for report in run.reports[:10]), sep="\n", file=sys.stderr, flush=True)
    return 1 if run.reports else code


if __name__ == "__main__":
    sys.exit(main())
