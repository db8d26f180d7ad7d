"""The public interface: torch's names and parameters exist here, and importing this package has no side effects."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import onecopy
from onecopy import ZeroRedundancyOptimizer
from tests.support.harness import distributed

PUBLIC_OF_TORCHS_OPTIMIZER = [
    name for name, value in vars(Optimizer).items() if inspect.isfunction(value) and not name.startswith("_")
]

STUB_ONLY = {"functional_optim_map"}
"""Names that torch's stub has but its class does not."""

NAMED_IF_MISSING = "optimizer_class"
"""The only parameter that has a default here and none in torch: a forgotten class is refused with the line to write."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def torchs_class() -> Any:
    """torch's class of the same name; its module warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer


def torchs_hooks() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook")


def stub_signatures() -> dict[str, inspect.Signature | None]:
    """Public names of torch's stub file and its constructor; None for one that is no method."""
    text = Path(inspect.getfile(torchs_class())).with_suffix(".pyi").read_text()
    (declared,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == torchs_class().__name__]
    assert isinstance(declared, ast.ClassDef)
    found: dict[str, inspect.Signature | None] = {}
    for node in declared.body:
        if isinstance(node, ast.AnnAssign):
            found[ast.unparse(node.target)] = None
        elif isinstance(node, ast.FunctionDef):
            # A function without a body has the same signature. Of an overloaded one, the version without defaults.
            code: dict[str, Any] = {}
            text = f"from __future__ import annotations\ndef {node.name}({ast.unparse(node.args)}): ..."
            exec(compile(text, "stub", "exec"), code)
            found.setdefault(node.name, inspect.signature(code[node.name]))
    return {name: each for name, each in found.items() if name == "__init__" or not name.startswith("_")}


def missing(theirs: inspect.Signature, ours: inspect.Signature, defaults: bool = True) -> list[str]:
    """What a caller of ``theirs`` could pass, by position or by name, and ``ours`` would not take the same way."""
    problems = []
    mine = ours.parameters
    kinds = {parameter.kind for parameter in mine.values()}
    for position, (name, parameter) in enumerate(theirs.parameters.items()):
        if parameter.kind in VARIADIC:
            if parameter.kind not in kinds:
                problems.append(f"no {parameter.kind.description} parameter")
        elif name not in mine or mine[name].kind is not parameter.kind:
            problems.append(f"no parameter {name} of the same kind")
        elif list(mine)[position] != name:
            problems.append(f"parameter {name} is at another position")
        elif name == NAMED_IF_MISSING:
            continue
        elif (mine[name].default is inspect.Parameter.empty) != (parameter.default is inspect.Parameter.empty):
            problems.append(f"parameter {name} is required in one and not in the other")
        elif defaults and mine[name].default != parameter.default:
            problems.append(f"parameter {name} has another default")
    for name, parameter in mine.items():
        needed = parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC
        if needed and name not in theirs.parameters:
            problems.append(f"parameter {name} is new and required")
    return problems


def test_the_comparison_of_signatures_notices_differences() -> None:
    def theirs(self: Any, one: int, two: int = 2, **rest: Any) -> None: ...
    def without_rest(self: Any, one: int, two: int = 2) -> None: ...
    def renamed(self: Any, uno: int, two: int = 2, **rest: Any) -> None: ...
    def other_kind(self: Any, one: int, *, two: int = 2, **rest: Any) -> None: ...
    def other_default(self: Any, one: int, two: int = 3, **rest: Any) -> None: ...
    def other_order(self: Any, two: int, one: int, **rest: Any) -> None: ...
    def more(self: Any, one: int, two: int = 2, three: int = 3, *, four: int = 4, **others: Any) -> None: ...

    def compare(ours: Callable[..., None]) -> list[str]:
        return missing(inspect.signature(theirs), inspect.signature(ours))

    assert compare(theirs) == compare(more) == []
    for ours in (without_rest, renamed, other_kind, other_default, other_order):
        assert compare(ours), ours


def test_every_parameter_of_torchs_class_exists_with_the_same_kind_and_default() -> None:
    theirs = torchs_class()
    compared = []
    for name in ["__init__", *dir(theirs)]:
        value = inspect.getattr_static(theirs, name)
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("_")):
            ours = getattr(ZeroRedundancyOptimizer, name)
            assert missing(inspect.signature(value), inspect.signature(ours)) == [], name
            compared.append(name)
        elif isinstance(value, property) and not name.startswith("_"):
            assert isinstance(inspect.getattr_static(ZeroRedundancyOptimizer, name), property), name
            compared.append(name)
    assert {"__init__", "step", "consolidate_state_dict", "join_hook", "join_device", "zero_grad"} <= set(compared)


