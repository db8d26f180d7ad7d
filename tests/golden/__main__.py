"""``python -m tests.golden record FILE`` notes what programs give; ``compare FILE`` prints what is different now."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # torch's bf16 matmul dies on some processors

from tests.golden.pool import Pool
from tests.golden.programs import PROGRAMS, Program, with_plain_ddp

EXACT = ("losses", "params", "state", "errors")
COUNTED = ("bytes", "collectives", "order")

INTENDED = {
    ("error: state_dict without consolidation", "errors"): "raises, and names the line to add",
    **{
        (f"{level}: {name}, 2 ranks", field): "parameters are cut evenly, so norms are added up in another order"
        for level in "12"
        for name in ("clipping", "accumulation, clipping, momentum", "GradScaler, clipping")
        for field in ("losses", "params", "state")
    },
    **{
        (f"{level}: bf16 masters, clipping, 2 ranks", field): "the factor is not rounded to bf16"
        for level in "123"
        for field in ("losses", "params", "state")
    },
}
"""Differences in results that are meant, by program and field."""


def row(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What is recorded of what the ranks returned."""
    failed = [answer.get("errors", "none") for answer in answers]
    if any("params" not in answer for answer in answers):
        return {"errors": failed, "text": [answer.get("text", "") for answer in answers]}
    first, digests = answers[0], {answer["params"] for answer in answers}
    return {
        "losses": [answer["losses"] for answer in answers],
        "params": first["params"] if len(digests) == 1 else f"differ between ranks: {sorted(digests)}",
        "errors": failed,
        **{key: first[key] for key in ("state", "values", *COUNTED)},
    }


def programs(world_size: int) -> dict[str, Program]:
    """The programs that end on this number of ranks."""
    return {name: each for name, each in PROGRAMS.items() if each.resize[1] in (0, world_size)}


def measured(only: str) -> dict[str, Any]:
    """What every program gives now."""
    pools, rows = {size: Pool(size) for size in (2, 3)}, dict[str, Any]()
    plain: dict[Any, Any] = {}

    def train(pool: Pool, program: Program) -> dict[str, Any]:
        folder = tempfile.mkdtemp()
        if not program.resize[0]:
            return row(pool.run("train", program, folder, ""))
        before = row(pools[program.resize[0]].run("train", program, folder, "save"))
        after = row(pool.run("train", program, folder, "load"))
        return after | {"losses": [before.get("losses"), after.get("losses")]}

    for size, pool in pools.items():
        for name, program in programs(size).items():
            if not re.search(only, name):
                continue
            found, reference = train(pool, program), with_plain_ddp(program)
            if program.resize[0]:
                theirs = plain.setdefault(repr(replace(program, level="1")), dict(found))  # level 1 in place of DDP
            else:
                if repr(reference) not in plain:
                    plain[repr(reference)] = train(pool, reference)
                theirs = plain[repr(reference)]
            found["as DDP"] = [key for key in ("losses", "params", "state") if found.get(key) == theirs.get(key)]
            narrow = program.dtype == "bfloat16" or "mixed_precision" in program.wrapper
            found["far"] = far(found, theirs, 0.1 if narrow else 2e-3)
            found["new"] = program.new
            found["ddp"] = {key: theirs.get(key) for key in ("params", "state", "errors")}
            found["exact"] = program.exact and size == 2 and not program.resize[0]
            found.pop("values", None)
            rows[f"{name}, {size} ranks"] = found
        plain.clear()
    from tests.golden.mistakes import MISTAKES

    for name in MISTAKES:
        if re.search(only, f"error: {name}"):
            answers = pools[2].run("mistake", name, tempfile.mkdtemp(), "")
            rows[f"error: {name}"] = {key: [each.get(key, "") for each in answers] for key in ("errors", "text")}
    for pool in pools.values():
        pool.close()
    return rows


