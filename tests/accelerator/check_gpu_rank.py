"""One rank of ``examples/check_gpu.py`` on the simulated accelerator, for torchrun: the exit code is 1 after a race."""

from __future__ import annotations

import importlib.util
import sys

from tests.accelerator import device
from tests.support.paths import ROOT


def main() -> int:
    spec = importlib.util.spec_from_file_location("check_gpu", ROOT / "examples" / "check_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    check_gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_gpu)
    with device.simulate(seed=1, host_ahead=6) as run:
        code: int = check_gpu.main(sys.argv[1:])
    print(*(f"race: {report}" for report in run.reports[:10]), sep="\n", file=sys.stderr, flush=True)
    return 1 if run.reports else code


if __name__ == "__main__":
    sys.exit(main())
