"""The site: its pages are complete, and its generated parts are right. Sphinx itself is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import check_site
import pytest
import reference_pages
from module_keywords import (
    CLASS,
    FUNCTION,
    IDENTIFIER,
    IMPORT,
    KINDS,
    Module,
    follow_imports,
    read_module,
    read_package,
)

import onecopy
import onecopy.checkpoint
from tests.support.paths import ROOT

PACKAGE = read_package(ROOT)

SAMPLE = '''"""A sample. Its second sentence."""
import os.path as paths
from collections.abc import Iterator

LIMIT: int = 3


class Box:
    """A box."""

    width = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def grow(self, *, by: int = LIMIT) -> int:
        def helper(inner: int) -> int:
            return inner + by

        local = helper(self.size)
        return local


def opened(box: Box) -> Iterator[str]:
    yield paths.join("a", str(box.size))
'''


def names(module: Module, kind: str) -> set[str]:
    return {keyword.name for keyword in module.keywords if keyword.kind == kind}


def sample() -> Module:
    return read_module("pack.sample", SAMPLE, "src/pack/sample.py")


def test_names_are_found_by_kind_and_local_variables_are_left_out() -> None:
    found = sample()
    assert found.summary == "A sample. Its second sentence."
    assert names(found, CLASS) == {"Box"}
    assert names(found, FUNCTION) == {"__init__", "grow", "helper", "opened"}
    assert names(found, IMPORT) == {"paths", "Iterator"}
    assert names(found, IDENTIFIER) == {"LIMIT", "width", "size", "by", "inner", "box"}


@pytest.mark.parametrize(
    ("name", "kind", "targets", "sections"),
    [
        ("Box", CLASS, ["pack.sample.Box"], ["", "opened"]),
        ("helper", FUNCTION, ["pack.sample.Box.grow"], ["Box.grow"]),
        ("LIMIT", IDENTIFIER, ["pack.sample.LIMIT"], ["", "Box.grow"]),
        (
            "size",
            IDENTIFIER,
            ["pack.sample.Box.__init__", "pack.sample.Box.size"],
            ["Box.__init__", "Box.grow", "opened"],
        ),
        ("paths", IMPORT, ["os.path"], ["opened"]),
    ],
)
def test_a_name_has_the_objects_that_explain_it_and_the_sections_that_use_it(
    name: str, kind: str, targets: list[str], sections: list[str]
) -> None:
    keyword = sample().find(name, kind)
    assert keyword is not None
    assert keyword.targets == targets
    assert keyword.sections == sections


def test_an_import_from_a_package_leads_to_the_module_that_defines_the_name() -> None:
    package = read_module("pack", "from pack.sample import Box")
    user = read_module("pack.user", "from pack import Box")
    follow_imports([package, sample(), user])
    keyword = user.find("Box", IMPORT)
    assert keyword is not None
    assert keyword.targets == ["pack.sample.Box"]


@pytest.mark.parametrize("module", PACKAGE, ids=lambda module: module.name)
def test_every_class_function_and_import_of_a_module_is_in_its_keyword_index(module: Module) -> None:
    """Looked for with a pattern, not with the syntax tree that the index is made of."""
    text = (ROOT / module.path).read_text()
    known = set().union(*(names(module, kind) for kind in KINDS))
    assert set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)) <= known
    assert set(re.findall(r"^from [\w.]+ import (\w+)$", text, re.MULTILINE)) <= known
    assert set(re.findall(r"^([A-Z_]{3,})(?:: .*)? = ", text, re.MULTILINE)) <= known
    page = reference_pages.page_of(module, [])
    assert page.startswith(f"# {module.name}\n")
    assert all(f"| `{name}` |" in page for name in known)


def test_every_module_has_a_page_and_every_keyword_is_in_the_index_of_all() -> None:
    made = dict(reference_pages.pages(ROOT))
    assert {f"{module.name}.md" for module in PACKAGE} < set(made)
    every = {keyword.name for module in PACKAGE for keyword in module.keywords}
    assert set(re.findall(r"^- `([^`]+)`:", made["keywords.md"], re.MULTILINE)) == every


def test_the_api_page_has_every_public_name_once() -> None:
    page = reference_pages.api_page(onecopy.__all__, onecopy.checkpoint.__all__)
    found = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE)
    expected = [f"onecopy.{name}" for name in onecopy.__all__]
    expected += [f"onecopy.checkpoint.{name}" for name in onecopy.checkpoint.__all__]
    assert sorted(found) == sorted(expected)


def test_links_of_the_contributors_guide_are_moved() -> None:
    text = "[a](docs/usage.md#b) [c](CHANGELOG.md) [d](tests/x.md) [e](https://f.g) [h](#i)"
    moved = "[a](../usage.md#b) [c](changelog.md) d (`tests/x.md`) [e](https://f.g) [h](#i)"
    assert reference_pages.page_from_root(text) == moved


def test_every_page_is_in_the_table_of_contents() -> None:
    listed: set[str] = set()
    index = ROOT / "docs/index.md"
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(), re.MULTILINE | re.DOTALL):
        for entry in re.findall(r"^(?!:|reference/)\S+$", block, re.MULTILINE):
            found = list(index.parent.glob(f"{entry}.md"))
            assert found, f"{index}: {entry}"
            listed |= {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in found}
    pages = list((ROOT / "docs").glob("*.md"))
    assert {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in pages} == listed | {"index"}


def test_the_check_of_the_site_finds_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">b</a> <a href="#x">x</a> <a href="https://z">z</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#no">a</a> <img src="c.png">')
    assert sorted(check_site.problems(tmp_path, check_site.read_pages(tmp_path))) == [
        "b.html: a.html#no leads to no anchor",
        "b.html: c.png leads to no file",
    ]


def test_the_check_of_the_site_finds_names_that_the_search_lacks(tmp_path: Path) -> None:
    terms = {name.lower(): [0] for name in check_site.SEARCHED[1:]}
    index = {"terms": terms, "titleterms": {}}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({index})".replace("'", '"'))
    assert check_site.missing_names(tmp_path) == [check_site.SEARCHED[0]]
