"""The command line, and reading a checkpoint without onecopy."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import typer.main
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from onecopy.cli.main import app
from tests.support.hostile import Pair, trained
from tests.support.models import assert_same_tree
from tests.support.paths import ROOT


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that one process has written."""
    return trained().save(tmp_path / "run", 5)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def words_of(result: Result) -> str:
    return " ".join((result.output + result.stderr).replace("│", " ").split())


def test_inspect_shows_names_shapes_types_sizes_and_writers(saved: Path) -> None:
    text = words_of(run("inspect", saved.parent))
    for expected in ("step 5", "model/0.weight", "(32, 32)", "float32", "4,096", "rank 0", "torch.optim.adamw.AdamW"):
        assert expected in text, f"{expected!r} is not in {text}"
    found = json.loads(run("inspect", saved, "--json").stdout)
    assert (found["step"], found["ranks"], found["tensors"]["model/0.weight"]["shape"]) == (5, 1, [32, 32])


def test_verify_names_a_damaged_file_and_says_what_it_has_not_read(saved: Path) -> None:
    assert json.loads(run("verify", saved.parent, "--json").stdout)["bytes"] > 4096
    assert "other" not in run("verify", saved).output
    shutil.copytree(saved, saved.parent / "step-00000004")
    assert "all as written 1 other checkpoint in" in words_of(run("verify", saved.parent))
    file = saved / "rank-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 4]))
    result = run("verify", saved)
    assert result.exit_code == 1
    assert "rank-00000.safetensors" in words_of(result)


def test_a_checkpoint_becomes_a_file_of_torch_and_its_weights_a_safetensors_file(saved: Path, tmp_path: Path) -> None:
    assert run("convert", saved, tmp_path / "all.pt", "--to", "torch").exit_code == 0
    content = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (content["step"], content["extra"]["list"][:3]) == (5, [1, 2.5, None])
    pair, expected = Pair(9), trained()
    pair.model.load_state_dict(content["model"])
    pair.optimizer.load_state_dict(content["optimizer"])
    assert_same_tree(pair.tensors(), expected.tensors(), "loaded")
    assert run("convert", saved, tmp_path / "model.safetensors", "--to", "safetensors").exit_code == 0
    assert_same_tree(load_file(tmp_path / "model.safetensors"), dict(expected.model.state_dict()), "weights")


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_the_help_of_every_command_has_an_example(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*words, "--help"])
    assert result.exit_code == 0
    assert re.search(r"Examples?:\s+(onecopy|torchrun)", result.output), result.output


def test_a_command_that_cannot_be_done_is_one_line_and_an_exit_code(saved: Path, tmp_path: Path) -> None:
    there = tmp_path / "there.pt"
    there.write_text("mine")
    for words, code, text in (
        (["no-such-command"], 2, "No such command"),
        (["checkpoint", "convert", "one", "two", "--to", "native"], 2, "Invalid value for '--to'"),
        (["checkpoint", "inspect", str(tmp_path / "nothing")], 1, "is not a checkpoint"),
        (["checkpoint", "convert", str(saved), str(there), "--to", "torch"], 1, "exists already"),
    ):
        result = CliRunner().invoke(app, words)
        assert (result.exit_code, text in words_of(result)) == (code, True), result.output
        assert "Traceback" not in words_of(result)
    assert there.read_text() == "mine"


def test_the_shell_completes_commands_and_options() -> None:
    for typed, expected in (("onecopy pl", "plan"), ("onecopy plan --opt", "--optimizer")):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1)}
        environment = {"_ONECOPY_COMPLETE": "complete_bash", **words}
        result = CliRunner().invoke(app, [], env=environment, prog_name="onecopy")
        assert expected in result.output.split(), result.output


def python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


def test_without_the_extra_the_library_imports_and_the_command_says_what_it_needs() -> None:
    done = python("""
import sys
sys.modules.update(rich=None, typer=None)  # importing them fails
sys.argv = ["onecopy", "plan"]
import onecopy
from onecopy.cli.__main__ import main
main()
""")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the command onecopy needs typer: pip install 'onecopy[cli]'\n"


def test_the_dozen_lines_of_the_docs_read_it_without_onecopy(saved: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs/checkpoints.md").read_text()
    (lines,) = re.findall(r"```python run\n(import json\n.*?)\n\n\ntensors = read", page, re.DOTALL)
    assert len([line for line in lines.splitlines() if line.strip()]) <= 18
    done = python(f"""
import sys
sys.modules["onecopy"] = None  # importing it fails
{lines}
torch.save(read({str(saved)!r}), {str(tmp_path / "read.pt")!r})
""")
    assert done.returncode == 0, done.stderr
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    for key, value in trained().tensors().items():
        assert torch.equal(read[key], value), key
