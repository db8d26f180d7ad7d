"""The rules the package keeps, each shown a text that breaks it too. (ruff forbids print and asks for docstrings.)"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import onecopy
from tests.support import paths

ROOT = Path(onecopy.__file__).parent

ORDER = [
    *("cli", "integrations", "checkpoint", "data_parallel", "optimizer", "ema", "ddp_hooks", "state_dict"),
    *("step", "planning", "optim", "comm", "layout", "common", "errors"),
]
"""The parts, from the top down. A part may import itself and what is below it."""

LONGEST_FILE = 600

TORCH_PRIVATE = "onecopy.common.torch_private"
"""The one module that may use torch's private names."""

WITHOUT_PUBLIC_TWIN = frozenset({"_foreach_copy_"})
"""Private names of torch that some parts may use anywhere: nothing public copies many tensors in one call."""

COPIES_MANY = frozenset({"comm", "step", "state_dict", "ddp_hooks", "data_parallel"})
"""The parts that may use them."""

PICKLES = "pickle|cPickle|_pickle|cloudpickle|dill|joblib|marshal|shelve"
BACKENDS = "gloo|nccl|xccl|hccl|mpi|ucc"
BACKEND_QUESTIONS = "sends_in_place|get_backend|get_backend_config|is_gloo_available"
PRIVATE = r"_(?!_)\w+"

FORBIDDEN = {
    "torch.distributed in layout": (r"onecopy\.layout\b", r"torch\.distributed|from torch import .*\bdistributed\b"),
    "cuda": ("onecopy", r"torch\.cuda|from torch import .*\bcuda\b"),
    "pickle": ("onecopy", rf"(import|from) ({PICKLES})\b|(\.|import .*)\w+_object(_list)?\b"),
    "unsafe load": (
        "onecopy",
        r"torch\.load\((?!.*weights_only=True)|from torch(\.serialization)? import .*\b(load|save)\b",
    ),
    # One module writes the file that a user asks for.
    "pickling save": (r"onecopy(?!\.checkpoint\.convert$)", r"torch\.save\("),
    "backends outside comm": (r"onecopy(?!\.comm\b)", rf"'({BACKENDS})'|\.({BACKEND_QUESTIONS})\b"),
    "loggers by another name": ("onecopy", r"from logging import|logging\.(?!getLogger\(__name__\))\w+\("),
}
"""For the modules whose name begins with a pattern, what their code must not contain."""


