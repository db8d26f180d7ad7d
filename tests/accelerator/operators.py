"""Queues every operator on the current stream: outputs are allocated at once, the operator runs on the CPU later."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.accelerator import counters
from tests.accelerator.races import runs
from tests.accelerator.scheduler import Scheduler

BATCHED = ("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_foreach_")
"""Operators that torch would divide into one call per tensor for a device that has not registered them."""

WRITE_ONLY = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"}
WRITE_ONLY |= {"_foreach_zero_", "_foreach_copy_", "log_normal_", "cauchy_", "geometric_", "trunc_normal_"}
"""Operators whose argument that is written is not read before."""


WHOLE = {"native_layer_norm", "native_group_norm"}
"""Operators with a kernel of their own on the CPU that torch would otherwise divide into others."""


class Schema(NamedTuple):
    """What an operator does with its arguments."""

    name: str  # without namespace and overload
    names: list[str]  # of all arguments, in order
    written: list[str]  # names of the arguments that it writes
    out: bool  # whether arguments are given their shape by it
    returns: list[str | None]  # per result the name of the argument that it is, or None for a new tensor
    reads_data: bool  # whether the host must wait, because the shape or value of the result depends on data
    random: bool  # whether it draws random numbers


@functools.cache
def schema_of(op: Any) -> Schema:
    """Read an operator's schema."""
    schema = op._schema
    written = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    aliased = [result.alias_info and result.alias_info.before_set for result in schema.returns]
    return Schema(
        schema.name.partition("::")[2],
        [argument.name for argument in schema.arguments],
        list(written),
        any(argument.is_out for argument in schema.arguments),
        [next((n for n, info in written.items() if same and info.before_set == same), None) for same in aliased],
        torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags,
        torch.Tag.nondeterministic_seeded in op.tags,
    )


def call(op: Any, inputs: dict[str, Any], seed: int = 0) -> list[Any]:
    """Run an operator on the CPU and return its results; random numbers follow the seed."""
    schema = schema_of(op)
    with torch.no_grad(), torch.random.fork_rng(devices=(), enabled=schema.random):
        if schema.random:
            torch.default_generator.manual_seed(seed)
        results = op(**inputs)
    return [results] if len(schema.returns) == 1 else list(results or ())


def _is_sim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _map(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Replace tensors in nested arguments, and devices by the CPU."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, (list, tuple)):
        return type(value)([_map(each, change) for each in value]) if value else value
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _has_mask(kwargs: dict[str, Any]) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(kwargs["indices"]))


def _key(value: Any) -> Any:
    """Return a hashable description of arguments from which the shapes of the results follow."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple([_key(each) for each in value])
    return (type(value), value) if value.__hash__ is not None else repr(value)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def shadow(tensor: Tensor) -> tuple[int, Any]:
    """Return the base address of a tensor's memory and the ranges that it covers."""
    ranges = runs(tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.element_size())
    return tensor.untyped_storage().data_ptr(), ranges


