"""examples/compare_levels.py, the demo: its sentences, and the comparison on two ranks as a person starts it."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from tests.support.examples import example
from tests.support.paths import ROOT

demo = example("compare_levels")


def test_sentences_are_words_of_the_grammar_and_repeat_with_the_seed() -> None:
    one, again, other = demo.sentences(1, 3, 20), demo.sentences(1, 3, 20), demo.sentences(2, 3, 20)
    assert one.shape == (3, 20)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert not any(word.isupper() for word in demo.WORDS), "a rule is missing"


def test_a_word_depends_on_the_words_before_it_only() -> None:
    words = demo.sentences(0, 1, 16)
    changed = words.clone()
    changed[0, 10:] = 0
    model = demo.Sizes(len(demo.WORDS), 32, len(demo.WORDS), 2, positions=16).make()
    before, after = model(words), model(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.equal(before[0, 10:], after[0, 10:])


def test_the_levels_have_the_losses_of_ddp_and_less_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/compare_levels.py"), "--steps", "6", "--width", "64", "--depth", "2"]
    command += ["--plot", str(tmp_path / "compare.png")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ (DDP|level \d) +(.*?) *$", done.stdout, re.MULTILINE)
    assert [name for name, _ in rows] == list(demo.LEVELS)
    cells = [row.split() for _, row in rows]
    assert {row[-1] for row in cells} == {"0"}, "the largest difference of a loss from DDP's"
    totals = [float(row[3]) for row in cells]
    assert totals[3] < 0.65 * totals[0] < totals[1] < 0.77 * totals[0]
    assert re.search(r'The model writes: "\S', done.stdout)
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_the_live_display_has_a_row_and_a_bar_for_each_level() -> None:
    class Training:
        level, losses, milliseconds, total = "level 1", [8.0, 4.0, 1.0], 5.0, 3e6
        memory = dict.fromkeys(demo.KINDS, 1e6)

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(demo.Display(console, "tiny", 10).frame([Training(), Training()]))
    text = console.export_text()
    assert text.count("█" * demo.BAR_COLUMNS) == 2, text
    assert "█▄▁" in text
    assert len(demo.sparkline([float(step) for step in range(500)])) == 60
