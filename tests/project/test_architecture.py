"""The rules the package keeps, read off its syntax trees; each rule is also shown a text that breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import onecopy
from tests.support import paths

ROOT = Path(onecopy.__file__).parent

ORDER = (
    "cli",
    "integrations",
    "checkpoint",
    "data_parallel",
    "optimizer",
    "ddp_hooks",
    "state_dict",
    "step",
    "planning",
    "optim",
    "comm",
    "layout",
    "common",
    "errors",
)
"""The parts, from the top down. A part may import itself and what is below it."""

LONGEST_FILE = 600
LONGEST_TEST_FILE = 600

TORCH_PRIVATE = "onecopy.common.torch_private"
"""The one module that may use torch's private names."""

WITHOUT_PUBLIC_TWIN = frozenset({"_foreach_copy_"})
"""Private names of torch that some parts may use anywhere: nothing public copies many tensors in one call."""

DOCUMENTED = frozenset({"_current_frames"})
"""Names of Python's own modules that begin with an underscore and are documented all the same."""

COPIES_MANY = frozenset({"comm", "step", "state_dict", "ddp_hooks", "data_parallel"})
"""The parts that may use them."""

BACKENDS = frozenset({"gloo", "nccl", "xccl", "hccl", "mpi", "ucc"})

BACKEND_QUESTIONS = frozenset({"sends_in_place", "get_backend", "get_backend_config", "is_gloo_available"})
"""Names by which code could ask which backend it runs on."""

CONVERTS = "onecopy.checkpoint.convert"
"""The one module that may call ``torch.save``, to write the file that a user asks for."""

PICKLES = frozenset({"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"})


