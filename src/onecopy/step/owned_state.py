"""The attribute ``state`` of an optimizer whose state is kept by another one, over what this rank owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from onecopy.step.engine import Engine


class OptimizerOverOwned(Optimizer):
    """An optimizer whose ``state`` shows, and takes, the state of the inner optimizer by parameter.

    Attributes:
        engine: the machinery of a step, for hooks and other extensions.
        initialized: True once constructed.
    """

    engine: Engine
    initialized: bool
    _shown_state: Any

    @property
    def state(self) -> Any:
        """This rank's state by parameter.

        Assigning a mapping replaces it. Its values are this rank's own, as ``state`` shows them; entries for parameters
        that other ranks own are left out.
        """
        return self._shown_state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Replace this rank's state."""
        if self.initialized:
            self.engine.inner.replace_state(value)
        else:
            self._shown_state = value  # torch's constructor assigns it before there is an inner optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over attributes; a ``state`` among them replaces this rank's state."""
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state:
            self.state = state["state"]
