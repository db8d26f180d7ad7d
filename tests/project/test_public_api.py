"""The public interface compared with a recorded list, so that nothing in it changes unnoticed.

After a change that is meant: ``python -m tests.project.test_public_api``, from the root of the repository, records it
anew.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import typer.main
from torch import nn

import onecopy
from onecopy import checkpoint
from onecopy.cli import main as cli
from tests.support.harness import pools
from tests.support.paths import FIXTURES

RECORD = FIXTURES / "public_api.txt"

INTERNAL = frozenset({"engine", "overlap", "reducer"})
"""Attributes through which parts of the package reach each other; they may be renamed."""


def attributes_of_instances() -> dict[str, list[str]]:
    """Public attributes that constructors set, beside those that torch's base classes have."""
    module = nn.Linear(3, 2)
    zero = onecopy.ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    scatter = onecopy.ReduceScatter(zero)
    wrapped = onecopy.ShardedDataParallel(module, zero)
    of_torch = {*vars(torch.optim.SGD([torch.zeros(1)])), *vars(nn.Module())}
    found = {}
    for instance in (zero, scatter, wrapped):
        names = {*vars(instance), *getattr(instance, "_modules", ())}
        public = {name for name in names - of_torch - INTERNAL if not name.startswith("_")}
        found[type(instance).__name__] = sorted(public)
    return found


def signature(function: Any) -> str:
    """The signature with annotations as they are written; evaluated ones would show what torch calls its own."""
    found = inspect.signature(function)
    parameters = [
        parameter if isinstance(parameter.annotation, str) else parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in found.parameters.values()
    ]
    returned = found.return_annotation if isinstance(found.return_annotation, str) else inspect.Signature.empty
    return str(found.replace(parameters=parameters, return_annotation=returned)).replace("<factory>", "...")


def lines_of_module(module: Any, instances: dict[str, list[str]]) -> Iterator[str]:
    for name in module.__all__:
        value, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield from lines_of_class(full, value)
            yield from (f"{full}.{attribute}" for attribute in instances.get(name, ()))
        else:
            yield f"{full}{signature(value)}"


def lines_of_class(full: str, cls: type) -> Iterator[str]:
    """The class with its bases and its constructor, and each member that this package (not torch) defines."""
    yield f"class {full}({', '.join(base.__qualname__ for base in cls.__bases__)})"
    if issubclass(cls, Exception):
        return  # constructed with a message, as every exception
    yield f"{full}{signature(cls)}"
    members: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.partition(".")[0] == "onecopy":
            members |= dict.fromkeys(vars(base).get("__annotations__", {})) | dict(vars(base))
    for name, value in members.items():
        if not name.startswith("_") and name not in INTERNAL:
            yield f"{full}.{name}{signature(value) if inspect.isfunction(value) else ''}"


def lines_of_command(words: str, command: Any) -> Iterator[str]:
    """A command's arguments and options, and its subcommands."""
    yield words
    for param in command.params:
        names = "/".join([*param.opts, *param.secondary_opts])
        need = "required" if param.required else f"default {str(param.default) or 'empty'}"
        yield f"{words} {names}: {param.param_type_name}, {need}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from lines_of_command(f"{words} {name}", inner)


def current() -> list[str]:
    """One line for everything that a user can write."""
    (instances,) = pools.run(1, "tests.project.test_public_api", "attributes_of_instances", {})
    lines = {"onecopy.__version__", *(f"onecopy checkpoint convert --to {form.value}" for form in cli.Form)}
    lines.update(lines_of_command("onecopy", typer.main.get_command(cli.app)))
    for module in (onecopy, checkpoint):
        lines.update(lines_of_module(module, instances))
    return sorted(lines)


def test_the_public_interface_is_the_recorded_one() -> None:
    lines = difflib.unified_diff(RECORD.read_text().splitlines(), current(), "recorded", "now", lineterm="", n=0)
    found = "\n".join(line for line in lines if not line.startswith("@@"))
    assert not found, f"the public interface has changed; if that is meant, run this file to record it:\n{found}"


if __name__ == "__main__":
    RECORD.write_text("\n".join(current()) + "\n")
    pools.close()
