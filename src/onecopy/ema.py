"""``ShardedEMA``: an exponential moving average of the parameters, of which each rank has its share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.agreement import Fact, FailTogether, FirstFailure
from onecopy.common.flat_views import flat_like, flat_view
from onecopy.common.nested_tensors import map_tensors
from onecopy.state_dict.shards import unwrapped
from onecopy.step.averages import PREFIX, STEPS, Average, AverageRule, Decay
from onecopy.step.engine import Engine, collectives_of
from onecopy.step.gradients import OwnedShard
from onecopy.step.owned_state import OwnedStateOptimizer, engine_of, optimizer_list

INSIDE = "the average of {!r} is in the parameters now: leave `with ema.swapped():` first"
"""The text of the error of a step, or of another average, inside :meth:`ShardedEMA.swapped`."""


class ShardedEMA:
    """An exponential moving average of a model's parameters, divided among the ranks like the optimizer state.

    Each rank averages only the shards that it owns, right after their update, so a step sends nothing more. If the
    optimizer has master weights, they are averaged. The values are those of ``torch.optim.swa_utils.AveragedModel``
    with ``get_ema_multi_avg_fn(decay)``, if it is updated after every step: the first average is a copy, and buffers
    are those of the model. Steps that are skipped are not averaged.

    All ranks make these calls together: constructing, :meth:`swapped`, :meth:`state_dict` and :meth:`load_state_dict`.
    Checkpoints of the optimizer carry the average: construct it before loading one. Otherwise it is dropped.

    Example::

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        ema = ShardedEMA(optimizer, model, decay=0.999)
        ...                         # train: optimizer.step() updates the average, too
        with ema.swapped():         # on all ranks
            evaluate(model)         # with the averages in place of the parameters

    Args:
        optimizer: a ``ZeroRedundancyOptimizer``, or a list of them. Construct ``ShardedDataParallel`` before.
        model: the model, wrapped or not. The optimizers have all of its trainable parameters.
        decay: the part of the old average that stays, or a function of the number of averages so far.
        dtype: the data type of the average, such as ``torch.float32`` for a model in bf16. By default it is that of the
            tensor which the optimizer steps.
        update_every: average after every so many steps.
        start_step: the number of steps before the first average. Until then the average is the parameter itself.
        name: tells several averages of one optimizer apart, also in checkpoints.
    """

    def __init__(
        self,
        optimizer: OwnedStateOptimizer | Sequence[OwnedStateOptimizer],
        model: nn.Module,
        decay: Decay = 0.999,
        dtype: torch.dtype | None = None,
        update_every: int = 1,
        start_step: int = 0,
        *,
        name: str = "ema",
    ) -> None:
        self.name = name
        self._optimizers = optimizer_list(optimizer)
        with FailTogether(collectives_of(self._optimizers), "constructing a ShardedEMA") as together:
            self._engines = [engine_of(each) for each in self._optimizers]
            self._module = unwrapped(model)
            _check_arguments(decay, dtype, update_every, start_step, name)
            _check_model(self._module, self._engines)
            if any(name in engine.inner.averages for engine in self._engines):
                raise ValueError(f"the optimizer has an average with the name {name!r} already: give another name=")
            shown = float(decay) if isinstance(decay, (int, float)) else "a function"
            values = {"decay": shown, "dtype": dtype, "update_every": update_every, "start_step": start_step}
            together.facts = [Fact(key, str(value)) for key, value in {**values, "name": name}.items()]
        for engine in self._engines:
            engine.inner.averages[name] = Average(AverageRule(decay, dtype, update_every, start_step))

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Put the average into the parameters on all ranks, and afterwards the parameters back, bit by bit.

        They come back if the block raises, too, once all ranks leave it. ``step()`` inside raises an error, and after a
        load inside the end of the block does.
        """
        first = self._engines[0].collectives
        with FailTogether(first, "ShardedEMA.swapped()"):
            for engine in self._engines:
                if engine.step_refusal is not None:
                    raise engine.step_refusal
                engine.follow_moved_params()
            saved = [[_owned_memory(entry).clone() for entry in engine.inner.owned] for engine in self._engines]
        for optimizer in self._optimizers:
            optimizer.wait()
        inside = RuntimeError(INSIDE.format(self.name))
        for engine in self._engines:
            engine.step_refusal = inside
        try:
            self._write([[self._value(engine, entry) for entry in engine.inner.owned] for engine in self._engines])
            yield
        finally:
            loaded = [engine for engine in self._engines if engine.step_refusal is not inside]
            for engine in self._engines:
                engine.step_refusal = None if engine.step_refusal is inside else engine.step_refusal
            self._write(saved)
            if loaded:
                raise RuntimeError(
                    "a state dict or a checkpoint was loaded inside `with ema.swapped():`, and the parameters are "
                    "those of before: load it again, outside"
                )

    def _value(self, engine: Engine, entry: OwnedShard) -> Tensor:
        """The average of one owned shard; the parameter itself before the first average."""
        average = engine.inner.averages[self.name].tensors.get(id(entry.tensor))
        return _owned_memory(entry) if average is None else average

    def _write(self, values: Sequence[Sequence[Tensor]]) -> None:
        """Write values into the owned shards and send them to all ranks. That is no user's write for master weights.

        Options of groups are neither compared nor taken over, because no optimizer runs.
        """
        for engine, of_engine in zip(self._engines, values, strict=True):
            failure = FirstFailure()
            with failure, torch.no_grad():
                for entry, value in zip(engine.inner.owned, of_engine, strict=True):
                    _owned_memory(entry).copy_(flat_view(value))
            engine.confirm([], [True] * len(engine.params), failure.error)
            engine.share()
            failure.raise_if_any()

    def state_dict(self, to: int = 0) -> dict[str, Any]:
        """Return the model's state dict with the averages in place of the parameters, in CPU memory, on one rank.

        Plain models load it. On the other ranks it is empty. To resume a training, save the optimizer's checkpoint,
        which has the averages with the precision that they have here, and reads on any number of ranks.

        Args:
            to: the group rank that receives it.
        """
        collectives = self._engines[0].collectives
        with FailTogether(collectives, "ShardedEMA.state_dict()", [Fact("target rank", str(to))]):
            if not isinstance(to, int) or not 0 <= to < collectives.world_size:
                raise ValueError(f"to must be a group rank from 0 to {collectives.world_size - 1}, got {to!r}")
        with self.swapped():
            if collectives.group_rank != to:
                return {}
            found: dict[str, Any] = map_tensors(
                dict(self._module.state_dict()), lambda value: value.detach().to("cpu", copy=True)
            )
            return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load averages in the form of the model's state dict, on all ranks, and go on from there.

        An ``AveragedModel`` adds the prefix ``module.`` and ``n_averaged``, the number of averages so far, which goes
        on here. Without it, the loaded values count as the first average. Buffers are not loaded: an average has the
        buffers of the model.

        Args:
            state_dict: the averages by name, the whole of it on every rank.
        """
        with FailTogether(self._engines[0].collectives, "ShardedEMA.load_state_dict()"):
            names = {id(param): name for name, param in self._module.named_parameters()}
            prefix = "" if all(name in state_dict for name in names.values()) else "module."
            missing = [name for name in names.values() if prefix + name not in state_dict]
            if missing:
                raise ValueError(f"the state dict has no average of parameter {missing[0]!r}")
            values = {key: state_dict[prefix + name] for key, name in names.items()}
            count = int(state_dict.get("n_averaged", 1))
            new = [self._loaded(engine, names, values, count) for engine in self._engines]
        for engine, average in zip(self._engines, new, strict=True):
            engine.inner.averages[self.name] = average
            engine.inner.note_edited()

    def _loaded(self, engine: Engine, names: Mapping[int, str], values: Mapping[int, Any], count: int) -> Average:
        average = engine.inner.averages[self.name]
        steps = average.rule.steps_after(count)
        saved = {}
        for entry in engine.inner.owned:
            value, name = values[id(entry.param)], names[id(entry.param)]
            if not isinstance(value, Tensor) or value.shape != entry.param.shape:
                raise ValueError(
                    f"the average of parameter {name!r} is not a tensor of shape {tuple(entry.param.shape)}"
                )
            owned = flat_like(value.detach().to(entry.param.device), entry.param)[entry.shard.start : entry.shard.stop]
            owned = owned.as_strided(entry.tensor.shape, entry.tensor.stride()) if not entry.is_cut else owned
            saved[entry.shard.param] = {PREFIX + self.name: owned, PREFIX + self.name + STEPS: steps}
        return average.loaded(self.name, saved, engine.inner.owned)


def _owned_memory(entry: OwnedShard) -> Tensor:
    """The memory of the parameter in the range that this rank owns."""
    return flat_view((entry.tensor if entry.param_view is None else entry.param_view).detach())


def _check_arguments(decay: Any, dtype: Any, update_every: Any, start_step: Any, name: Any) -> None:
    if not callable(decay) and not (isinstance(decay, (int, float)) and 0.0 <= decay <= 1.0):
        raise ValueError(
            f"decay must be a number from 0.0 to 1.0, or a function of the number of averages, got {decay!r}"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating point type such as torch.float32, got {dtype!r}")
    if not (isinstance(update_every, int) and update_every >= 1):
        raise ValueError(f"update_every must be a whole number of steps, at least 1, got {update_every!r}")
    if not (isinstance(start_step, int) and start_step >= 0):
        raise ValueError(f"start_step must be a whole number of steps, at least 0, got {start_step!r}")
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"name must be an identifier such as 'ema', got {name!r}")


def _check_model(module: nn.Module, engines: Sequence[Engine]) -> None:
    known = {id(param) for engine in engines for param in engine.params}
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in known:
            raise ValueError(f"parameter {name!r} of the model is in none of the optimizers: nothing averages it")
    ours = {id(param) for param in module.parameters()}
    for engine in engines:
        for tensor, spec in zip(engine.params, engine.layout.params, strict=True):
            if id(tensor) not in ours:
                raise ValueError(f"parameter {spec.name!r} of the optimizer is not a parameter of the model")
