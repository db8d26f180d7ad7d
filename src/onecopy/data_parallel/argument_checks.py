"""Checks of the arguments of ``ShardedDataParallel``, and the facts about the module that all ranks compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.device_mesh import DeviceMesh

from onecopy.comm.agreement import Fact
from onecopy.comm.collectives import Collectives
from onecopy.data_parallel.mixed_precision import MixedPrecision
from onecopy.optimizer import ZeroRedundancyOptimizer


def check_optimizers(optimizers: Sequence[object], collectives: Collectives) -> None:
    """Raise unless all are :class:`ZeroRedundancyOptimizer` on the same process group."""
    if not optimizers:
        raise ValueError("ShardedDataParallel needs at least one optimizer, got an empty list")
    for number, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, ZeroRedundancyOptimizer):
            raise TypeError(
                f"optimizer must be a onecopy.ZeroRedundancyOptimizer (or a list of them), got "
                f"{torch.typename(optimizer)}; the order is ShardedDataParallel(module, optimizer)"
            )
        if optimizer.engine.collectives.process_group is not collectives.process_group:
            raise ValueError(
                f"the optimizers of ShardedDataParallel must be on one process group; number {number} is on another"
            )


def replicas_of(mesh: DeviceMesh, collectives: Collectives) -> Collectives:
    """The ranks along the first dimension of a mesh; the second dimension must be the optimizers' ``collectives``."""
    if mesh.ndim != 2:
        raise ValueError(f"mesh must have two dimensions, (replicate, shard), got {mesh.ndim}")
    if mesh.get_group(1) is not collectives.process_group:
        raise ValueError(
            "the optimizers must be on the mesh's second dimension: construct them with process_group=mesh.get_group(1)"
        )
    return Collectives(mesh.get_group(0), collectives.control_device)


def check_mixed_precision(mixed_precision: object) -> None:
    """Raise unless the argument is a :class:`MixedPrecision`."""
    if not isinstance(mixed_precision, MixedPrecision):
        raise TypeError(
            "mixed_precision must be a onecopy.MixedPrecision, as in "
            f"MixedPrecision(param_dtype={mixed_precision!r}), not {mixed_precision!r}"
        )


def check_module(module: object, optimizers: Sequence[ZeroRedundancyOptimizer]) -> None:
    """Raise unless the optimizers have not stepped and together have every parameter that the module trains."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {torch.typename(module)}")
    if isinstance(module, Joinable):
        raise TypeError(
            f"module is wrapped in {type(module).__name__} already: ShardedDataParallel takes the place of DDP; give "
            "it the module itself"
        )
    names = {id(param): name for name, param in module.named_parameters()}
    optimizer_of: dict[int, int] = {}
    for number, optimizer in enumerate(optimizers):
        if optimizer.overlap_with_ddp:
            raise ValueError("overlap_with_ddp=True is for DDP; construct the optimizer without it")
        if optimizer.wait_for_transfers is not None:
            raise ValueError(f"optimizer {number} already belongs to a ShardedDataParallel")
        if optimizer.engine.inner.version:
            raise ValueError(
                f"optimizer {number} has state already: wrap the model before the first step() and before "
                "load_state_dict()"
            )
        for spec, param in zip(optimizer.layout.params, optimizer.engine.params, strict=True):
            if id(param) not in names:
                raise ValueError(f"parameter {spec.name!r} of optimizer {number} is not a parameter of the module")
            if id(param) in optimizer_of:
                raise ValueError(
                    f"parameter {names[id(param)]!r} is in optimizers {optimizer_of[id(param)]} and {number}"
                )
            optimizer_of[id(param)] = number
    for name, param in module.named_parameters():
        if param.requires_grad and id(param) not in optimizer_of:
            raise ValueError(
                f"parameter {name!r} of the module needs a gradient but is in no optimizer: add it to one, or freeze "
                "it with requires_grad_(False)"
            )


def module_facts(module: nn.Module) -> list[Fact]:
    """The facts about a module that must be equal on all ranks: its parameters, which are frozen, and its buffers."""
    params = [
        Fact(f"parameter {name!r} of the module", f"{_type_text(param)}, requires_grad={param.requires_grad}")
        for name, param in module.named_parameters()
    ]
    return params + [
        Fact(f"buffer {name!r} of the module", _type_text(buffer)) for name, buffer in module.named_buffers()
    ]


def _type_text(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tensor.dtype}"


def check_uses(module: nn.Module, uses: Mapping[str, Sequence[str]], overlap_forward: bool) -> None:
    """Raise if ``uses`` is given without ``overlap_forward``, or names something that the module does not have."""
    if uses and not overlap_forward:
        raise ValueError("uses says what to wait for with overlap_forward=True, and means nothing without it")
    resolve_uses(module, uses)


def resolve_uses(module: nn.Module, uses: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """The identities of the parameters that ``uses`` names, by submodule; raise if a name is unknown."""
    names = dict(module.named_parameters(remove_duplicate=False))
    modules = dict(module.named_modules())
    resolved: dict[str, list[int]] = {}
    for name, used_names in uses.items():
        if name not in modules:
            raise ValueError(f"uses names a submodule {name!r} that the module does not have")
        resolved[name] = []
        for used in used_names:
            if used in names:
                resolved[name].append(id(names[used]))
            elif used in modules:
                resolved[name] += [id(param) for param in modules[used].parameters()]
            else:
                raise ValueError(f"uses[{name!r}] names {used!r}, which is neither a parameter nor a submodule")
    return resolved