@dataclass(frozen=True)
class Source:
    """One module of the package."""

    module: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def code(self) -> str:
        """The statements in one style, without comments and docstrings."""
        tree = ast.parse(self.text)
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                body[:] = [each for each in body if not is_text(each)] or [ast.Pass()]
        return ast.unparse(tree)

    @property
    def part(self) -> str:
        """Which entry of ``ORDER`` the module belongs to; empty for the package itself."""
        return [*self.module.split("."), ""][1]


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def read_package() -> list[Source]:
    sources = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["onecopy", *path.relative_to(ROOT).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        sources.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return sources


PACKAGE = read_package()
MODULES = {source.module for source in PACKAGE}


def own_imports(source: Source) -> Iterator[str]:
    """The full name of each module of this package that is imported, at any depth of the file."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "onecopy")
        elif isinstance(node, ast.ImportFrom):
            above = source.module.split(".")
            above = above[: len(above) - node.level + source.is_package] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            if origin.split(".")[0] == "onecopy":
                yield from (
                    f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in MODULES else origin for alias in node.names
                )


def only_downwards(source: Source) -> Iterator[str]:
    below = ORDER[ORDER.index(source.part) :] if source.part in ORDER else []
    for target in own_imports(source) if source.part else ():
        if [*target.split("."), ""][1] not in below:
            yield f"imports {target}"
    if source.part and not below:
        yield "is in no part of the design"


def no_foreign_private_names(source: Source) -> Iterator[str]:
    own = set(WITHOUT_PUBLIC_TWIN if source.part in COPIES_MANY else ())
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            own.add(node.id if isinstance(node, ast.Name) else node.attr)
    imported = re.findall(rf"^ *(?:from|import) .*?\b({PRIVATE})", source.code, re.MULTILINE)
    used = re.findall(rf"(?:\.|attr\([^,]+, ')({PRIVATE})", re.sub("^ *(from|import) .*", "", source.code, flags=re.M))
    if source.module != TORCH_PRIVATE:
        yield from (f"uses {name}" for name in [*imported, *used] if name in imported or name not in own)


def nothing_forbidden(source: Source) -> Iterator[str]:
    for name, (modules, pattern) in FORBIDDEN.items():
        if re.match(modules, source.module):
            yield from (f"{name}: {found[0]}" for found in re.finditer(pattern, source.code))


def short_files(source: Source) -> Iterator[str]:
    if source.text.count("\n") > LONGEST_FILE:
        yield "is too long"


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [only_downwards, no_foreign_private_names, nothing_forbidden, short_files]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_its_rules(rule: Rule) -> None:
    assert {"onecopy", "onecopy.optimizer", "onecopy.layout", "onecopy.layout.shards", TORCH_PRIVATE} <= MODULES
    assert [f"{source.module} {problem}" for source in PACKAGE for problem in rule(source)] == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {source.module: set(own_imports(source)) - {source.module} for source in PACKAGE}
    while leaves := {module for module, targets in graph.items() if not targets & graph.keys()}:
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    assert graph == {}


def test_every_test_has_its_folder_none_is_long_and_none_imports_another() -> None:
    others = {"project", "bench", "faults", "fuzz", "support", "accelerator", "conftest.py"}
    tests = [path for path in paths.TESTS.rglob("*.py") if path.name != "__init__.py"]
    assert len(tests) > 50
    folders = {path.relative_to(paths.TESTS).parts[0] for path in tests}
    assert folders <= {path.name for path in ROOT.iterdir() if path.is_dir()} | others
    for path in tests:
        source = Source("tests", path.read_text())
        assert list(short_files(source)) == [], path
        assert re.findall(r"^ *(?:from|import) .*\btest_\w+", source.code, re.MULTILINE) == [], path


ENGINE, LAYOUT, OPTIMIZER = "onecopy.step.sample", "onecopy.layout.sample", "onecopy.optimizer"

BROKEN = [
    (LAYOUT, "from onecopy.comm.collectives import Collectives"),
    (ENGINE, "def f():\n    import onecopy.optimizer"),
    (ENGINE, "from onecopy import ZeroRedundancyOptimizer"),
    (ENGINE, "from ..ddp_hooks import worker"),
    ("onecopy.stray", ""),
    (LAYOUT, "import torch\ntorch.distributed.get_rank()"),
    (ENGINE, "import pickle"),
    (ENGINE, "dist.all_gather_object(a, b)"),
    (ENGINE, "torch.load(path, weights_only=False)"),
    (ENGINE, "torch.save(a, path)"),
    (ENGINE, "optimizer._hooks"),
    (ENGINE, "class A(B):\n    def f(self):\n        return self._of_the_base"),
    (ENGINE, "from torch._utils import something"),
    (ENGINE, "getattr(tensor, '_hidden', None)"),
    (OPTIMIZER, "torch._foreach_copy_(a, b)"),
    (ENGINE, "torch.cuda.synchronize()"),
    (ENGINE, "if dist.get_backend(group) == other: pass"),
    (ENGINE, 'fast = name == "gloo"'),
    (ENGINE, "collectives.sends_in_place(device)"),
    (ENGINE, "logging.getLogger('onecopy')"),
    (ENGINE, "\n" * 601),
]

KEPT = [
    (ENGINE, "from onecopy.layout import Layout\nfrom onecopy.errors import OnecopyError"),
    (ENGINE, "from onecopy.common import tagged_json\nfrom . import join"),
    (ENGINE, "torch.load(path, weights_only=True)"),
    (ENGINE, "class A:\n    def __init__(self):\n        self._x = 1\nA()._x\nA.__mro__"),
    (ENGINE, "torch._foreach_copy_(a, b)"),
    (TORCH_PRIVATE, "optimizer._hooks"),
    ("onecopy.comm.sample", "fast = name == 'gloo'"),
    (ENGINE, "logger = logging.getLogger(__name__)\nlogger.info('x')"),
]


@pytest.mark.parametrize(("module", "text", "breaks"), [(*each, 1) for each in BROKEN] + [(*each, 0) for each in KEPT])
def test_exactly_one_rule_notices_a_text_that_breaks_it(module: str, text: str, breaks: int) -> None:
    assert sum(any(rule(Source(module, text))) for rule in RULES) == breaks
