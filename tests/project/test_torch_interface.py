"""torch's names and parameters exist here, an instance counts as torch's, and importing works on other systems."""

from __future__ import annotations

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
from onecopy import ZeroRedundancyOptimizer, checkpoint
from tests.support.harness import distributed
from tests.support.paths import ROOT

NAMED_IF_MISSING = "optimizer_class"
"""The only parameter that has a default here and none in torch: a forgotten class is refused with the line to write."""

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def of_torch(module: str, name: str) -> Any:
    """Something of torch whose module warns when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(f"torch.distributed.{module}"), name)


THEIRS = of_torch("optim", "ZeroRedundancyOptimizer")


def missing(theirs: inspect.Signature, ours: inspect.Signature) -> list[str]:
    """The parameters that a caller of ``theirs`` could pass, by position or by name, and ``ours`` takes otherwise."""
    mine, empty = ours.parameters, inspect.Parameter.empty
    problems = []
    for position, (name, parameter) in enumerate(theirs.parameters.items()):
        if parameter.kind in VARIADIC:
            same = parameter.kind in {each.kind for each in mine.values()}
        else:
            same = name in mine and mine[name].kind is parameter.kind and list(mine)[position] == name
            if same and name != NAMED_IF_MISSING:
                same = (mine[name].default is empty) == (parameter.default is empty)
                same &= mine[name].default == parameter.default
        if not same:
            problems.append(name)
    new = [each for name, each in mine.items() if name not in theirs.parameters and each.kind not in VARIADIC]
    return problems + [f"{each.name} is new and required" for each in new if each.default is empty]


def test_every_parameter_of_torch_exists_with_the_same_kind_and_default() -> None:
    module = "algorithms.ddp_comm_hooks.ddp_zero_hook"
    for name in ("hook_with_zero_step", "hook_with_zero_step_interleaved"):
        theirs, ours = of_torch(module, name), getattr(onecopy, name)
        assert missing(inspect.signature(theirs), inspect.signature(ours)) == [], name
    of_class = [name for name in dir(THEIRS) if not name.startswith("_")]
    assert {"step", "add_param_group", "consolidate_state_dict", "state_dict", "join_hook"} <= set(of_class)
    for name in ["__init__", *of_class]:
        ours = inspect.getattr_static(ZeroRedundancyOptimizer, name, None)
        of_base = None if name == "__init__" else vars(Optimizer).get(name)
        for theirs in (inspect.getattr_static(THEIRS, name), of_base):
            assert isinstance(ours, property) or not isinstance(theirs, property), name
            if inspect.isfunction(theirs):
                assert missing(inspect.signature(theirs), inspect.signature(ours)) == [], name


def test_importing_warns_of_nothing_and_imports_modules_that_would_keep_a_process_group() -> None:
    """Such a module keeps the process group that is there when it is first imported."""
    code = "import sys, onecopy; print(*sys.modules, sep='\\n')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    modules = {"torch.distributed.nn.functional", "torch.distributed.optim.zero_redundancy_optimizer"}
    assert modules <= set(done.stdout.splitlines())


WITHOUT_POSIX = """
import importlib, os, pathlib, pkgutil, sys, tempfile
import torch, torch.distributed.checkpoint  # torch has ways of its own without these modules

POSIX = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline", "curses", "posix_ipc")
for name in POSIX:
    sys.modules[name] = None  # an import of it raises ImportError
del os.preadv
import onecopy

EXTRAS = ("onecopy.cli", "onecopy.integrations.")  # they need packages that may be missing
names = [found.name for found in pkgutil.walk_packages(onecopy.__path__, "onecopy.")]
names = [name for name in names if not name.startswith(EXTRAS)]
assert len(names) > 60, names
for name in names:
    importlib.import_module(name)
from onecopy import checkpoint

with tempfile.TemporaryDirectory() as folder:
    for call in (
        lambda: checkpoint.save(folder, 1, extra={}),
        lambda: checkpoint.load(sys.argv[1]),
        lambda: checkpoint.verify(sys.argv[1]),
    ):
        try:
            call()
        except (OSError, onecopy.CheckpointError) as error:
            assert "needs Linux or macOS" in str(error), error
        else:
            raise AssertionError("it was not refused")
    assert not list(pathlib.Path(folder).iterdir())
print("imported")
"""


def test_every_module_imports_without_posix_modules_and_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, extra={"a": 1})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(saved)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout.strip() == "imported", done.stderr


WAYS_TO_COPY: dict[str, Callable[[Any], object]] = {
    "copy.deepcopy": copy.deepcopy,
    "pickle.dumps": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
}


@distributed(1)
def test_an_instance_counts_as_torchs_has_its_names_and_cannot_be_copied(world_size: int) -> None:
    ours, theirs = (
        cls(torch.nn.Linear(3, 2).parameters(), torch.optim.AdamW, lr=0.1) for cls in (ZeroRedundancyOptimizer, THEIRS)
    )
    names = {name for name in dir(theirs) if not name.startswith("_")}
    expected = {"optim", "process_group", "world_size", "rank", "global_rank", "initialized"}
    assert expected <= names
    assert [name for name in names if not hasattr(ours, name)] == []
    assert isinstance(ours._all_params, list)

    assert all(isinstance(ours, cls) for cls in (THEIRS, Optimizer, torch.distributed.algorithms.join.Joinable))
    assert THEIRS not in type(ours).__mro__
    assert not isinstance(torch.optim.SGD([torch.zeros(1)]), THEIRS)

    for way, copied in WAYS_TO_COPY.items():
        with pytest.raises(TypeError, match=r"cannot be pickled.*state_dict\(\).*construct a new one"):
            raise AssertionError(way, copied(ours))
    ours.step()
    with pytest.raises(AttributeError, match=r"'ZeroRedundancyOptimizer' object has no attribute 'nonsense'"):
        _ = ours.nonsense
    assert not hasattr(ours, "train"), "AdamW has none to forward"