@dataclass(frozen=True)
class Source:
    """One module of the package."""

    module: str
    text: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """Which entry of ``ORDER`` the module belongs to; empty for the package itself."""
        return [*self.module.split("."), ""][1]

    def walk(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


def read_package() -> list[Source]:
    sources = []
    for path in sorted(ROOT.rglob("*.py")):
        parts = ["onecopy", *path.relative_to(ROOT).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        sources.append(Source(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return sources


PACKAGE = read_package()

Rule = Callable[[Source], Iterator[str]]


def imports(source: Source) -> Iterator[tuple[int, str, str]]:
    """Line, module and name (empty for a plain import) of everything imported, at any depth of the file."""
    for node in source.walk():
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                above = source.module.split(".")
                above = above[: len(above) - node.level + source.is_package]
                origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, origin, alias.name) for alias in node.names)


def own_imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full name of each module of this package that is imported."""
    modules = {other.module for other in PACKAGE}
    for line, origin, name in imports(source):
        if origin.split(".")[0] == "onecopy":
            yield line, f"{origin}.{name}" if f"{origin}.{name}" in modules else origin


def dotted(node: ast.AST) -> str:
    """``torch.cuda.synchronize`` for such an expression, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (front := dotted(node.value)):
        return f"{front}.{node.attr}"
    return ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def only_downwards(source: Source) -> Iterator[str]:
    if not source.part:
        return
    if source.part not in ORDER:
        yield f"{source.module} is in no part of the design"
        return
    for line, target in own_imports(source):
        part = [*target.split("."), ""][1]
        if part not in ORDER or ORDER.index(part) < ORDER.index(source.part):
            yield f"{source.module}:{line} imports {target}"


def layout_is_pure(source: Source) -> Iterator[str]:
    if source.part != "layout":
        return
    for line, origin, name in imports(source):
        if f"{origin}.{name}".startswith("torch.distributed"):
            yield f"{source.module}:{line} imports {origin}"
    for node in source.walk():
        if dotted(node).startswith("torch.distributed"):
            yield f"{source.module} names torch.distributed"


def no_pickle(source: Source) -> Iterator[str]:
    for line, origin, name in imports(source):
        if origin.split(".")[0] in PICKLES or re.search(r"_object(_list)?$", name):
            yield f"{source.module}:{line} imports {origin} {name}"
    for node in source.walk():
        if isinstance(node, ast.Attribute) and re.search(r"_object(_list)?$", node.attr):
            yield f"{source.module}:{node.lineno} uses {node.attr}"
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.save" and source.module != CONVERTS:
            yield f"{source.module}:{node.lineno} saves with pickle"
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            safe = options.get("weights_only")
            if not (isinstance(safe, ast.Constant) and safe.value is True):
                yield f"{source.module}:{node.lineno} calls torch.load without weights_only=True"
    for line, origin, name in imports(source):
        if origin in ("torch", "torch.serialization") and name in ("load", "save"):
            yield f"{source.module}:{line} imports torch's {name} under a shorter name"


def defined_names(source: Source) -> set[str]:
    """Every name that the module itself defines: functions, classes, variables, attributes, fields."""
    names = set()
    for node in source.walk():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def no_foreign_private_names(source: Source) -> Iterator[str]:
    if source.module == TORCH_PRIVATE:
        return
    own = defined_names(source)
    for line, origin, name in imports(source):
        if any(is_private(piece) for piece in [*origin.split("."), name]):
            yield f"{source.module}:{line} imports {origin} {name}"
    for node in source.walk():
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | DOCUMENTED:
            if source.part in COPIES_MANY and dotted(node.value) == "torch" and node.attr in WITHOUT_PUBLIC_TWIN:
                continue
            yield f"{source.module}:{node.lineno} uses {node.attr}"
        if (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("getattr", "hasattr", "setattr", "delattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
            and isinstance(node.args[1].value, str)
            and is_private(node.args[1].value)
            and node.args[1].value not in own
        ):
            yield f"{source.module}:{node.lineno} uses {node.args[1].value} by its name"


def no_cuda(source: Source) -> Iterator[str]:
    for line, origin, name in imports(source):
        if f"{origin}.{name}".startswith("torch.cuda"):
            yield f"{source.module}:{line} imports torch.cuda"
    for node in source.walk():
        if dotted(node) == "torch.cuda":
            yield f"{source.module} names torch.cuda"


def only_comm_knows_backends(source: Source) -> Iterator[str]:
    if source.part == "comm":
        return
    for node in source.walk():
        if isinstance(node, ast.Constant) and node.value in BACKENDS:
            yield f"{source.module}:{node.lineno} names the backend {node.value}"
        if isinstance(node, ast.Attribute) and node.attr in BACKEND_QUESTIONS:
            yield f"{source.module}:{node.lineno} asks {node.attr}"


def loggers_by_module(source: Source) -> Iterator[str]:
    for line, origin, name in imports(source):
        if origin == "logging" and name:
            yield f"{source.module}:{line} imports {name} from logging"
    for node in source.walk():
        if not isinstance(node, ast.Call) or not dotted(node.func).startswith("logging."):
            continue
        by_name = [dotted(argument) for argument in node.args] == ["__name__"] and not node.keywords
        if dotted(node.func) != "logging.getLogger" or not by_name:
            yield f"{source.module}:{node.lineno} calls {dotted(node.func)}"


def short_files(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > LONGEST_FILE:
        yield f"{source.module} has {lines} lines"


def public_definitions(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if any(dotted(decorator).endswith("overload") for decorator in node.decorator_list):
                continue
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body, f"{prefix}.{node.name}")


def documented(source: Source) -> Iterator[str]:
    if not ast.get_docstring(source.tree):
        yield f"{source.module} says nothing of itself"
    for name, node in public_definitions(source.tree.body, source.module):
        if not ast.get_docstring(node):
            yield f"{name} says nothing of itself"


def no_print(source: Source) -> Iterator[str]:
    for node in source.walk():
        if isinstance(node, ast.Call) and dotted(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"):
            yield f"{source.module}:{node.lineno} prints"


RULES: list[Rule] = [
    only_downwards,
    layout_is_pure,
    no_pickle,
    no_foreign_private_names,
    no_cuda,
    only_comm_knows_backends,
    loggers_by_module,
    short_files,
    documented,
    no_print,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_its_rules(rule: Rule) -> None:
    assert [problem for source in PACKAGE for problem in rule(source)] == []


def test_the_whole_package_is_looked_at() -> None:
    modules = {source.module for source in PACKAGE}
    assert {"onecopy", "onecopy.optimizer", "onecopy.layout", "onecopy.layout.shards", TORCH_PRIVATE} <= modules


def test_modules_do_not_import_each_other_in_circles() -> None:
    graph = {source.module: {target for _, target in own_imports(source)} - {source.module} for source in PACKAGE}
    while leaves := {module for module, targets in graph.items() if not targets & graph.keys()}:
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    assert graph == {}


TESTS = [path for path in paths.TESTS.rglob("*.py") if path.name != "__init__.py"]


def test_every_test_is_in_a_room_of_the_package_or_of_the_project() -> None:
    others = {"project", "bench", "faults", "fuzz", "golden", "support", "accelerator"}
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} | others
    places = {path.relative_to(paths.TESTS).parts[0] for path in TESTS} - {"conftest.py"}
    assert places <= rooms


def test_no_test_module_imports_another_and_none_is_long() -> None:
    assert len(TESTS) > 50
    for path in TESTS:
        text = path.read_text()
        assert text.count("\n") <= LONGEST_TEST_FILE, path
        names = {name for _, module, last in imports(Source("tests", text)) for name in (*module.split("."), last)}
        assert [name for name in names if name.startswith("test_")] == [], path


ENGINE, LAYOUT, OPTIMIZER = "onecopy.step.sample", "onecopy.layout.sample", "onecopy.optimizer"

BROKEN: list[tuple[Rule, str, str]] = [
    (only_downwards, LAYOUT, "from onecopy.comm.collectives import Collectives"),
    (only_downwards, ENGINE, "def f():\n    import onecopy.optimizer"),
    (only_downwards, ENGINE, "from onecopy import ZeroRedundancyOptimizer"),
    (only_downwards, ENGINE, "from ..ddp_hooks import worker"),
    (only_downwards, "onecopy.stray", ""),
    (layout_is_pure, LAYOUT, "import torch.distributed as dist"),
    (layout_is_pure, LAYOUT, "from torch import distributed"),
    (layout_is_pure, LAYOUT, "import torch\ntorch.distributed.get_rank()"),
    (no_pickle, ENGINE, "import pickle"),
    (no_pickle, ENGINE, "from pickle import dumps"),
    (no_pickle, ENGINE, "dist.all_gather_object(a, b)"),
    (no_pickle, ENGINE, "dist.broadcast_object_list(a)"),
    (no_pickle, ENGINE, "from torch.distributed import gather_object"),
    (no_pickle, ENGINE, "torch.load(path)"),
    (no_pickle, ENGINE, "torch.load(path, weights_only=False)"),
    (no_pickle, ENGINE, "from torch import load"),
    (no_pickle, ENGINE, "torch.save(a, path)"),
    (no_foreign_private_names, ENGINE, "optimizer._hooks"),
    (no_foreign_private_names, ENGINE, "class A(B):\n    def f(self):\n        return self._of_the_base"),
    (no_foreign_private_names, ENGINE, "from torch._utils import something"),
    (no_foreign_private_names, ENGINE, "from onecopy.step.engine import _hidden"),
    (no_foreign_private_names, ENGINE, "getattr(tensor, '_hidden', None)"),
    (no_foreign_private_names, OPTIMIZER, "torch._foreach_copy_(a, b)"),
    (no_cuda, ENGINE, "torch.cuda.synchronize()"),
    (no_cuda, ENGINE, "from torch import cuda"),
    (no_cuda, ENGINE, "from torch.cuda import Stream"),
    (only_comm_knows_backends, ENGINE, "if dist.get_backend(group) == other: pass"),
    (only_comm_knows_backends, ENGINE, "fast = name == 'gloo'"),
    (only_comm_knows_backends, ENGINE, "collectives.sends_in_place(device)"),
    (loggers_by_module, ENGINE, "logging.getLogger('onecopy')"),
    (loggers_by_module, ENGINE, "logging.getLogger()"),
    (loggers_by_module, ENGINE, "logging.info('x')"),
    (loggers_by_module, ENGINE, "from logging import getLogger"),
    (short_files, ENGINE, "\n" * 601),
    (documented, ENGINE, "x = 1"),
    (documented, ENGINE, '"""Doc."""\ndef f(): pass'),
    (documented, ENGINE, '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): pass'),
    (no_print, ENGINE, "print('x')"),
]

KEPT: list[tuple[Rule, str, str]] = [
    (only_downwards, ENGINE, "from onecopy.layout import Layout\nfrom onecopy.errors import OnecopyError"),
    (only_downwards, ENGINE, "from onecopy.common import tagged_json\nfrom . import join"),
    (no_pickle, ENGINE, "torch.load(path, weights_only=True)"),
    (no_foreign_private_names, ENGINE, "class A:\n    def __init__(self):\n        self._x = 1\nA()._x\nA.__mro__"),
    (no_foreign_private_names, ENGINE, "torch._foreach_copy_(a, b)"),
    (no_foreign_private_names, TORCH_PRIVATE, "optimizer._hooks"),
    (only_comm_knows_backends, "onecopy.comm.sample", "fast = name == 'gloo'"),
    (loggers_by_module, ENGINE, "logger = logging.getLogger(__name__)\nlogger.info('x')"),
    (documented, ENGINE, '"""Doc."""\ndef _f(): pass\nclass A:\n    """Doc."""\n    def __len__(self): pass'),
]


@pytest.mark.parametrize(("rule", "module", "text"), BROKEN)
def test_a_rule_notices_a_text_that_breaks_it(rule: Rule, module: str, text: str) -> None:
    assert list(rule(Source(module, text)))


@pytest.mark.parametrize(("rule", "module", "text"), KEPT)
def test_a_rule_accepts_a_text_that_keeps_it(rule: Rule, module: str, text: str) -> None:
    assert list(rule(Source(module, text))) == []
