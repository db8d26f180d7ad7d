"""Draws which parameters each rank owns as blocks of characters, one row per rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

MOST_ROWS = 16
"""The number of ranks that are drawn."""

PART, WHOLE = "░", " "
"""Fills the block of a part of a parameter, and of a whole one."""

COLOURS = (153, 222, 151, 217, 183, 250)
"""Light backgrounds of the terminal's 256 colours, for black text, which differ in brightness, too."""


@dataclass(frozen=True, slots=True)
class Block:
    """A parameter, or the range of it, that one rank owns."""

    param: int
    label: str
    numel: int
    is_part: bool


def shortened(label: str, room: int) -> str:
    """Return a label that fits into some columns, as ``b.0.up`` for ``blocks.0.up.weight``; nothing if none does."""
    without = label.replace(".weight", "")
    initials = re.sub(r"([A-Za-z])[A-Za-z_]+\.", r"\1.", without)
    return next((text for text in (label, without, initials) if len(text) <= room), "")


def draw_rows(rows: Sequence[Sequence[Block]], width: int, colour: bool) -> str:
    """Return the blocks of each rank as lines of text; in colour, all parts of one parameter have the same."""
    total = sum(block.numel for row in rows for block in row)
    most = max((sum(block.numel for block in row) for row in rows), default=0)
    names = [f"rank {group_rank} " for group_rank in range(min(len(rows), MOST_ROWS))]
    counts = [sum(block.numel for block in row) for row in rows[:MOST_ROWS]]
    ends = [f" {count:,}  {count / total:.1%}" if total else " 0" for count in counts]
    before, after = (max(map(len, texts), default=0) for texts in (names, ends))
    columns = max(10, width - before - after)
    lines = []
    for name, row, count, end in zip(names, rows, counts, ends, strict=False):
        bar = _bar(row, columns / most if most else 0.0, colour)
        gap = columns - (round(columns * count / most) if most else 0)
        lines.append(name.rjust(before) + bar + " " * gap + end.rjust(after))
    if len(rows) > MOST_ROWS:
        lines.append(f"… and {len(rows) - MOST_ROWS:,} more ranks")
    if any(block.is_part for row in rows for block in row):
        lines.append("a block with a percentage is a part of a parameter; other ranks own the other parts")
    return "\n".join(lines)


def _bar(row: Sequence[Block], scale: float, colour: bool) -> str:
    """Return one row of blocks; neighbours that are too short for a column of their own share it."""
    pieces, position, elements = [], 0, 0
    for block in row:
        elements += block.numel
        stop = round(elements * scale)
        if stop > position:
            pieces.append(_block(block, stop - position, colour))
            position = stop
    return "".join(pieces)


def _block(block: Block, columns: int, colour: bool) -> str:
    fill = PART if block.is_part and not colour else WHOLE
    text = shortened(block.label, columns - 1)
    if not colour:
        return "│" + text.ljust(columns - 1, fill)
    return f"\x1b[48;5;{COLOURS[block.param % len(COLOURS)]}m\x1b[30m▏{text.ljust(columns - 1)}\x1b[0m"
