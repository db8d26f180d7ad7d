"""``optimizer.state``: the state of the shards that this rank owns, which the inner optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch.optim import Optimizer

from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer


class OwnedState(MutableMapping[Any, Any]):
    """This rank's optimizer state, with parameters as keys. The inner optimizer may have views or copies as keys.

    Like the ``state`` of a plain optimizer, it has an empty dict for a parameter without state. A parameter that
    another rank owns has no state here. Keys that are not tensors are kept as they are.
    """

    def __init__(self, get_inner: Callable[[], InnerOptimizer]) -> None:
        self._get_inner = get_inner

    @property
    def _inner(self) -> InnerOptimizer:
        return self._get_inner()

    def __getitem__(self, param: Any) -> Any:
        key = self._inner.state_key(param)
        return {} if key is None else self._inner.optim.state[key]

    def __setitem__(self, param: Any, value: Any) -> None:
        key = self._inner.state_key(param)
        if key is None:
            raise KeyError(
                f"rank {self._inner.group_rank} owns nothing of this parameter; its state is on another rank"
            )
        self._inner.optim.state[key] = value
        self._inner.note_edited()

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError(f"rank {self._inner.group_rank} has no state under this key")
        del self._inner.optim.state[self._inner.state_key(param)]
        self._inner.note_edited()

    def get(self, param: Any, default: Any = None) -> Any:
        """This rank's state of a parameter, or ``default`` if it has none."""
        return self[param] if param in self else default  # noqa: SIM401 - that would call this method

    def pop(self, param: Any, *default: Any) -> Any:
        """Remove the state of a parameter and return it."""
        if param not in self and default:
            return default[0]
        value = self.get(param)
        del self[param]
        return value

    def setdefault(self, param: Any, default: Any = None) -> Any:
        """The state of a parameter, after setting it to ``default`` if there is none."""
        if param not in self:
            self[param] = default
        return self[param]

    def __contains__(self, param: object) -> bool:
        return self._inner.state_key(param) in self._inner.optim.state

    def __iter__(self) -> Iterator[Any]:
        state = self._inner.optim.state
        params = [param for param, tensor in self._inner.tensor_of.items() if tensor in state]
        return iter([*params, *self._inner.other_state()])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


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
