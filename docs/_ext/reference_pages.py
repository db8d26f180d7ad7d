"""A Sphinx extension that writes the reference from the source.

It writes these pages to ``docs/reference`` before a build: the public API, a page for each module with its keyword
index, an index of all keywords, and the changelog and the contributors' guide from the root of the repository.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from module_keywords import FUNCTION, KINDS, MODULE_LEVEL, Keyword, Module, keywords_of_kind, read_package

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = {
    "The optimizer": ["ZeroRedundancyOptimizer"],
    "DDP communication hooks": [
        "reduce_scatter_hook",
        "ReduceScatter",
        "hook_with_zero_step",
        "hook_with_zero_step_interleaved",
    ],
    "Sharded data parallel": ["ShardedDataParallel", "MixedPrecision"],
    "Gradient norm": ["grad_norm", "clip_grad_norm_"],
    "Layouts": ["Layout", "ParamSpec", "Shard"],
    "Errors and warnings": [
        "OnecopyError",
        "RanksDisagreeError",
        "PeerFailedError",
        "NonfiniteError",
        "CheckpointError",
        "CorruptCheckpointError",
        "CheckpointMismatchError",
        "GradientsNotReducedWarning",
    ],
}
"""The sections of the API page. Names of ``onecopy.__all__`` that are in none of them come at the end."""

OF_ABSTRACT_CLASSES = ("_abc_impl", "_is_protocol", "_is_runtime_protocol")
"""Attributes that Python itself adds to classes."""

NO_IDENTIFIERS = ("OptimizerName", "Precision")
"""Enums of the command line with values such as ``bf16-master``, which Sphinx cannot describe."""

LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def page_of(module: Module, children: Sequence[Module], on_api_page: Sequence[str] = ()) -> str:
    """Return the reference page of a module as Markdown.

    Args:
        module: the module.
        children: its modules, if it is a package.
        on_api_page: names of the module that the API page describes under the same dotted name.
    """
    parts = [
        f"# {module.name}",
        f"File: `{module.path}`.",
        f"```{{eval-rst}}\n.. automodule:: {module.name}\n   :members:\n   :ignore-module-all:\n   :undoc-members:\n"
        "   :private-members:\n   :show-inheritance:\n   :member-order: bysource\n"
        f"   :exclude-members: {', '.join([*OF_ABSTRACT_CLASSES, *NO_IDENTIFIERS, *on_api_page])}\n```",
    ]
    if on_api_page:
        parts.append(f"The [API reference](api.md) has {', '.join(f'`{name}`' for name in on_api_page)}.")
    if children:
        lines = [f"- [{child.name}]({child.name}.md): {plain(child.summary)}" for child in children]
        parts.append("\n".join(lines))
        parts.append(toctree([child.name for child in children], hidden=True))
    parts.append("## Keyword index")
    parts.append(
        "Each name of this module, the object that explains it, and the sections that use it. Local variables are "
        "left out."
    )
    for kind in KINDS:
        found = list(keywords_of_kind(module, kind))
        if found:
            parts.append(f"### {kind.capitalize()}")
            parts.append(table(module, found))
    return "\n\n".join(parts) + "\n"


def table(module: Module, keywords: Sequence[Keyword]) -> str:
    """Return keywords as a table: the name, where it is explained, the sections that use it."""
    rows = ["| keyword | explained in | sections |", "|---|---|---|"]
    for keyword in keywords:
        explained = ", ".join(link_to(target) for target in keyword.targets)
        sections = ", ".join(link_to_section(module, section) for section in keyword.sections)
        rows.append(f"| `{keyword.name}` | {explained} | {sections} |")
    return "\n".join(rows)


def link_to(target: str) -> str:
    """Return a link to the page that explains a dotted name."""
    top = target.partition(".")[0]
    if top == "onecopy":
        return f"{{py:obj}}`{target}`"
    if top in sys.stdlib_module_names:
        places = [".".join(target.split(".")[:length]) for length in (1, 2)]
        page = "collections.abc" if target.startswith("collections.abc") else places[0]
        return f"[`{target}`](https://docs.python.org/3/library/{page}.html)"
    if top == "torch":
        return f"[`{target}`](https://docs.pytorch.org/docs/stable/search.html?q={target})"
    return f"[`{target}`](https://pypi.org/project/{top}/)"


def link_to_section(module: Module, section: str) -> str:
    """Return a link to a function, class or method of the module."""
    if section == MODULE_LEVEL:
        return f"{{py:mod}}`top of the module <{module.name}>`"
    return f"{{py:obj}}`{section} <{module.name}.{section}>`"


def toctree(names: Sequence[str], hidden: bool) -> str:
    """Return a table of contents."""
    options = ":maxdepth: 1\n" + (":hidden:\n" if hidden else "")
    return "```{toctree}\n" + options + "\n" + "\n".join(names) + "\n```"


def plain(text: str) -> str:
    """Return a line of a docstring as Markdown."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def children_of(module: Module, modules: Sequence[Module]) -> list[Module]:
    """Return the modules directly below a package."""
    return [each for each in modules if each.name.rpartition(".")[0] == module.name]


