"""One rank of a measurement, started by ``torchrun -m onecopy.bench.worker KIND ...``; it writes rows as JSON."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from onecopy.bench import host_time, memory_use, saving_time, step_time
from onecopy.bench.models import Sizes


def main() -> None:
    """Measure, and write the rows of rank 0 to a file; for memory, the rows of every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["time", "memory", "overhead", "save"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--names", default="[]", help="variants, as JSON")
    parser.add_argument("--sizes", default="{}", help="the model's sizes, as JSON")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=step_time.COMPARED, help="steps before the first timed step")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names, sizes = json.loads(arguments.names), Sizes(**json.loads(arguments.sizes))
    if arguments.kind == "time":
        rows = step_time.measure(names, sizes, arguments.rounds, arguments.warm_up)
    elif arguments.kind == "memory":
        rows = [memory_use.measure(names[0], sizes)]
    elif arguments.kind == "overhead":
        rows = host_time.host_time(arguments.rounds)
    else:
        rows = saving_time.measure(names, sizes, arguments.rounds, Path(os.environ.get("TMPDIR", "/tmp")))  # noqa: S108
    if arguments.kind == "memory" or dist.get_rank() == 0:
        about = {"ranks": dist.get_world_size(), "sizes": asdict(sizes)}
        lines = [json.dumps({**about, **row}) for row in rows]
        (arguments.folder / f"{dist.get_rank()}.jsonl").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
