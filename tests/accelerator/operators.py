"""Queues every operator on the current stream: outputs are allocated at once, the operator runs on the CPU later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Schema:
    """What an operator does with its arguments."""

    name: str  # without namespace and overload
    names: tuple[str, ...]  # of all arguments, in order
    written: frozenset[str]  # names of the arguments that it writes
    out: bool  # whether arguments are given their shape by it
    write_only: bool  # whether what it writes is never read before
    returns: tuple[str | None, ...]  # per result the name of the argument that it is, or None for a new tensor
    reads_data: bool  # whether the host must wait, because the shape or value of the result depends on data
    random: bool  # whether it draws random numbers


@functools.cache
def schema_of(op: Any) -> Schema:
    """Read an operator's schema."""
    schema = op._schema
    name = schema.name.partition("::")[2]
    written = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    aliased = [result.alias_info and result.alias_info.before_set for result in schema.returns]
    returns = [next((n for n, info in written.items() if same and info.before_set == same), None) for same in aliased]
    out = any(a.is_out for a in schema.arguments)
    return Schema(
        name,
        tuple(a.name for a in schema.arguments),
        frozenset(written),
        out,
        out or name in WRITE_ONLY,
        tuple(returns),
        torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags,
        torch.Tag.nondeterministic_seeded in op.tags,
    )


