"""Find every name of a Python module in its source: where it is explained, and the sections that use it.

The names are classes, functions, methods, imports, module-level names, fields, attributes of ``self`` and parameters.
Local variables are left out. A *section* is a function, a class or a method: the units that the reference describes.
Only the standard library is used, so that tests need no Sphinx.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CLASS, FUNCTION, IMPORT, IDENTIFIER = "classes", "functions and methods", "imports", "identifiers"
KINDS = (CLASS, FUNCTION, IMPORT, IDENTIFIER)

MODULE_LEVEL = ""
"""The section of code that is in no function or class."""

RECEIVERS = frozenset({"self", "cls", "_"})
"""Parameters that explain nothing."""


@dataclass
class Keyword:
    """One name of a module.

    Attributes:
        name: the name as it is written.
        kind: one of ``KINDS``.
        targets: dotted names of the objects that explain it.
        sections: names inside the module of the sections in which it occurs.
    """

    name: str
    kind: str
    targets: list[str] = field(default_factory=list)
    sections: list[str] = field(default_factory=list)


@dataclass
class Module:
    """The names of one module.

    Attributes:
        name: its dotted name.
        path: its file, relative to the root of the repository.
        summary: the first line of its docstring.
        keywords: its names, ordered by kind and name.
    """

    name: str
    path: str
    summary: str
    keywords: list[Keyword]

    def find(self, name: str, kind: str) -> Keyword | None:
        """Return the keyword of that name and kind, or None."""
        return next((each for each in self.keywords if (each.name, each.kind) == (name, kind)), None)


class _Collector(ast.NodeVisitor):
    """Collects definitions, and the section of every use of a name."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.scopes: list[ast.AST] = []
        self.found: dict[tuple[str, str], Keyword] = {}
        self.uses: dict[str, list[str]] = {}

    def section(self) -> str:
        """Return the innermost section; a function inside a function belongs to the outer one."""
        names = []
        for scope in self.scopes:
            names.append(scope.name)  # type: ignore[attr-defined]
            if not isinstance(scope, ast.ClassDef):
                break
        return ".".join(names)

    def dotted(self, *names: str) -> str:
        return ".".join(name for name in (self.module, self.section(), *names) if name)

    def define(self, name: str, kind: str, target: str) -> None:
        keyword = self.found.setdefault((name, kind), Keyword(name, kind))
        if target not in keyword.targets:
            keyword.targets.append(target)

    def use(self, name: str) -> None:
        sections = self.uses.setdefault(name, [])
        if self.section() not in sections:
            sections.append(self.section())

    @property
    def in_function(self) -> bool:
        return any(not isinstance(scope, ast.ClassDef) for scope in self.scopes)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._definition(node, CLASS)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._definition(node, FUNCTION)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._definition(node, FUNCTION)

    def _definition(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> None:
        self.define(node.name, kind, self.dotted() if self.in_function else self.dotted(node.name))
        self.use(node.name)
        self.scopes.append(node)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_arg(self, node: ast.arg) -> None:
        if node.arg not in RECEIVERS:
            self.define(node.arg, IDENTIFIER, self.dotted())
            self.use(node.arg)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.define(alias.asname or alias.name, IMPORT, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self.define(alias.asname or alias.name, IMPORT, f"{node.module}.{alias.name}")

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store) and not self.in_function:
            self.define(node.id, IDENTIFIER, self.dotted(node.id))
        self.use(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if own and isinstance(node.ctx, ast.Store):
            classes = [scope.name for scope in self.scopes if isinstance(scope, ast.ClassDef)]
            self.define(node.attr, IDENTIFIER, ".".join([self.module, *classes, node.attr]))
        self.use(node.attr)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is not None:
            self.use(node.arg)
        self.generic_visit(node)


def read_module(name: str, source: str, path: str = "") -> Module:
    """Return the names of a module.

    Args:
        name: its dotted name.
        source: its text.
        path: its file, relative to the root of the repository.
    """
    tree = ast.parse(source)
    collector = _Collector(name)
    collector.visit(tree)
    for keyword in collector.found.values():
        keyword.sections = collector.uses.get(keyword.name.partition(".")[0], [])
    keywords = sorted(collector.found.values(), key=lambda each: (KINDS.index(each.kind), each.name.lower(), each.name))
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Module(name, path, summary, keywords)


def read_package(root: Path) -> list[Module]:
    """Return the modules of the package, each with its names.

    Args:
        root: the root of the repository.
    """
    modules = []
    for path in sorted((root / "src/onecopy").rglob("*.py")):
        parts = list(path.relative_to(root / "src").with_suffix("").parts)
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules.append(read_module(name, path.read_text(), path.relative_to(root).as_posix()))
    follow_imports(modules)
    return modules


def follow_imports(modules: Sequence[Module]) -> None:
    """Replace the target of an import from a package by the module that defines the name."""
    by_name = {module.name: module for module in modules}

    def origin(target: str) -> str:
        place, _, name = target.rpartition(".")
        known = by_name.get(place)
        imported = known.find(name, IMPORT) if known and target not in by_name else None
        return origin(imported.targets[0]) if imported else target

    for module in modules:
        for keyword in module.keywords:
            if keyword.kind == IMPORT:
                keyword.targets = list(dict.fromkeys(origin(target) for target in keyword.targets))


def keywords_of_kind(module: Module, kind: str) -> Iterator[Keyword]:
    """Yield the keywords of one kind."""
    return (keyword for keyword in module.keywords if keyword.kind == kind)
