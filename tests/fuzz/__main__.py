"""``make fuzz``: random training programs against plain DDP."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.fuzz.drawing import draw
from tests.fuzz.programs import Program
from tests.fuzz.running import Failure, plain_fails, run, shrink
from tests.fuzz.script import script
from tests.support.harness import pools

SHOWN = 3
"""How many failures that look alike are made short and printed: they may have different causes."""


def main() -> int:
    """Return 1 if a program failed."""
    parser = argparse.ArgumentParser(description="Random training programs against plain DDP.")
    parser.add_argument("count", type=int, nargs="?", default=200, help="how many programs")
    parser.add_argument("--seed", type=int, default=0, help="the first program's; the others follow")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make a failing program shorter")
    parser.add_argument("--show", action="store_true", help="print the programs and run none")
    arguments = parser.parse_args()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # DDP warns whenever it finds no unused parameter
    if arguments.show:
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            print(script(draw(seed)))
        return 0
    try:
        return report(arguments.seed, arguments.count, arguments.shrink)
    finally:
        pools.close()


def report(first: int, count: int, seconds: float) -> int:
    """Run programs; print some of each way to fail, as short scripts."""
    start = time.monotonic()
    seeds_of: dict[str, list[int]] = {}
    for done, seed in enumerate(range(first, first + count), start=1):
        failure = run(draw(seed))
        if failure is not None:
            alike = seeds_of.setdefault(failure.kind, [])
            alike.append(seed)
            print(f"seed {seed}: {failure.kind}", flush=True)
            if len(alike) <= SHOWN:
                print(shortest(seed, failure, seconds), flush=True)
        if done % 50 == 0:
            print(f"{done} programs, {time.monotonic() - start:.0f} s", flush=True)
    print(f"\n{count} programs from seed {first} on, {time.monotonic() - start:.0f} s")
    for kind, seeds in seeds_of.items():
        print(f"  {len(seeds)} failed ({', '.join(map(str, seeds[:8]))}): {kind}")
    if not seeds_of:
        print("  all of them train as plain DDP does")
    return int(bool(seeds_of))


def shortest(seed: int, failure: Failure, seconds: float) -> str:
    """What a maintainer needs: a script to run, and what it raises."""
    program = draw(seed)
    refused = None if failure.compared else plain_fails(program)
    if refused is not None:
        return f"plain DDP itself fails, so the tables of this tool are wrong:\n{refused.text}\n{script(program)}"

    def fails_alike(candidate: Program) -> bool:
        again = run(candidate)
        return again is not None and again.kind == failure.kind and (again.compared or plain_fails(candidate) is None)

    short = shrink(program, fails_alike, seconds)
    again = run(short)
    text = again.text if again else "it did not fail again: it depends on what ran before, or on time"
    return f"{text}\n{'-' * 80}\n{script(short, f'program_{seed}.py')}{'-' * 80}"


if __name__ == "__main__":
    sys.exit(main())
