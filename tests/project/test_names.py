"""docs/names.md has every name of torch's ZeRO, and everything it points to exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torch

from tests.support.paths import FIXTURES, ROOT

PAGE = (ROOT / "docs/names.md").read_text()
CELLS = [line.split("|")[1:3] for line in PAGE.splitlines() if line.startswith("| `")]

RECORDED = FIXTURES / "torch_zero_test_names.txt"
"""The names in torch's test file, which is not installed with torch. ``python -m tests.project.test_names FILE``."""

TESTS = (FIXTURES / "torch_zero_tests.txt").read_text().split()
"""The tests that unittest makes of torch's test file, each with its class."""

FILES = (
    "optim/zero_redundancy_optimizer.py",
    "optim/zero_redundancy_optimizer.pyi",
    "algorithms/ddp_comm_hooks/ddp_zero_hook.py",
)
"""Torch's modules and the stub, below ``torch/distributed``."""


def names_in(source: str) -> set[str]:
    """Every class, function, method, attribute of ``self`` and module-level variable."""
    tree = ast.parse(source)
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    for statement in tree.body:
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found - {"__all__"}


def test_the_page_has_the_names_of_torchs_modules_and_tests_and_no_others() -> None:
    folder = Path(torch.__file__).parent / "distributed"
    of_modules = set().union(*(names_in((folder / file).read_text()) for file in FILES))
    of_tests = set(RECORDED.read_text().split())
    assert len(of_modules) > 90
    assert {"SGDWithNewKey", "LocalModel", "ModelParallelModel", "test_ddp_zero_overlap"} <= of_tests
    # Names in the first column, without the classes before them.
    shown = {name.rpartition(".")[2] for cell, _ in CELLS for name in re.findall(r"`([\w.]+)`", cell)}
    local = {"__init__", "step", "main_hook", "join_hook", "zero"}
    assert of_modules | (of_tests - local) <= shown
    assert shown <= of_modules | of_tests | {test.rpartition(".")[2] for test in TESTS}


def test_the_page_has_each_of_torchs_tests_with_the_tests_that_cover_it() -> None:
    (section,) = re.findall(r"^### Each of its 42 tests\n(.*?)^### ", PAGE, re.MULTILINE | re.DOTALL)
    found = []
    for title, table in re.findall(r"^`(\w+)`:\n\n((?:\|.*\n)+)", section, re.MULTILINE):
        for name, cell in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE):
            found.append(f"{title}.{name}")
            assert "::" in cell, name
    assert len(TESTS) == 42
    assert sorted(found) == sorted(TESTS)


def test_every_file_test_and_name_of_ours_exists() -> None:
    texts = {}
    for path in set(re.findall(r"`([\w/]+\.py)(?=[`:])", PAGE)):
        (texts[path],) = [
            (ROOT / top / path).read_text() for top in ("src/onecopy", "tests") if (ROOT / top / path).exists()
        ]
    tests = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    names = [pair for _, cell in CELLS for pair in re.findall(r"`([\w/]+\.py)`: `(\w+)(?:\.(\w+))?`", cell)]
    assert len(tests) > 20
    assert len(names) > 15
    for path, name in tests:
        assert f"def {name}(" in texts[path], f"{path}::{name}"
    for path, *parts in names:
        for part in filter(None, parts):
            assert re.search(rf"\b{part}\b", texts[path]), f"{path}: {part}"


if __name__ == "__main__":
    import sys

    RECORDED.write_text("\n".join(sorted(names_in(Path(sys.argv[1]).read_text()))) + "\n")
