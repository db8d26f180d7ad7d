"""``onecopy plan``: models from anywhere, memory by kind, and a recommendation."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner, Result

from onecopy.cli.main import app
from onecopy.planning.comparison import DDP, LEVEL_1, LEVEL_2, LEVEL_3, Row, compare, fits, recommend
from onecopy.planning.memory import OPTIMIZERS
from onecopy.planning.models import Source, from_counts, from_path

LLAMA_70B = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def make_model() -> nn.Module:
    """A model for ``onecopy plan tests.planning.test_planner:make_model``."""
    model = nn.Sequential(nn.Linear(10, 1000), nn.Linear(1000, 4))
    assert model[0].weight.is_meta, "a planner allocates no memory for parameters"
    return model


def run(*arguments: object) -> tuple[Result, str]:
    """The result of the command, and its output as words."""
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result, " ".join(result.output.replace("│", " ").split())


def planned(source: Source, ranks: int, optimizer: str = "adamw", precision: str = "fp32") -> dict[str, Row]:
    return {row.name: row for row in compare(source, OPTIMIZERS[optimizer], precision, ranks)}


def test_the_example_of_the_zero_paper() -> None:
    rows = planned(from_counts(7.5e9, None), 64, precision="bf16-master")
    for name, expected in ((DDP, 120), (LEVEL_1, 31.4), (LEVEL_3, 16.6)):
        assert (rows[name].total - rows[name].memory["buffers"]) / 1e9 == pytest.approx(expected, abs=0.05)


def test_a_config_of_70_billion_parameters_on_16384_ranks_takes_less_than_two_seconds(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    from_path(str(tmp_path))  # imports
    begin = time.process_time()  # as fast as on a machine on which nothing else runs
    rows = planned(from_path(str(tmp_path / "config.json")), 16_384, precision="bf16-master")
    assert time.process_time() - begin < 2
    assert rows[DDP].memory["parameters"] == 2 * 68_976_648_192
    assert rows[LEVEL_3].memory["state"] == pytest.approx(8 * 68_976_648_192 / 16_384)


@pytest.mark.parametrize(("params", "largest"), [(7e9, 5e8), (1e6, 1e6), (1e6, 9e5), (1, None), (97, 1)])
def test_counts_add_up(params: float, largest: float | None) -> None:
    first, *others = (shape[0] for shape in from_counts(params, largest).shapes.values())
    assert first + sum(others) == int(params)
    assert first >= max(others, default=0)
    assert largest is None or first == int(largest)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "memory", "choice", "text"),
    [
        ("adamw", 8, 80e9, LEVEL_1, "Plain DDP fits without activations. It saves"),
        ("adamw", 8, 20e9, LEVEL_1, "Plain DDP does not fit"),
        ("adamw", 8, 10e9, LEVEL_3, "Plain DDP does not fit"),
        ("adamw", 8, 1e9, "FSDP2", "Nothing fits"),
        ("adamw", 1, None, DDP, "saves you 0%: don't bother"),
        ("adamw", 1, 80e9, DDP, "saves you 0%: don't bother"),
        ("sgd", 8, None, LEVEL_3, "level 1 saves"),
    ],
)
def test_the_first_way_that_fits_is_recommended(
    optimizer: str, ranks: int, memory: float | None, choice: str, text: str
) -> None:
    rows = planned(from_counts(1.3e9, None), ranks, optimizer)
    advice = recommend(list(rows.values()), OPTIMIZERS[optimizer], False, memory)
    assert (advice.choice, text in advice.reason) == (choice, True), advice
    assert choice not in rows or fits(rows[choice], memory) in ((None,) if memory is None else (True,))
    compile(advice.code.replace("=...", "=0"), "advice", "exec")


def test_the_command_prints_tables_advice_and_layout_and_json_for_programs() -> None:
    model = f"{__name__}:make_model"
    result, _ = run(model, "--ranks", 3, "--memory", 1, "--layout")
    assert result.exit_code == 0, result.output
    for text in ("level 3", "fits", "optimizer = ", "level 1: 4 parameters", "15,004 elements on 3 ranks", "rank 2 │"):
        assert text in result.output, result.output

    found: dict[str, Any] = json.loads(run(model, "--ranks", 3, "--layout", "--json")[0].output)
    assert [row["name"] for row in found["ways"]] == [DDP, LEVEL_1, LEVEL_2, LEVEL_3]
    assert (found["elements"], found["ways"][0]["memory"]["state"]) == (15_004, 8 * 15_004)
    assert sum(shard["stop"] - shard["start"] for shard in found["layout"]) == 15_004
    assert {shard["owner"] for shard in found["layout"]} == {0, 1, 2}
    for text, elements in (("7B", 7_000_000_000), ("1.5m", 1_500_000), ("2e3", 2000)):
        assert json.loads(run("--params", text, "--json")[0].stdout)["elements"] == elements


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either MODEL or --params"),
        (["--params", "1e9", "model:make"], "give either MODEL or --params"),
        (["--params", "0"], "--params must be at least 1"),
        (["--params", "nan"], "--params must be at least 1 and finite"),
        (["--params", "7x"], "'7x' is not a number such as 7e9 or 7B"),
        (["--params", "10", "--largest", "11"], "--largest must be from 1 to the number of parameters"),
        (["--params", "10", "--memory", "-1"], "'--memory': it must be finite and greater than 0"),
        (["no_such_module:make"], "cannot be imported: No module named"),
        ([f"{__name__}:no_such_function"], "cannot be imported: module"),
        ([f"{__name__}:Path"], "returned PosixPath"),
        ([f"{__name__}:planned"], "is called without arguments, on the meta device, and raised TypeError"),
        (["something"], "is neither a config.json nor a function"),
    ],
)
def test_mistakes_are_told_in_words(arguments: list[str], message: str) -> None:
    result, words = run(*arguments)
    assert result.exit_code == 2
    assert message in words
    assert "Traceback" not in words


def test_a_config_is_read_before_transformers_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    config = tmp_path / "config.json"
    for text, code, message in (
        (None, 1, "No such file"),
        ("{", 2, "is no JSON"),
        ("{}", 2, "it has no model_type"),
        ('{"model_type": "gpt2"}', 1, "pip install transformers"),
    ):
        if text is not None:
            config.write_text(text)
        result, words = run(config)
        assert (result.exit_code, message in words) == (code, True), words