class Operators:
    """The kernels of the simulated device."""

    def __init__(self, core: Any, scheduler: Scheduler) -> None:
        self.core, self.scheduler = core, scheduler
        self._shapes: dict[Any, tuple[list[Any], list[tuple[str, torch.Size]]]] = {}
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(self.queue, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("_copy_from", self.copy, "PrivateUse1")
        aten.impl("_copy_from_and_resize", self._copy_and_resize, "PrivateUse1")
        aten.impl("_local_scalar_dense", self._item, "PrivateUse1")
        for full in torch._C._dispatch_get_all_op_names():
            name, _, overload = full.removeprefix("aten::").partition(".")
            if full.startswith("aten::") and (name.startswith(BATCHED) or name in WHOLE):
                op = getattr(getattr(torch.ops.aten, name), overload or "default")
                aten.impl(full.removeprefix("aten::"), functools.partial(self.queue, op), "PrivateUse1")
        self._libraries = everything, aten  # while they live, torch calls this class for every operator on the device

    # Any operator

    def queue(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate the results of an operator and queue it."""
        schema = schema_of(op)
        kwargs = {**dict(zip(schema.names, args, strict=False)), **kwargs}
        generator = kwargs.pop("generator", None)
        if schema.name == "_foreach_copy_" and not all(map(_is_sim, [*kwargs["self"], *kwargs["src"]])):
            for to, source in zip(kwargs["self"], kwargs["src"], strict=True):
                to.copy_(source, kwargs.get("non_blocking", False))
            return None
        if schema.reads_data:
            return self._run_now(op, schema, kwargs)
        results = self._allocate(op, schema, kwargs)
        where = counters.site()
        if schema.name == "_index_put_impl_" and _has_mask(kwargs):
            self.scheduler.wait_for("index_put_ with a mask", self.core.current_stream())
        never_read = schema.written if schema.out or schema.name in WRITE_ONLY else ()
        read = [value for name, value in kwargs.items() if name not in never_read]
        reads = [tensor for tensor in _tensors(read) if _is_sim(tensor)]
        written = _tensors([kwargs.get(name) for name in schema.written])
        fresh = _tensors([result for name, result in zip(schema.returns, results, strict=True) if name is None])
        run = self._prepare(op, schema, kwargs, [self.core.alias(tensor) for tensor in fresh], generator)
        longest = max((len(value) for value in kwargs.values() if isinstance(value, list)), default=0)
        self.scheduler.step.kernel(schema.name, where, longest)
        writes = [*written, *fresh]
        shape = next((list(tensor.shape) for tensor in (*fresh, *written, *reads)), "")
        self.scheduler.enqueue(schema.name, run, map(shadow, reads), map(shadow, writes), where=where, shape=shape)
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _allocate(self, op: Any, schema: Schema, kwargs: dict[str, Any]) -> list[Any]:
        """Return the results: arguments that are written, and new tensors on the device."""
        # The size of a result by a mask is known already: torch has asked for the mask's nonzero elements.
        if None not in schema.returns and (not schema.out or (schema.name == "index" and _has_mask(kwargs))):
            return [kwargs[name] for name in schema.returns if name]
        key = (op, tuple([(name, _key(value)) for name, value in kwargs.items()]))
        if key not in self._shapes:  # which zeros on the CPU tell
            zeros = {name: _map(value, lambda tensor: _like(tensor, "cpu").zero_()) for name, value in kwargs.items()}
            described = _map(call(op, zeros), functools.partial(_like, device="meta"))
            sizes = [(name, zeros[name].shape) for name in schema.written if isinstance(zeros.get(name), Tensor)]
            self._shapes[key] = described, sizes
        described, sizes = self._shapes[key]
        for name, size in sizes:
            if kwargs[name].shape != size:
                kwargs[name].resize_(size)
        both = zip(schema.returns, described, strict=True)
        return [
            _map(new, functools.partial(_like, device="sim")) if name is None else kwargs[name] for name, new in both
        ]

    def _prepare(
        self, op: Any, schema: Schema, kwargs: dict[str, Any], fresh: list[Tensor], generator: torch.Generator | None
    ) -> Callable[[], None]:
        """Return a function that runs an operator on the CPU and writes its new results."""

        def on_cpu(tensor: Tensor) -> Tensor:
            if not _is_sim(tensor) and (tensor.numel() != 1 or tensor.dim() > 0):
                raise RuntimeError(f"{schema.name}: expected all tensors on sim, but found one on {tensor.device}")
            return self._alias(tensor) if _is_sim(tensor) else tensor.clone()

        inputs, seed = {name: _map(value, on_cpu) for name, value in kwargs.items()}, 0
        if schema.random:
            seed = self.core.draw(generator or self.core.default_generator(self.core.current_device()))

        def run() -> None:
            results = call(op, inputs, seed)
            if fresh:
                new = [result for name, result in zip(schema.returns, results, strict=True) if name is None]
                for to, source in zip(fresh, _tensors(new), strict=True):
                    to.copy_(source)

        return run

    def _alias(self, tensor: Tensor) -> Tensor:
        alias: Tensor = self.core.alias(tensor) if _is_sim(tensor) else tensor
        return alias

    # Operators after which the host knows data

    def _wait_for(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Let the host wait for what an operator reads."""
        self.scheduler.enqueue(name, lambda: None, map(shadow, tensors))
        self.scheduler.wait_for(name, self.core.current_stream())

    def _run_now(self, op: Any, schema: Schema, kwargs: dict[str, Any]) -> Any:
        """Run an operator whose result depends on data."""
        self.scheduler.step.kernel(schema.name, counters.site())
        self._wait_for(schema.name, filter(_is_sim, _tensors(list(kwargs.values()))))
        results = call(op, {name: _map(value, self._alias) for name, value in kwargs.items()})

        def back(tensor: Tensor) -> Tensor:
            made = _like(tensor, "sim")
            alias = self.core.alias(made)
            self.scheduler.enqueue(schema.name, lambda: alias.copy_(tensor), (), [shadow(made)])
            return made

        results = _map(results, back)
        return results[0] if len(results) == 1 else tuple(results)

    def _item(self, tensor: Tensor) -> Any:
        self._wait_for("item", [tensor])
        return self.core.alias(tensor).item()

    # Copies

    def copy(self, source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between host and device, or on the device.

        A copy from or to pinned memory that need not block runs later and reads or writes the host's memory then.
        """
        if source.numel() == 0 and to.numel() == 0:
            return to
        where, shape, step = counters.site(), list(to.shape), self.scheduler.step
        reads, writes = ([shadow(tensor)] if _is_sim(tensor) else [] for tensor in (source, to))
        target, origin = (self._alias(tensor if _is_sim(tensor) else tensor.detach()) for tensor in (to, source))
        if reads and writes:
            step.kernel("copy_", where)
            self.scheduler.enqueue("copy_", lambda: target.copy_(origin), reads, writes, shape=shape, where=where)
            return to
        host, direction = (to, "device to host") if reads else (source, "host to device")
        pinned = host.is_pinned()
        step.copies[f"{direction}, {'pinned' if pinned else 'pageable'}", where] += 1
        if reads and pinned and to.is_contiguous():
            # Nobody may read it before the copy has run: what is there until then is no one's data.
            self.core.poison(to.data_ptr(), to.nbytes)
        before = _bytes(origin) if writes else b""

        def run() -> None:
            if writes and before != _bytes(origin):
                text = f"the pinned memory of the copy{shape} at {where} was changed before the copy ran"
                self.scheduler.races.report("pinned source", text)
            target.copy_(origin)

        self.scheduler.enqueue(f"copy {direction}", run, reads, writes, shape=shape, where=where)
        if not (pinned and non_blocking):
            self.scheduler.wait_for("blocking copy" if pinned else "pageable copy", self.core.current_stream())
        return to

    def _copy_and_resize(self, source: Tensor, to: Tensor) -> Tensor:
        if to.shape != source.shape:
            to.resize_(source.shape)
        return self.copy(source, to)
