"""``optimizer.state``: the state of the shards that this rank owns, which the inner optimizer keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from torch.optim import Optimizer

from onecopy.layout import Layout
from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.memory_report import MemoryReport, memory_report


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


class OwnedStateOptimizer(Optimizer):
    """An optimizer whose ``state`` reads and writes the inner optimizer's state by parameter.

    Attributes:
        engine: runs the phases of a step; hooks and extensions use it.
        initialized: True after construction.
    """

    engine: Engine
    initialized: bool
    _shown_state: Any

    @property
    def optim(self) -> Optimizer:
        """This rank's instance of the optimizer class."""
        return self.engine.inner.optim

    @property
    def layout(self) -> Layout:
        """The owner of every range of every parameter; print it for a table."""
        return self.engine.layout

    @property
    def state(self) -> Any:
        """The state of this rank's shards by parameter.

        Assigning a mapping replaces the state. The values describe this rank's shards, as ``state`` shows them. Entries
        for parameters that other ranks own are ignored.
        """
        return self._shown_state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Replace the state of this rank's shards."""
        if self.initialized:
            self.engine.inner.replace_state(value)
        else:
            self._shown_state = value  # torch's constructor assigns it before the inner optimizer exists

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters.

        Args:
            set_to_none: set gradients to None instead of zero.
        """
        self.engine.gradients.on_zero()
        super().zero_grad(set_to_none)

    def refresh_master_weights(self) -> None:
        """Copy values that were written into the parameters into this rank's master weights.

        ``step()`` does this by itself, except after a write that leaves no trace in autograd's version counter, such as
        one through ``param.data``. Call this method after such a write, on every rank. An element whose parameter still
        is the rounded master weight keeps the precision of the master weight.
        """
        self.engine.inner.refresh_master_weights()

    def memory_report(self) -> MemoryReport:
        """Return the bytes of this rank's tensors by kind, beside those of plain DDP. Print it for a table.

        Call it after the first step and before ``zero_grad()``, on any rank: it does not communicate. Only the
        parameters of this optimizer are counted. The buckets of gradients that DDP has without
        ``gradient_as_bucket_view=True`` are not.
        """
        return memory_report(self.engine)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set attributes from a dict; an entry ``state`` replaces this rank's state."""
        super().__setstate__({key: value for key, value in state.items() if key != "state"})
        if "state" in state:
            self.state = state["state"]

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be pickled or deep-copied."""
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be pickled or deep-copied: it belongs to a process group and has only "
            "the state of this rank's shards; save its state_dict(), and construct a new one"
        )

    @property
    def _overlap_with_ddp(self) -> NoReturn:
        """Refuse torch's overlap hooks, which read this attribute first and need methods of torch's own class."""
        raise ValueError(
            "torch's hooks work with torch's class only: use onecopy.hook_with_zero_step or "
            "onecopy.hook_with_zero_step_interleaved with a onecopy.ZeroRedundancyOptimizer"
        )


def optimizer_list(optimizers: Any) -> list[Any]:
    """Return one optimizer, or a list or tuple of optimizers, as a list."""
    return list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]


def engine_of(optimizer: Any) -> Engine:
    """Return the engine of a ``ZeroRedundancyOptimizer``; raise a TypeError for any other object."""
    engine = getattr(optimizer, "engine", None)
    if not isinstance(engine, Engine):
        raise TypeError(
            f"this call takes a onecopy.ZeroRedundancyOptimizer, got {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}. Wrap the class of a plain optimizer: ZeroRedundancyOptimizer(params, "
            "AdamW, ...). reduce_scatter_hook and clip_grad_norm_ take one or a list, an overlap hook takes one"
        )
    return engine
