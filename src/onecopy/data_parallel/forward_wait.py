"""Modules that wait for their own parameters just before they run, while others are still on their way.

A module waits for what it holds directly, and for what the user says it reads beside that. What belongs to modules
whose forward does not run is waited for before anything else: some modules, such as ``nn.MultiheadAttention``, read
their children's parameters without calling them. Which ones run is learnt from the last forward pass; before the
first one ends, everything is waited for at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onecopy.data_parallel.pipelined_step import PipelinedStep

READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules of torch's own that read parameters of their children themselves."""

_Wanted = tuple[PipelinedStep, list[int]]


def resolve_uses(module: nn.Module, uses: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Identities of the parameters that submodules are said to read beside their own; raise if a name is unknown."""
    names = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules())
    resolved: dict[str, list[int]] = {}
    for name, others in uses.items():
        if name not in modules:
            raise ValueError(f"uses names a submodule {name!r} that the module does not have")
        resolved[name] = []
        for other in others:
            if other in names:
                resolved[name].append(id(names[other]))
            elif other in modules:
                resolved[name] += [id(param) for param in modules[other].parameters()]
            else:
                raise ValueError(f"uses[{name!r}] names {other!r}, which is neither a parameter nor a submodule")
    return resolved


class ForwardWaitHooks:
    """Forward pre-hooks on all submodules that hold or read parameters."""

    def __init__(
        self, module: nn.Module, pipelines: Mapping[int, tuple[PipelinedStep, int]], uses: Mapping[str, Sequence[str]]
    ) -> None:
        self._pipelines = dict(pipelines)
        self._reads: dict[str, list[int]] = {}  # by submodule, identities of parameters
        self._ran: set[str] = set()
        self._ran_before: set[str] | None = None
        self._unread: tuple[set[str], list[_Wanted]] = (set(), [])  # after these have run, what none of them reads
        modules = dict(module.named_modules())
        for name, submodule in modules.items():
            deep = isinstance(submodule, READ_THEIR_CHILDREN)
            self._reads[name] = [id(param) for param in submodule.parameters(recurse=deep)]
        for name, params in resolve_uses(module, uses).items():
            self._reads[name] += params
        self._waits = {name: self._wanted(params) for name, params in self._reads.items()}
        me = weakref.ref(self)
        for name, submodule in modules.items():
            if self._reads[name]:
                submodule.register_forward_pre_hook(_hook(me, name), prepend=True)

    def begin(self) -> None:
        """Before the module's forward: wait for what no submodule will wait for."""
        known, self._ran_before, self._ran = self._ran_before, self._ran, set()
        if known is None or not self._ran_before:
            for pipeline in {id(pipeline): pipeline for pipeline, _ in self._pipelines.values()}.values():
                pipeline.wait()
            return
        if self._unread[0] != self._ran_before:
            waited = {param for name in self._ran_before for param in self._reads[name]}
            unread = self._wanted([param for param in self._pipelines if param not in waited])
            self._unread = (self._ran_before, unread)
        for pipeline, indices in self._unread[1]:
            pipeline.wait_for(indices)

    def before(self, name: str) -> None:
        """Before one submodule's forward."""
        self._ran.add(name)
        for pipeline, indices in self._waits[name]:
            pipeline.wait_for(indices)

    def _wanted(self, params: Sequence[int]) -> list[_Wanted]:
        """By pipeline, the positions of these parameters."""
        wanted: dict[int, _Wanted] = {}
        for param in params:
            if param in self._pipelines:
                pipeline, index = self._pipelines[param]
                wanted.setdefault(id(pipeline), (pipeline, []))[1].append(index)
        return list(wanted.values())


def _hook(hooks: weakref.ref[ForwardWaitHooks], name: str) -> Any:
    def wait(_module: nn.Module, _inputs: Any) -> None:
        live = hooks()
        if live is not None:
            live.before(name)

    return wait
