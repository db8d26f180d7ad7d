"""The site: its pages are complete, and its generated parts are right. Sphinx itself is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import check_site
import reference_pages
from module_keywords import CLASS, FUNCTION, IDENTIFIER, IMPORT, follow_imports, read_module, read_package

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


def test_names_have_a_kind_the_objects_that_explain_them_and_the_sections_that_use_them() -> None:
    package = read_module("pack", "from pack.sample import Box")
    sample = read_module("pack.sample", SAMPLE, "src/pack/sample.py")
    user = read_module("pack.user", "from pack import Box")
    follow_imports([package, sample, user])
    assert sample.summary == "A sample. Its second sentence."
    for kind, names in {
        CLASS: {"Box"},
        FUNCTION: {"__init__", "grow", "helper", "opened"},
        IMPORT: {"paths", "Iterator"},
        IDENTIFIER: {"LIMIT", "width", "size", "by", "inner", "box"},  # no local variables
    }.items():
        assert {keyword.name for keyword in sample.keywords if keyword.kind == kind} == names
    init, grow, opened = "Box.__init__", "Box.grow", "opened"
    for module, name, kind, targets, sections in (
        (sample, "Box", CLASS, ["pack.sample.Box"], ["", opened]),
        (sample, "helper", FUNCTION, ["pack.sample.Box.grow"], [grow]),
        (sample, "LIMIT", IDENTIFIER, ["pack.sample.LIMIT"], ["", grow]),
        (sample, "size", IDENTIFIER, [f"pack.sample.{init}", "pack.sample.Box.size"], [init, grow, opened]),
        (sample, "paths", IMPORT, ["os.path"], [opened]),
        (user, "Box", IMPORT, ["pack.sample.Box"], []),  # the module that defines the name
    ):
        keyword = module.find(name, kind)
        assert keyword is not None
        assert (keyword.targets, keyword.sections) == (targets, sections), name


def test_every_module_has_a_page_and_its_names_are_in_the_indexes() -> None:
    """Looked for with a pattern, not with the syntax tree that the index is made of."""
    made = dict(reference_pages.pages(ROOT))
    package = read_package(ROOT)
    for module in package:
        text = (ROOT / module.path).read_text()
        known = {keyword.name for keyword in module.keywords}
        assert set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", text, re.MULTILINE)) <= known
        assert set(re.findall(r"^from [\w.]+ import (\w+)$", text, re.MULTILINE)) <= known
        assert set(re.findall(r"^([A-Z_]{3,})(?:: .*)? = ", text, re.MULTILINE)) <= known
        page = made[f"{module.name}.md"]
        assert page.startswith(f"# {module.name}\n")
        assert all(f"| `{name}` |" in page for name in known)
    every = {keyword.name for module in package for keyword in module.keywords}
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
    index = (ROOT / "docs/index.md").read_text()
    for block in re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL):
        listed |= set(re.findall(r"^(?!:|reference/)\S+$", block, re.MULTILINE))
    assert {path.stem for path in ROOT.glob("docs/*.md")} == listed | {"index"}


def test_the_check_of_the_site_finds_dead_links_and_names_that_the_search_lacks(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">b</a> <a href="#x">x</a> <a href="https://z">z</a>')
    (tmp_path / "b.html").write_text('<p id="y"><a href="a.html#no">a</a> <img src="c.png">')
    assert sorted(check_site.problems(tmp_path, check_site.read_pages(tmp_path))) == [
        "b.html: a.html#no leads to no anchor",
        "b.html: c.png leads to no file",
    ]
    terms = {name.lower(): [0] for name in check_site.SEARCHED[1:]}
    index = {"terms": terms, "titleterms": {}}
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({index})".replace("'", '"'))
    assert check_site.missing_names(tmp_path) == [check_site.SEARCHED[0]]
