"""With ``overlap_forward``, every submodule waits for its own parameters just before it runs.

Other parameters may still be in flight then. A submodule waits for the parameters that it has directly, and for the
parameters that the user's ``uses`` names. Parameters of submodules whose forward does not run are waited for before the
whole forward pass: some modules, such as ``nn.MultiheadAttention``, read their children's parameters without a call.
The last forward pass shows which submodules run. Before the first one has ended, everything is waited for at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onecopy.data_parallel.construction import resolve_uses
from onecopy.data_parallel.step import PipelinedStep

READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""torch's modules that read the parameters of their children themselves."""

_ParamsOfStep = tuple[PipelinedStep, list[int]]
"""A pipelined step, and the indices of some of its parameters."""


class ForwardWaitHooks:
    """Forward pre-hooks on all submodules that have or read parameters."""

    def __init__(
        self,
        module: nn.Module,
        pipelines: Mapping[
            int, tuple[PipelinedStep, int]
        ],  # by identity of a parameter, what sends it, its index there
        uses: Mapping[str, Sequence[str]],
    ) -> None:
        self._pipelines = dict(pipelines)
        self._read_params: dict[str, list[int]] = {}  # by submodule, identities of parameters
        self._running: set[str] = set()  # submodules that have run in the current forward pass
        self._ran_last: set[str] | None = None
        # A set of submodules, and the parameters that none of them reads; computed again when the set changes.
        self._unread: tuple[set[str], list[_ParamsOfStep]] = (set(), [])
        modules = dict(module.named_modules())
        for name, submodule in modules.items():
            recurse = isinstance(submodule, READ_THEIR_CHILDREN)
            self._read_params[name] = [id(param) for param in submodule.parameters(recurse=recurse)]
        for name, params in resolve_uses(module, uses).items():
            self._read_params[name] += params
        self._waits = {name: self._by_pipeline(params) for name, params in self._read_params.items()}
        hooks = weakref.ref(self)
        for name, submodule in modules.items():
            if self._read_params[name]:
                submodule.register_forward_pre_hook(_pre_hook(hooks, name), prepend=True)

    def before_forward(self) -> None:
        """Before the whole module's forward: wait for the parameters that no submodule will wait for."""
        known, self._ran_last, self._running = self._ran_last, self._running, set()
        if known is None or not self._ran_last:
            for pipeline in {id(pipeline): pipeline for pipeline, _ in self._pipelines.values()}.values():
                pipeline.wait()
            return
        if self._unread[0] != self._ran_last:
            read = {param for name in self._ran_last for param in self._read_params[name]}
            self._unread = (
                self._ran_last,
                self._by_pipeline([param for param in self._pipelines if param not in read]),
            )
        for pipeline, indices in self._unread[1]:
            pipeline.wait_for(indices)

    def before_submodule(self, name: str) -> None:
        """Before one submodule's forward: wait for the parameters that it reads."""
        self._running.add(name)
        for pipeline, indices in self._waits[name]:
            pipeline.wait_for(indices)

    def _by_pipeline(self, params: Sequence[int]) -> list[_ParamsOfStep]:
        """The indices of parameters, grouped by pipelined step."""
        grouped: dict[int, _ParamsOfStep] = {}
        for param in params:
            if param in self._pipelines:
                pipeline, index = self._pipelines[param]
                grouped.setdefault(id(pipeline), (pipeline, []))[1].append(index)
        return list(grouped.values())


def _pre_hook(hooks: weakref.ref[ForwardWaitHooks], name: str) -> Any:
    def wait(_module: nn.Module, _inputs: Any) -> None:
        live = hooks()
        if live is not None:
            live.before_submodule(name)

    return wait
