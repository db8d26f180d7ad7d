"""Notices when a module puts a new parameter where one of ours was.

``load_state_dict(assign=True)`` does that: the optimizer would go on stepping tensors that no module uses any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from onecopy.engine.torch_private import registered_parameter


class ReplacementWatch:
    """Remembers, weakly, what has taken the place of which parameter."""

    def __init__(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        self._params = list(params)
        self._names = list(names)
        self._index = {id(param): index for index, param in enumerate(self._params)}
        self._replacements: dict[int, weakref.ref[Parameter]] = {}
        # The hook is global: it must not keep the watch, and with it every parameter, alive.
        watch = weakref.ref(self)

        def notice(module: Module, name: str, new: Parameter | None) -> None:
            self_or_none = watch()
            if self_or_none is not None:
                self_or_none._notice(module, name, new)

        handle = register_module_parameter_registration_hook(notice)
        weakref.finalize(self, handle.remove)

    def _notice(self, module: Module, name: str, new: Parameter | None) -> None:
        index = self._index.get(id(registered_parameter(module, name)))
        if index is not None and new is not None and id(new) not in self._index:
            self._replacements[index] = weakref.ref(new)

    def check(self) -> None:
        """Raise if gradients go to a replacement instead of the parameter this optimizer steps."""
        for index, reference in self._replacements.items():
            new = reference()
            if new is not None and new.grad is not None and self._params[index].grad is None:
                raise RuntimeError(
                    f"parameter {self._names[index]!r} was replaced in its module by a new tensor (as "
                    "load_state_dict(assign=True) does), so this optimizer steps one that the model no longer uses; "
                    "construct the optimizer (and DDP) after replacing parameters"
                )
