"""Every use of a torch name that is not public, or that torch has renamed; each function says what it wraps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Joinable
from torch.nn import Module
from torch.optim import Optimizer

P = ParamSpec("P")
R = TypeVar("R")
_NO_RANGE = contextlib.nullcontext()


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_single(*args: Any, **kwargs: Any) -> Any:
    """Call ``torch.distributed.all_gather_single``, which has another name before torch 2.13."""
    return _all_gather(*args, **kwargs)


def reduce_scatter_single(*args: Any, **kwargs: Any) -> Any:
    """Call ``torch.distributed.reduce_scatter_single``, which has another name before torch 2.13."""
    return _reduce_scatter(*args, **kwargs)


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return ``optimizer.step`` with the optimizer's own step hooks but without torch's global step hooks.

    The global hooks run for the sharded optimizer already. torch wraps ``step`` of an optimizer's class when the first
    instance is constructed (``Optimizer.profile_hook_step``), and marks the wrapper with ``hooked``.
    """
    function = type(optimizer).step
    if not getattr(function, "hooked", False):
        return optimizer.step
    unhooked = function.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(unhooked)
    def step(**kwargs: Any) -> Any:
        args: tuple[Any, ...] = (optimizer,)
        for pre_hook in optimizer._optimizer_step_pre_hooks.values():
            result = pre_hook(optimizer, args, kwargs)
            if result is not None:
                args, kwargs = result
        loss = unhooked(*args, **kwargs)
        for post_hook in optimizer._optimizer_step_post_hooks.values():
            post_hook(optimizer, args, kwargs)
        return loss

    return step


def not_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that runs as it is inside a compiled caller; functions that it calls may be compiled.

    ``torch.compiler.disable`` does the same, but imports the compiler at once, and not at the first call.
    """
    wrapped: Callable[P, R] = _disable_dynamo(function)
    return wrapped


def run_load_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run the hooks of ``Optimizer.register_load_state_dict_pre_hook`` and return the state dict to load."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    return state_dict


def run_load_post_hooks(optimizer: Optimizer) -> None:
    """Run the hooks of ``Optimizer.register_load_state_dict_post_hook``."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def buffers_of(module: Module) -> list[Tensor]:
    """Return the buffers that ``module.buffers()`` yields, faster.

    Every forward pass needs them, and the nested generators of ``module.buffers()`` take too long for that.
    """
    found: dict[int, Tensor] = {}
    seen = set()
    to_visit = [module]
    while to_visit:
        visited = to_visit.pop()
        if visited not in seen:
            seen.add(visited)
            found.update((id(buffer), buffer) for buffer in visited._buffers.values() if buffer is not None)
            to_visit += [child for child in reversed(visited._modules.values()) if child is not None]
    return list(found.values())


# Several tensors in one call: set to zero, multiplied in place by a factor, interpolated in place towards others.

zero_each = torch._foreach_zero_
multiply_each = torch._foreach_mul_
interpolate_each = torch._foreach_lerp_


def interpolated(tensors: list[Tensor], ends: list[Tensor], weight: float) -> list[Tensor]:
    """The interpolation of each of several tensors towards another one, in one call."""
    return list(torch._foreach_lerp(tensors, ends, weight))


def add_to_each(tensors: list[Tensor], others: Sequence[Tensor], factor: float) -> None:
    """Add ``factor`` times another tensor to each of several tensors, in one call."""
    torch._foreach_add_(tensors, list(others), alpha=factor)


