"""Check the built site without a network: every link and anchor inside it exists, and the search index has some names.

``python docs/_ext/check_site.py docs/_build/html`` prints what is wrong and ends with exit code 1, or counts the links.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SEARCHED = (
    "ZeroRedundancyOptimizer",
    "ShardedDataParallel",
    "reduce_scatter_hook",
    "hook_with_zero_step_interleaved",
    "consolidate_state_dict",
    "clip_grad_norm_",
    "parameters_as_bucket_view",
    "_OverlapInfo",
    "_DDPBucketAssignment",
    "RanksDisagreeError",
    "ResumableSampler",
    "nonfinite",
)
"""Names that a reader searches for: public ones, arguments, and private ones of torch's class."""


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in one element."""
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.append(value)


def read_pages(folder: Path) -> dict[Path, Page]:
    """Return all pages of the site."""
    return {path: Page(path.read_text()) for path in folder.rglob("*.html")}


def problems(folder: Path, pages: Mapping[Path, Page]) -> Iterator[str]:
    """Yield a line for each link inside the site that leads nowhere."""
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link.startswith("data:"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            name = path.relative_to(folder)
            if not target.is_file():
                yield f"{name}: {link} leads to no file"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} leads to no anchor"


def missing_names(folder: Path) -> list[str]:
    """Return the names that the search index does not have."""
    text = (folder / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    known = {term.lower() for term in (*index["terms"], *index["titleterms"])}
    # The search shortens words to their stems.
    return [name for name in SEARCHED if not any(name.lower().startswith(term) and len(term) > 4 for term in known)]


def main(folder: Path) -> int:
    """Check the site and return the exit code."""
    pages = read_pages(folder)
    found = list(problems(folder, pages)) + [f"the search does not find {name}" for name in missing_names(folder)]
    for line in found:
        sys.stderr.write(line + "\n")
    if not found:
        links = sum(len(page.links) for page in pages.values())
        sys.stdout.write(
            f"{len(pages)} pages with {links} links: every link inside the site leads somewhere; "
            f"{len(SEARCHED)} names are found\n"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