def modules_page(modules: Sequence[Module]) -> str:
    """Return the list of all modules by folder."""
    parts = [
        "# Modules",
        "Every module, with the first sentence of its docstring. A page per module has its keyword index.",
    ]
    for module in modules:
        below = children_of(module, modules)
        if below:
            parts.append(f"## {module.name}")
            parts.append(plain(module.summary))
            parts.append(
                "\n".join(
                    ["| module | content |", "|---|---|"]
                    + [f"| [{child.name}]({child.name}.md) | {plain(child.summary)} |" for child in below]
                )
            )
    parts.append(toctree(["onecopy"], hidden=True))
    return "\n\n".join(parts) + "\n"


def keywords_page(modules: Sequence[Module]) -> str:
    """Return the index of the keywords of all modules."""
    places: dict[str, dict[str, None]] = {}
    for module in modules:
        for keyword in module.keywords:
            places.setdefault(keyword.name, {})[module.name] = None
    parts = ["# Keyword index", "Every name in the source, with the modules whose keyword index has it."]
    letter = ""
    lines: list[str] = []
    for name in sorted(places, key=lambda each: (each.strip("_").lower(), each)):
        first = (name.strip("_")[:1] or "_").upper()
        if first != letter:
            parts.append("\n".join(lines))
            parts.append(f"## {first}")
            letter, lines = first, []
        links = ", ".join(f"[{module.removeprefix('onecopy.')}]({module}.md#keyword-index)" for module in places[name])
        lines.append(f"- `{name}`: {links}")
    parts.append("\n".join(lines))
    return "\n\n".join(part for part in parts if part) + "\n"


def api_page(public: Sequence[str], of_checkpoints: Sequence[str]) -> str:
    """Return the page of the public API.

    Args:
        public: the names of ``onecopy.__all__``.
        of_checkpoints: the names of ``onecopy.checkpoint.__all__``.
    """
    sections = dict(PUBLIC)
    listed = {name for names in sections.values() for name in names}
    if rest := [name for name in public if name not in listed]:
        sections["More"] = rest
    parts = [
        "# API reference",
        "The public names with their docstrings. Each has a link to its source. [Public names](../public-names.md) "
        "lists them in tables, with links to the pages that explain them.",
    ]
    for title, names in sections.items():
        parts.append(f"## {title}")
        parts += [documented(f"onecopy.{name}") for name in names if name in public]
    parts += ["## Checkpoints", "Use these as `checkpoint.<name>` after `from onecopy import checkpoint`."]
    parts += [documented(f"onecopy.checkpoint.{name}") for name in of_checkpoints]
    return "\n\n".join(parts) + "\n"


def documented(name: str) -> str:
    """Return the directive that describes an object."""
    short = name.rpartition(".")[2]
    kind = "class" if short[:1].isupper() else "function"
    members = "   :members:\n   :show-inheritance:\n   :member-order: bysource\n" if kind == "class" else ""
    return f"```{{eval-rst}}\n.. auto{kind}:: {name}\n{members}```"


def page_from_root(text: str) -> str:
    """Return a page of the root of the repository with the links that it needs in ``docs/reference``."""

    def moved(match: re.Match[str]) -> str:
        label, link = match[1], match[2]
        path, mark, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        if path.startswith("docs/"):
            return f"[{label}](../{path.removeprefix('docs/')}{mark}{anchor})"
        if path in ("CHANGELOG.md", "CONTRIBUTING.md"):
            return f"[{label}]({path.lower()}{mark}{anchor})"
        return f"{label} (`{path}`)"

    return LINK.sub(moved, text)


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every generated page."""
    import onecopy
    import onecopy.checkpoint

    modules = read_package(root)
    for module in modules:
        described = onecopy.checkpoint.__all__ if module.name == "onecopy.checkpoint" else []
        own = [name for name in described if module.find(name, FUNCTION)]
        yield f"{module.name}.md", page_of(module, children_of(module, modules), own)
    yield "modules.md", modules_page(modules)
    yield "keywords.md", keywords_page(modules)
    yield "api.md", api_page(onecopy.__all__, onecopy.checkpoint.__all__)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md"):
        yield name.lower(), page_from_root((root / name).read_text())


def write_pages(app: Any) -> None:
    """Write the pages that have changed, and remove those of modules that are gone."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    written = set()
    for name, text in pages(ROOT):
        written.add(name)
        path = folder / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.md"):
        if path.name not in written:
            path.unlink()


def link_to_parent(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Link a name that has no entry of its own to the class or module that it is in."""
    from sphinx.util.nodes import make_refnode

    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("onecopy."):
        return None
    objects = env.get_domain("py").objects
    while target not in objects and "." in target:
        target = target.rpartition(".")[0]
    if target not in objects:
        return None
    entry = objects[target]
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, content, target)


def lead_back_to_the_pages_of_modules(app: Any) -> list[Any]:
    """Make each object on a page of source code link to the page that describes it.

    viewcode assumes that all objects of a module are described under one dotted name, but public ones have two.
    """
    modules = getattr(app.env, "_viewcode_modules", {})
    objects = app.env.get_domain("py").objects
    for name, entry in list(modules.items()):
        if not entry:  # a module without source, which has no page
            del modules[name]
            continue
        code, tags, used, _ = entry
        known = {each: objects.get(f"{name}.{each}") for each in used}
        pages = {each: found.docname for each, found in known.items() if found is not None and not found.aliased}
        modules[name] = (code, tags, pages, name)
    return []


def setup(app: Any) -> dict[str, bool]:
    """Connect the extension to a build."""
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", link_to_parent)
    app.connect("html-collect-pages", lead_back_to_the_pages_of_modules, priority=400)  # before viewcode
    return {"parallel_read_safe": True, "parallel_write_safe": True}