def norms_of_each(tensors: list[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each of several tensors of one data type, in one call."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def sparse_parts(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row numbers and the rows of an uncoalesced sparse gradient of an embedding.

    ``Tensor.indices()`` and ``Tensor.values()`` refuse an uncoalesced tensor. A row number may occur several times.
    """
    return gradient._indices()[0], gradient._values()


def in_backward() -> bool:
    """Return whether autograd is running a backward pass in the calling thread."""
    return backward_number() != -1


def profile_range(name: str) -> contextlib.AbstractContextManager[object]:
    """Return a context manager that shows its block under a name in torch's profiler; almost free while none runs."""
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else _NO_RANGE


def profiled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that shows every call of a function under a name in torch's profiler."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with profile_range(name):
                return function(*args, **kwargs)

        return run

    return decorate


backward_number: Callable[[], int] = torch._C._current_graph_task_id
"""Returns autograd's number of the backward pass in the calling thread, or -1 if there is none."""


def will_accumulate(node: Any) -> bool:
    """Return whether autograd will run this ``AccumulateGrad`` node in the current backward pass."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch raises if torch.autograd.grad() was called for this leaf
        return False


def accumulates_into_leaves(nodes: Iterable[Any]) -> bool:
    """Return whether autograd's current pass accumulates gradients into leaves that these graph nodes depend on.

    ``backward()`` does. ``torch.autograd.grad()`` does not.
    """
    to_visit, seen = list(nodes), set()
    while to_visit:
        node = to_visit.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            if will_accumulate(node):
                return True
        else:
            to_visit += [each for each, _ in node.next_functions if each is not None]
    return False


def when_backward_ends(function: Callable[[], None]) -> None:
    """Queue a callback in autograd that runs when the current backward pass has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def after_backward(function: Callable[[], None]) -> None:
    """Queue a callback in autograd that runs after DDP has copied reduced gradients into ``.grad``.

    DDP queues its own callback when it launches the last bucket, which is after the communication hook that calls this
    function. So ``function`` is queued from inside a callback, which puts it behind DDP's.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def is_managed_by_fsdp(tensor: Tensor) -> bool:
    """Return whether a parameter is FSDP1's ``FlatParameter`` or has been flattened into one."""
    return type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_fsdp_flattened", False)


def version_of(tensor: Tensor) -> int:
    """Return autograd's version counter of a tensor, which counts changes in place."""
    return tensor._version


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of the process group's backend for a device."""
    timeout: timedelta = process_group._get_backend(device).options._timeout
    return timeout


def in_join_context(joinable: Joinable) -> bool:
    """Return whether a ``Joinable`` was last entered into a ``Join`` context with ``enable=True``."""
    return bool(joinable._join_config.enable)


def accumulates(model: object) -> bool:
    """Return whether the last pass of a DDP model ran under ``no_sync()``.

    On a rank that has joined, it is the last pass of the other ranks. DDP stores this in
    ``require_forward_param_sync``, so that its next forward pass sends no buffers.
    """
    return not getattr(model, "require_forward_param_sync", True)


def number_of_groups() -> int:
    """Return the number of process groups of this process, from which torch derives the next group's name."""
    return len(dist.distributed_c10d._world.pg_names)


def counts_calls() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG is DETAIL, with which torch counts calls and compares the counts."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


@functools.cache
def register_as_torch_zero(cls: type) -> None:
    """Register ``cls`` as a virtual subclass of torch's ``ZeroRedundancyOptimizer``, so that ``isinstance`` is true.

    Frameworks test for torch's class. Importing it compiles TorchScript and warns that this is deprecated. The user did
    not cause that warning, so it is suppressed. It is imported with this library: if a process group exists then, both
    modules keep it for ever, as the default of an argument, and the process cannot make another one at its address.
    """
    importlib.import_module("torch.distributed.nn.functional")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ZeroRedundancyOptimizer.register(cls)


aten = torch.ops.aten

ZEROING = (aten.zero_.default, aten._foreach_zero_.default)
SCALING = (
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
)
CHANGING_EACH_ELEMENT = (
    *SCALING,
    aten.clamp_.default,
    aten._foreach_clamp_min_.Scalar,
    aten._foreach_clamp_max_.Scalar,
    aten.nan_to_num_.default,
)
"""Operators that change a tensor in place and treat all elements alike."""

COPYING = aten.copy_.default
ADDING = aten.add_.Tensor
ALIASING = (aten.detach.default, aten.alias.default)
NEW_EMPTY = aten.new_empty.default
UNSCALING = aten._amp_foreach_non_finite_check_and_unscale_.default
NORM = aten.linalg_vector_norm.default
FOREACH_NORM = aten._foreach_norm.Scalar

no_torch_function = torch._C._disabled_torch_function_impl
"""The ``__torch_function__`` of tensor subclasses that only define ``__torch_dispatch__``."""

T = TypeVar("T", bound=Tensor)


def tensor_without_memory(cls: type[T], like: Tensor, device: torch.device | None = None) -> T:
    """Return an instance of a wrapper subclass of ``Tensor``, with shape, strides, data type and device but no data."""
    made: T = Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
    )
    return made


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module that was given to ``torch.compile``, or the module itself if it is not compiled."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module
