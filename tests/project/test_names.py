"""docs/names.md has every name of torch's ZeRO, and everything it points to exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

PAGE = (ROOT / "docs/names.md").read_text()
RECORDED = ROOT / "tests/fixtures/torch_zero_test_names.txt"
"""The names in torch's test file, which is not installed with torch. ``python -m tests.project.test_names FILE``."""

TESTS = ROOT / "tests/fixtures/torch_zero_tests.txt"
"""The tests that unittest makes of torch's test file, each with its class."""

FILES = [
    "optim/zero_redundancy_optimizer.py",
    "optim/zero_redundancy_optimizer.pyi",
    "algorithms/ddp_comm_hooks/ddp_zero_hook.py",
]
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
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found - {"__all__"}


def names_of_torch() -> set[str]:
    folder = Path(torch.__file__).parent / "distributed"
    found: set[str] = set()
    return found.union(*(names_in((folder / file).read_text()) for file in FILES))


def first_cells() -> set[str]:
    """The names in the first column of the page's tables, without the classes before them."""
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    return {name.rpartition(".")[2] for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_the_page_has_every_name_of_torchs_modules() -> None:
    names = names_of_torch()
    assert len(names) > 90
    assert names - first_cells() == set()


def test_the_page_has_every_name_of_torchs_test_suite() -> None:
    names = set(RECORDED.read_text().split())
    assert {"SGDWithNewKey", "LocalModel", "ModelParallelModel", "test_ddp_zero_overlap"} <= names
    assert names - first_cells() - {"__init__", "step", "main_hook", "join_hook", "zero"} == set()


def test_the_page_has_each_of_torchs_tests_with_the_tests_that_cover_it() -> None:
    (section,) = re.findall(r"^### Each of its 42 tests\n(.*?)^### ", PAGE, re.MULTILINE | re.DOTALL)
    found = []
    for title, table in re.findall(r"^`(\w+)`:\n\n((?:\|.*\n)+)", section, re.MULTILINE):
        for name, cell in re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE):
            found.append(f"{title}.{name}")
            assert "::" in cell, name
    recorded = TESTS.read_text().split()
    assert len(recorded) == 42
    assert sorted(found) == sorted(recorded)


def test_the_page_has_no_name_that_torch_does_not_have() -> None:
    tests = {line.rpartition(".")[2] for line in TESTS.read_text().split()}
    known = names_of_torch() | set(RECORDED.read_text().split()) | tests
    assert first_cells() - known == set()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w/]+\.py)(?=[`:])", PAGE))))
def test_every_file_exists(path: str) -> None:
    assert (ROOT / "src/onecopy" / path).exists() or (ROOT / "tests" / path).exists()


def test_every_test_exists() -> None:
    found = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(found) > 20
    for path, name in found:
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), f"{path}::{name}"


def test_every_name_of_ours_exists_in_its_file() -> None:
    cells = [line.split("|")[2] for line in PAGE.splitlines() if line.startswith("| `")]
    found = [pair for cell in cells for pair in re.findall(r"`([\w/]+\.py)`: `(\w+)(?:\.(\w+))?`", cell)]
    assert len(found) > 15
    for path, *names in found:
        source = next(
            root / path for root in (ROOT / "src/onecopy", ROOT / "tests") if (root / path).exists()
        ).read_text()
        for name in filter(None, names):
            assert re.search(rf"\b{name}\b", source), f"{path}: {name}"


if __name__ == "__main__":
    import sys

    RECORDED.write_text("\n".join(sorted(names_in(Path(sys.argv[1]).read_text()))) + "\n")