def far(ours: dict[str, Any], plain: dict[str, Any], tolerance: float) -> bool:
    """Whether the parameters are further from plain DDP's than rounding explains."""
    pairs = zip(ours.get("values", ()), plain.get("values", ()), strict=False)
    return any(not abs(a - b) <= tolerance * (1 + abs(b)) for a, b in pairs)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file")
    parser.add_argument("--only", default="", help="a regular expression for names of programs")
    parser.add_argument("--verbose", action="store_true", help="list every difference in bytes and collectives")
    given = parser.parse_args()
    start, rows = time.monotonic(), measured(given.only)
    for name, found in rows.items():
        missing = sorted({"losses", "params", "state"} - set(found.get("as DDP", ())))
        if not found.get("new") and ((found.get("exact") and missing) or found.get("far")):
            print(f"not as plain DDP: {name}: {', '.join(missing)} {''.join(found.get('text', '')[:1])}")
    print(f"{len(rows)} programs and errors in {time.monotonic() - start:.0f} s")
    if given.command == "record":
        texts = [json.dumps(name) + ": " + json.dumps(found) for name, found in rows.items()]
        with open(given.file, "w", encoding="utf-8") as file:
            file.write("{\n" + ",\n".join(texts) + "\n}\n")
        return 0
    with open(given.file, encoding="utf-8") as file:
        return compare(json.load(file), rows, given.verbose)


def begins_with_three(name: str) -> bool:
    """Whether a program has 3 ranks at any time: their gradients may be added up in another order."""
    return "3 ranks" in name or "3 to 2 ranks" in name


def compare(recorded: dict[str, Any], rows: dict[str, Any], verbose: bool) -> int:
    """Print the differences; return 1 if results differ."""
    wrong, rounding, intended, counted = list[str](), list[str](), list[str](), list[str]()
    sums: dict[str, list[int]] = {}
    kept: list[str] = []
    for name, found in rows.items():
        old = recorded.get(name)
        if found.get("new"):
            found["exact"] &= "params" in found
            done = "params" in found and not found["far"] and (not found["exact"] or len(found["as DDP"]) == 3)
            kept.append(
                f"{name:<60} {'as plain DDP' if done else 'NOT AS PLAIN DDP ' + ''.join(found.get('text', []))[-300:]}"
            )
            continue
        if old is None:
            wrong.append(f"{name:<60} was not recorded")
            continue
        for key in EXACT:
            if old.get(key) != found.get(key):
                texts = " ".join(filter(None, found.get("text", ())))
                if (name, key) in INTENDED:
                    intended.append(f"{name:<60} {key}: {INTENDED[name, key]}: {found.get(key)}")
                elif "params" in found and not found["far"] and key != "errors" and begins_with_three(name):
                    rounding.append(f"{name:<60} {key}")
                elif key == "errors":
                    wrong.append(f"{name:<60} {key}: {old.get(key)} -> {found.get(key)} {texts[-600:]}")
                else:
                    wrong.append(f"{name:<60} {key}: {str(old.get(key))[:40]} -> {str(found.get(key))[:40]}")
        if "bytes" in old and "bytes" in found:
            sums.setdefault(name.partition(":")[0] + name[-9:], [0, 0])
            sums[name.partition(":")[0] + name[-9:]][0] += old["bytes"]
            sums[name.partition(":")[0] + name[-9:]][1] += found["bytes"]
        counted += [
            f"{name:<60} {key}: {str(old.get(key))[:90]} -> {str(found.get(key))[:90]}"
            for key in COUNTED[:2]
            if old.get(key) != found.get(key)
        ]
    for title, lines in (
        ("New, compared with plain DDP alone", kept),
        ("Bytes and collectives (--verbose lists them)", counted if verbose else []),
        (
            "Bytes sent by all programs of a level",
            [f"{level}: {old:,} -> {new:,}" for level, (old, new) in sums.items()],
        ),
        ("Intended differences", intended),
        (f"Other rounding with 3 ranks, near plain DDP: {len(rounding)} (--verbose)", rounding if verbose else []),
        ("DIFFERENT RESULTS", wrong),
    ):
        print(f"\n{title}: {len(lines)}", *lines, sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