def test_every_parameter_of_torchs_stub_exists_with_the_same_kind() -> None:
    compared = set()
    for name, theirs in stub_signatures().items():
        if name in STUB_ONLY or theirs is None:
            continue
        ours = inspect.getattr_static(ZeroRedundancyOptimizer, name)
        if isinstance(inspect.getattr_static(torchs_class(), name), property):
            assert isinstance(ours, property), name  # the stub forgot the decorator
            continue
        assert missing(theirs, inspect.signature(ours), defaults=False) == [], name
        compared.add(name)
    assert {"__init__", "step", "add_param_group", "consolidate_state_dict", "state_dict", "join_hook"} <= compared


@pytest.mark.parametrize("name", PUBLIC_OF_TORCHS_OPTIMIZER)
def test_every_method_takes_the_arguments_of_torchs_optimizer(name: str) -> None:
    theirs, ours = getattr(Optimizer, name), getattr(ZeroRedundancyOptimizer, name)
    assert missing(inspect.signature(theirs), inspect.signature(ours)) == []


def test_the_gradient_hooks_take_the_arguments_of_torchs() -> None:
    module = torchs_hooks()
    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        theirs, ours = getattr(module, name), getattr(onecopy, name)
        assert missing(inspect.signature(theirs), inspect.signature(ours)) == []


def test_public_names_are_listed_sorted_and_exist() -> None:
    assert onecopy.__all__ == sorted(onecopy.__all__)
    assert len(set(onecopy.__all__)) == len(onecopy.__all__)
    public = {
        name
        for name, value in vars(onecopy).items()
        if not name.startswith("_") and not inspect.ismodule(value) and value is not None
    }
    assert public == set(onecopy.__all__)
    for name in onecopy.__all__:
        assert getattr(onecopy, name).__doc__


def test_the_version_is_the_packages() -> None:
    from importlib.metadata import version

    assert onecopy.__version__ == version("onecopy")


def test_errors_between_ranks_can_be_caught_together_and_as_runtime_errors() -> None:
    for error in (onecopy.PeerFailedError, onecopy.RanksDisagreeError):
        assert issubclass(error, onecopy.OnecopyError)
    assert issubclass(onecopy.OnecopyError, RuntimeError)


def run_python(text: str) -> str:
    """Return the output of a fresh interpreter, with every warning an error."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", text], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_importing_warns_of_nothing_and_imports_modules_that_would_keep_a_process_group() -> None:
    modules = run_python("import sys, onecopy; print(*sys.modules, sep='\\n')").splitlines()
    assert "torch.distributed.nn.functional" in modules
    assert "torch.distributed.optim.zero_redundancy_optimizer" in modules


def test_without_a_process_group_construction_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"no process group is initialised: call .*init_process_group\(\)"):
        ZeroRedundancyOptimizer([torch.zeros(1)], torch.optim.SGD)


def make() -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(torch.nn.Linear(3, 2).parameters(), torch.optim.AdamW, lr=0.1)


@distributed(1)
def test_every_public_name_of_torchs_class_and_stub_exists(world_size: int) -> None:
    ours = make()
    theirs = torchs_class()(torch.nn.Linear(3, 2).parameters(), torch.optim.AdamW, lr=0.1)
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert {
        "optim",
        "process_group",
        "world_size",
        "rank",
        "global_rank",
        "initialized",
    } <= names & stub_signatures().keys()
    assert stub_signatures().keys() - names - {"__init__"} == STUB_ONLY
    assert sorted(name for name in names if not hasattr(ours, name)) == []
    assert isinstance(ours._all_params, list)


@distributed(1)
def test_an_instance_counts_as_torchs_class_without_inheriting_from_it(world_size: int) -> None:
    optimizer = make()
    theirs = torchs_class()
    assert isinstance(optimizer, theirs)
    assert theirs not in type(optimizer).__mro__
    assert isinstance(optimizer, torch.distributed.algorithms.join.Joinable)
    assert isinstance(optimizer, Optimizer)
    assert not isinstance(torch.optim.SGD([torch.zeros(1)]), theirs)


WAYS_TO_COPY: dict[str, Callable[[Any], object]] = {
    "copy.deepcopy": copy.deepcopy,
    "copy.copy": copy.copy,
    "pickle.dumps": pickle.dumps,
    "pickle protocol 0": lambda value: pickle.dumps(value, 0),
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
    "inside something": lambda value: copy.deepcopy({"optimizer": value}),
}


@pytest.mark.parametrize("way", WAYS_TO_COPY)
@distributed(1)
def test_copying_is_refused_and_says_what_to_do(world_size: int, way: str) -> None:
    optimizer = make()
    message = r"cannot be pickled.*state_dict\(\).*construct a new one"
    with pytest.raises(TypeError, match=message):
        WAYS_TO_COPY[way](optimizer)
    optimizer.step()


@distributed(1)
def test_an_unknown_attribute_is_an_attribute_error(world_size: int) -> None:
    optimizer = make()
    with pytest.raises(AttributeError, match=r"'ZeroRedundancyOptimizer' object has no attribute 'nonsense'"):
        _ = optimizer.nonsense
    assert not hasattr(optimizer, "train"), "AdamW has none to forward"
