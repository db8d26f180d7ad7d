"""torch names that are not public, in one place."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


def bare_step(optimizer: Optimizer) -> Callable[..., Any]:
    """The optimizer's ``step`` with its own hooks but without the global ones, which fire for the wrapper already.

    Constructing an optimizer wraps its class's ``step`` to run hooks and marks the wrapper with ``hooked``.
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


def run_load_pre_hooks(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict to load after the registered hooks have seen it."""
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        result = hook(optimizer, state_dict)
        if result is not None:
            state_dict = result
    return state_dict


def run_load_post_hooks(optimizer: Optimizer) -> None:
    """Tell the registered hooks that a state dict has been loaded."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)


def buffers_of(module: Module) -> list[Tensor]:
    """What ``module.buffers()`` yields; asked in every forward pass, where that walk of nested generators costs."""
    found: dict[int, Tensor] = {}
    seen = set()
    waiting = [module]
    while waiting:
        here = waiting.pop()
        if here not in seen:
            seen.add(here)
            found.update((id(buffer), buffer) for buffer in here._buffers.values() if buffer is not None)
            waiting += [child for child in reversed(here._modules.values()) if child is not None]
    return list(found.values())


def norms_of_each(tensors: list[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each of several tensors of one data type, in one call."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def sparse_parts(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The row numbers of an embedding's sparse gradient, as they came and perhaps several times, and the rows."""
    return gradient._indices()[0], gradient._values()


def embedding_backward(gradient: Tensor, numbers: Tensor, count: int) -> Tensor:
    """A dense gradient of ``count`` rows from the rows that ``numbers`` says, as autograd makes it."""
    dense: Tensor = torch.ops.aten.embedding_dense_backward(gradient, numbers, count, -1, False)
    return dense


def in_backward() -> bool:
    """Whether the calling thread is running a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_profiling() -> bool:
    """Whether one of torch's profilers was started from Python (not from outside, or from C++)."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def backward_number() -> int:
    """Which backward pass the calling thread is running."""
    return torch._C._current_graph_task_id()


def will_accumulate(node: Any) -> bool:
    """Whether the running backward pass will run this node, an accumulator of gradients."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch refuses the question where torch.autograd.grad() asks for this very leaf
        return False


def accumulates_into_leaves(nodes: Iterable[Any]) -> bool:
    """Whether the running pass puts gradients into leaves behind these nodes, as ``backward()`` does.

    ``torch.autograd.grad()`` puts them into none.
    """
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            if will_accumulate(node):
                return True
        else:
            waiting += [each for each, _ in node.next_functions if each is not None]
    return False


def when_backward_ends(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward pass has computed all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` when the running backward pass ends, after DDP has put reduced gradients into ``.grad``.

    DDP queues its own callback when the last bucket is launched, after a hook that calls this; so this one queues the
    function from inside a callback, which puts it behind DDP's.
    """
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(function))


def is_managed_by_fsdp(tensor: Tensor) -> bool:
    """Whether a parameter is one that FSDP made, or one that it has flattened."""
    return type(tensor).__name__ == "FlatParameter" or getattr(tensor, "_fsdp_flattened", False)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place, as autograd counts it."""
    return tensor._version


def timeout_of(process_group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """How long the group's backend for a device waits for a collective."""
    timeout: timedelta = process_group._get_backend(device).options._timeout
    return timeout


def params_of_reducer(ddp: DistributedDataParallel) -> list[int]:
    """The identities of the parameters that DDP reduces, in its reducer's order."""
    params, _ = ddp._build_params_for_reducer()
    return [id(param) for param in params]


def locally_used(ddp: DistributedDataParallel, params: list[int]) -> set[int]:
    """Which of them this rank's last backward pass used, as DDP tells the other ranks."""
    used = ddp.reducer._get_local_used_map()
    return {param for param, flag in zip(params, used.tolist(), strict=True) if flag}


def in_join_context(joinable: Joinable) -> bool:
    """Whether a joinable was last entered into a join context that handles uneven inputs."""
    return bool(joinable._join_config.enable)


def joinables_of_caller() -> list[Joinable]:
    """What is in the join context that is being constructed, if a constructor of one is among the callers.

    Each joinable is asked for its hook there, and not told of the others.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is Join.__init__.__code__:
            return list(frame.f_locals["joinables"])
    return []


def accumulates(model: object) -> bool:
    """Whether the last pass of a model ran under ``no_sync()``; of a rank that has joined, the other ranks' last pass.

    DDP notes it so that its next forward pass sends no buffers.
    """
    return not getattr(model, "require_forward_param_sync", True)


def number_of_groups() -> int:
    """How many process groups this process is in, by which torch names the next one."""
    return len(dist.distributed_c10d._world.pg_names)


def counts_calls() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG=DETAIL is in force."""
    return bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def debug_enabled() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for more than the default."""
    return bool(dist.get_debug_level() != dist.DebugLevel.OFF)  # type: ignore[attr-defined]


@functools.cache
def register_as_torch_zero(cls: type) -> None:
    """Make ``isinstance(x, torch.distributed.optim.ZeroRedundancyOptimizer)`` true for ``cls``, as frameworks test.

    Importing torch's module compiles TorchScript and warns that this is deprecated, which is not the user's doing.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    ZeroRedundancyOptimizer.register(cls)


aten = torch.ops.aten

SCALING = (
    aten.zero_.default,
    aten._foreach_zero_.default,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten._foreach_mul_.Scalar,
    aten._foreach_mul_.Tensor,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten._foreach_div_.Scalar,
    aten._foreach_div_.Tensor,
)
"""Operations in place that treat all elements alike."""

ALIASING = (aten.detach.default, aten.alias.default)
NEW_EMPTY = aten.new_empty.default
UNSCALING = aten._amp_foreach_non_finite_check_and_unscale_.default
NORM = aten.linalg_vector_norm.default
FOREACH_NORM = aten._foreach_norm.Scalar

no_torch_function = torch._C._disabled_torch_function_impl
"""Says that a tensor subclass looks at operations only where they are dispatched."""

T = TypeVar("T", bound=Tensor)


def tensor_without_memory(cls: type[T], like: Tensor, device: torch.device | None = None) -> T:
    """An instance of a tensor subclass that has shape, strides, type and device, and nothing else."""
    made: T = Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device or like.device
    )
    return made


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module that ``torch.compile`` was given, or the module itself."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, torch.nn.Module) else module
