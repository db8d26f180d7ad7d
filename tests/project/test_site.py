"""The site: its pages are complete, and its generated parts are right. Sphinx itself is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import check_site
import reference_pages
from module_keywords import read_package

from tests.support.paths import ROOT


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
