"""``optimizer.state``: the state of the shards that this rank owns, which the inner optimizer keeps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from onecopy.common.nested_tensors import tensors_in
from onecopy.common.tensor_storages import storage_bytes
from onecopy.layout import Layout
from onecopy.planning.collectives import Way
from onecopy.planning.estimate import Machine, buffer_bytes
from onecopy.planning.memory_report import KINDS, MemoryReport, predicted_bytes
from onecopy.planning.model_shapes import Model
from onecopy.planning.optimizers import optimizer_of
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

        ``step()`` does this by itself, except on an accelerator after a write that leaves no trace in autograd's
        version counter, such as a write through ``param.data``. Call this method after such a write, on every rank. An
        element whose parameter still is the rounded master weight keeps the precision of the master weight.
        """
        self.engine.inner.refresh_master_weights()

    def memory_report(self) -> MemoryReport:
        """Return the predicted and the measured bytes of this rank's tensors, by kind. Print it for a table.

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


def measured_bytes(params: Iterable[Tensor], state: Any, masters: Iterable[Tensor] = ()) -> dict[str, int]:
    """Return the bytes of tensors that exist now, by kind. Tensors that share memory are counted once.

    Args:
        params: parameters; their gradients are measured, too.
        state: the optimizer's state by parameter.
        masters: copies of parameters that are updated in place of them.
    """
    params = list(params)
    gradients = [param.grad for param in params if param.grad is not None]
    kinds = (params, gradients, tensors_in(list(state.values())), masters)
    return dict(zip(KINDS, map(storage_bytes, kinds), strict=True))


def memory_report(engine: Engine) -> MemoryReport:
    """Return the predicted and the measured bytes of an optimizer's tensors on this rank, without communication."""
    layout, inner, collectives = engine.layout, engine.inner, engine.collectives
    planned = [optimizer_of(inner.optimizer_class, group) for group in inner.optim.param_groups]
    predict = functools.partial(
        predicted_bytes,
        layout,
        optimizer=planned[0] if all(each == planned[0] for each in planned) else None,
        stepped=[dtype for _, dtype in inner.master_policy.stepped_dtypes(layout.params)],
        copied=[inner.master_policy.applies_to(param) for param in engine.params],
        trained=[param.requires_grad for param in engine.params],
    )
    gradients = engine.gradients
    way = Way.REDUCE_SCATTER if gradients.is_reduce_scattered else Way.LEVEL_ONE
    way = Way.SHARDED if gradients.are_sharded else way
    pairwise = collectives.sends_in_place(engine.params[0].device)
    owned = layout.owned_by(collectives.group_rank)
    masters = [entry.tensor for entry in inner.owned if entry.param_view is not None]
    return MemoryReport(
        group_rank=collectives.group_rank,
        world_size=collectives.world_size,
        ddp=predict([(spec.index, spec.numel) for spec in layout.params], shards_gradients=False),
        predicted=predict(
            [(shard.param, shard.numel) for shard in owned], shards_gradients=gradients.have_own_memory()
        ),
        measured=measured_bytes(engine.params, inner.optim.state, masters),
        in_flight=buffer_bytes(way, Model(layout.params), Machine(collectives.world_size, 1.0, pairwise=pairwise)),
    )