def _is_sim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def _map(value: Any, change: Callable[[Tensor], Any], device: str) -> Any:
    """Replace tensors and devices in nested arguments."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, torch.device):
        return torch.device(device)
    if isinstance(value, (list, tuple)):
        return type(value)([_map(each, change, device) for each in value]) if value else value
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
        self._shapes: dict[Any, tuple[Any, list[tuple[str, tuple[int, ...]]]]] = {}
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(self.queue, "PrivateUse1")
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("_copy_from", self.copy, "PrivateUse1")
        aten.impl("_copy_from_and_resize", self._copy_and_resize, "PrivateUse1")
        aten.impl("_local_scalar_dense", self._item, "PrivateUse1")
        aten.impl("equal", self._equal, "PrivateUse1")
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
        reads = [
            t
            for name, value in kwargs.items()
            for t in _tensors(value)
            if _is_sim(t) and not (schema.write_only and name in schema.written)
        ]
        written = [t for name in schema.written for t in _tensors(kwargs.get(name))]
        fresh = [
            t for name, result in zip(schema.returns, results, strict=True) if name is None for t in _tensors(result)
        ]
        run = self._prepare(op, schema, kwargs, [self.core.alias(t) for t in fresh])
        longest = max((len(value) for value in kwargs.values() if isinstance(value, list)), default=0)
        self.scheduler.step.kernel(schema.name, where, longest)
        writes = [*written, *fresh]
        shape = next((list(t.shape) for t in (*fresh, *written, *reads)), "")
        self.scheduler.enqueue(schema.name, run, map(shadow, reads), map(shadow, writes), where=where, shape=shape)
        return results[0] if len(results) == 1 else tuple(results) if results else None

    def _allocate(self, op: Any, schema: Schema, kwargs: dict[str, Any]) -> list[Any]:
        """Return the results: arguments that are written, and new tensors on the device."""
        # The size of a result by a mask is known already: torch has asked for the mask's nonzero elements.
        if None not in schema.returns and (not schema.out or (schema.name == "index" and _has_mask(kwargs))):
            return [kwargs[name] for name in schema.returns if name]
        key = (op, tuple([(name, _key(value)) for name, value in kwargs.items() if name != "generator"]))
        if key not in self._shapes:
            self._shapes[key] = self._infer(op, schema, kwargs)
        described, sizes = self._shapes[key]
        for name, size in sizes:
            if kwargs[name].shape != size:
                kwargs[name].resize_(size)
        return [
            kwargs[name] if name is not None else _map(new, self._empty, "sim")
            for name, new in zip(schema.returns, described, strict=True)
        ]

    @staticmethod
    def _empty(meta: Tensor) -> Tensor:
        return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device="sim")

    @staticmethod
    def _infer(op: Any, schema: Schema, kwargs: dict[str, Any]) -> tuple[list[Any], list[tuple[str, tuple[int, ...]]]]:
        """Find out shapes without data: with meta tensors, or with zeros where an operator has no meta kernel."""

        def on(device: str, tensor: Tensor) -> Tensor:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            return made if device == "meta" else made.zero_()

        # The statistics of norms have another type in meta kernels than on the CPU.
        for device in ("cpu",) if schema.name in WHOLE else ("meta", "cpu"):
            given = {name: value for name, value in kwargs.items() if name != "generator"}
            inputs = {name: _map(value, functools.partial(on, device), device) for name, value in given.items()}
            try:
                results = op(**inputs)
            except Exception:
                if device == "cpu":
                    raise
                continue
            results = list(results) if len(schema.returns) != 1 else [results]
            results = [_map(r, lambda t: t if t.device.type == "meta" else on("meta", t), "meta") for r in results]
            out = [(n, tuple(inputs[n].shape)) for n in schema.written if isinstance(inputs.get(n), Tensor)]
            return results, out
        raise AssertionError

    def _prepare(self, op: Any, schema: Schema, kwargs: dict[str, Any], fresh: list[Tensor]) -> Callable[[], None]:
        """Return a function that runs an operator on the CPU and writes its new results."""

        def on_cpu(tensor: Tensor) -> Tensor:
            if tensor.device.type == "sim":
                return self.core.alias(tensor)  # type: ignore[no-any-return]
            if tensor.numel() != 1 or tensor.dim() > 0:
                raise RuntimeError(f"{schema.name}: expected all tensors on sim, but found one on {tensor.device}")
            return tensor.clone()

        inputs = {name: _map(value, on_cpu, "cpu") for name, value in kwargs.items() if name != "generator"}
        seed = self._seed(kwargs.get("generator")) if schema.random else None

        def run() -> None:
            with torch.no_grad():
                if seed is None:
                    results = op(**inputs)
                elif "generator" in schema.names:
                    results = op(**inputs, generator=torch.Generator().manual_seed(seed))
                else:
                    with torch.random.fork_rng(devices=()):
                        torch.default_generator.manual_seed(seed)
                        results = op(**inputs)
                if fresh:
                    results = list(results) if len(schema.returns) != 1 else [results]
                    new = [r for name, r in zip(schema.returns, results, strict=True) if name is None]
                    for to, source in zip(fresh, _tensors(new), strict=True):
                        to.copy_(source)

        return run

    def _seed(self, generator: torch.Generator | None) -> int:
        chosen = generator if generator is not None else self.core.default_generator(self.core.current_device())
        seed: int = self.core.draw(chosen)
        return seed

    # Operators after which the host knows data

    def _wait_for(self, name: str, *tensors: Tensor) -> None:
        """Let the host wait for what an operator reads."""
        self.scheduler.enqueue(name, lambda: None, [shadow(tensor) for tensor in tensors])
        self.scheduler.wait_for(name, self.core.current_stream())

    def _run_now(self, op: Any, schema: Schema, kwargs: dict[str, Any]) -> Any:
        """Run an operator whose result depends on data."""
        self.scheduler.step.kernel(schema.name, counters.site())
        self._wait_for(schema.name, *(t for value in kwargs.values() for t in _tensors(value) if _is_sim(t)))
        with torch.no_grad():
            result = op(**{name: _map(value, self._alias, "cpu") for name, value in kwargs.items()})

        def back(tensor: Tensor) -> Tensor:
            made = self._empty(tensor)
            alias = self.core.alias(made)
            self.scheduler.enqueue(schema.name, lambda: alias.copy_(tensor), (), [shadow(made)])
            return made

        return _map(result, back, "sim")

    def _alias(self, tensor: Tensor) -> Tensor:
        alias: Tensor = self.core.alias(tensor) if _is_sim(tensor) else tensor
        return alias

    def _item(self, tensor: Tensor) -> Any:
        self._wait_for("item", tensor)
        return self.core.alias(tensor).item()

    def _equal(self, left: Tensor, right: Tensor) -> bool:
        self.scheduler.step.kernel("equal", counters.site())
        self._wait_for("equal", left, right)
        return torch.equal(self.core.alias(left), self.core.alias(right))

    # Copies

    def copy(self, source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy between host and device, or on the device.

        A copy from or to pinned memory that need not block runs later and reads or writes the host's memory then.
        """
        if source.numel() == 0 and to.numel() == 0:
            return to
        where = counters.site()
        if _is_sim(source) and _is_sim(to):
            self.scheduler.step.kernel("copy_", where)
            left, right = self.core.alias(to), self.core.alias(source)
            self.scheduler.enqueue(
                "copy_", lambda: left.copy_(right), [shadow(source)], [shadow(to)], shape=list(to.shape), where=where
            )
            return to
        host = to if _is_sim(source) else source
        pinned, shape = host.is_pinned(), list(to.shape)
        direction = "device to host" if _is_sim(source) else "host to device"
        self.scheduler.step.copies[f"{direction}, {'pinned' if pinned else 'pageable'}", where] += 1
        late = pinned and non_blocking
        if _is_sim(source):
            run = self._to_host(source, to)
            self.scheduler.enqueue("copy to host", run, [shadow(source)], shape=shape, where=where)
        else:
            run = self._to_device(source, to, f"copy{shape} at {where}")
            self.scheduler.enqueue("copy to device", run, (), [shadow(to)], shape=shape, where=where)
        if not late:
            self.scheduler.wait_for("blocking copy" if pinned else "pageable copy", self.core.current_stream())
        return to

    def _to_host(self, source: Tensor, to: Tensor) -> Callable[[], Any]:
        alias, to = self.core.alias(source), to.detach()
        if to.is_pinned() and to.is_contiguous():
            # Nobody may read it before the copy has run: what is there until then is no one's data.
            self.core.poison(to.data_ptr(), to.nbytes)
        return lambda: to.copy_(alias)

    def _to_device(self, source: Tensor, to: Tensor, about: str) -> Callable[[], Any]:
        alias, source, before = self.core.alias(to), source.detach(), _bytes(source.detach())

        def run() -> None:
            if before != _bytes(source):
                text = f"the pinned memory of the {about} was changed before the copy ran"
                self.scheduler.races.report("pinned source", text)
            alias.copy_(source)

        return run

    def _copy_and_resize(self, source: Tensor, to: Tensor) -> Tensor:
        if to.shape != source.shape:
            to.resize_(source.shape)
        return self.copy(source, to)
