"""The pages: their code runs, their links lead somewhere, and the index leaves nothing out."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onecopy
import onecopy.checkpoint
from tests.support.harness import pools
from tests.support.paths import ROOT

PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(ROOT.glob("docs/*.md"))]

BLOCK = re.compile(r"^```(\S*)[^\S\n]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_]\w*)(?:\([^`]*)?`")


def runnable_blocks(page: Path) -> list[tuple[int, str]]:
    """The page's blocks that start with ```python run, each with the number of its first line."""
    text = page.read_text()
    return [
        (text.count("\n", 0, match.start(3)), match[3])
        for match in BLOCK.finditer(text)
        if (match[1], match[2]) == ("python", "run")
    ]


def without_blocks(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes from the page's headings."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def first_cells(heading: str) -> set[str]:
    """The names in the first column of the tables under a heading of docs/public-names.md."""
    section = re.split(r"^#+ ", (ROOT / "docs/public-names.md").read_text(), flags=re.MULTILINE)
    (body,) = [text for text in section if text.splitlines() and text.splitlines()[0] == heading]
    rows = [line.split("|")[1] for line in body.splitlines() if line.startswith("|")]
    return {name for row in rows for name in NAME.findall(row)}


def run_page(page: str, folder: str) -> None:
    """Run a page's blocks in order, in one namespace, as one rank of a script."""
    namespace: dict[str, object] = {"__name__": "page"}
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for line, source in runnable_blocks(Path(page)):
                exec(compile("\n" * line + source, page, "exec"), namespace)
        dist.barrier()
    finally:
        os.chdir(before)


def attributes_of_an_instance() -> list[str]:
    optimizer = onecopy.ZeroRedundancyOptimizer([torch.zeros(3, requires_grad=True)], torch.optim.SGD, lr=0.1)
    return sorted(vars(optimizer))


@pytest.mark.parametrize("page", [page for page in PAGES if runnable_blocks(page)], ids=lambda page: page.name)
def test_the_code_on_a_page_runs_on_two_ranks(page: Path, tmp_path: Path) -> None:
    pools.run(2, __name__, "run_page", {"page": str(page), "folder": str(tmp_path)})


def test_every_python_block_is_marked_so_that_it_is_run() -> None:
    for page in PAGES:
        kinds = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]
        assert all(rest == "run" for kind, rest in kinds if kind == "python"), page.name
    assert len([page for page in PAGES if runnable_blocks(page)]) >= 5


def test_links_lead_somewhere_and_every_page_is_reachable_from_the_readme() -> None:
    linked: dict[Path, set[Path]] = {page: set() for page in PAGES}
    for page in PAGES:
        for link in LINK.findall(without_blocks(page)):
            path, _, anchor = link.partition("#")
            if not link.startswith("https://"):
                target = (page.parent / path).resolve() if path else page
                assert target.is_file(), f"{page.name}: {link}"
                assert not anchor or anchor in anchors(target), f"{page.name}: {link} (of {sorted(anchors(target))})"
                linked[page] |= {target} & linked.keys()
    seen = {ROOT / "README.md"}
    while more := set().union(*(linked[page] for page in seen)) - seen:
        seen |= more
    assert seen == set(PAGES)


def test_the_index_lists_every_public_name() -> None:
    zero = onecopy.ZeroRedundancyOptimizer
    (attributes, _) = pools.run(2, __name__, "attributes_of_an_instance", {})
    of_zero = {*dir(zero), *attributes, *inspect.signature(zero).parameters, "train", "eval"}  # two are forwarded
    for heading, names in {
        "Public names": onecopy.__all__,
        "checkpoint": onecopy.checkpoint.__all__,
        "ZeroRedundancyOptimizer": of_zero,
        **{value.__name__: dir(value) for value in (onecopy.Layout, onecopy.ParamSpec, onecopy.Shard)},
    }.items():
        assert first_cells(heading) == {name for name in names if not name.startswith("_")}, heading


def test_commands_on_pages_exist_and_ci_runs_the_test_command_of_the_readme() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE)) <= targets, page.name
    shell = "\n".join(match[3] for match in BLOCK.finditer((ROOT / "README.md").read_text()) if match[1] == "sh")
    (command,) = re.findall(r"^(make test\b.*?)\s*(?:#.*)?$", shell, re.MULTILINE)
    script = ROOT / ".ci/run"
    assert {command, "make lint", "make types"} <= set(script.read_text().splitlines())
    assert script.stat().st_mode & 0o111, "it must be executable"
