"""What a module has beside gradients: parameters and buffers, made equal on all ranks; and its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onecopy.comm.collectives import Collectives
from onecopy.common.flat_views import as_bytes, flat_view
from onecopy.common.torch_private import buffers_of

PACK_BYTES = 16 << 20


class ModuleState:
    """Sends parameters and buffers of one rank to the others."""

    def __init__(self, module: nn.Module, broadcast_buffers: bool) -> None:
        self._module = module
        self._broadcast_buffers = broadcast_buffers

    def buffers_to_share(self) -> list[Tensor]:
        """The buffers that the module has now."""
        return [buffer.detach() for buffer in buffers_of(self._module)] if self._broadcast_buffers else []

    def share_all(self, shard: Collectives, replicas: Collectives | None) -> None:
        """Make parameters and buffers those of the first rank."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        for collectives in (replicas, shard):
            if collectives is not None:
                _broadcast([tensor.detach() for tensor in tensors], collectives, 0)

    def share_buffers(
        self, buffers: Sequence[Tensor], shard: Collectives, replicas: Collectives | None, source: int
    ) -> None:
        """Make these buffers those of ``source``."""
        for collectives, rank in ((replicas, 0), (shard, source)):
            if buffers and collectives is not None and collectives.world_size > 1:
                _broadcast(buffers, collectives, rank)


def _broadcast(tensors: Sequence[Tensor], collectives: Collectives, source: int) -> None:
    """Send tensors packed together, a few megabytes at a time."""
    pack: list[Tensor] = []
    for tensor in (*tensors, None):
        full = tensor is None or (pack and tensor.device != pack[0].device)
        if pack and (full or sum(t.numel() * t.element_size() for t in pack) >= PACK_BYTES):
            parts = [as_bytes(flat_view(t.contiguous())) for t in pack]
            buffer = torch.cat(parts)
            collectives.broadcast(buffer, source).wait()
            if collectives.group_rank != source:
                for t, part in zip(pack, buffer.split([part.numel() for part in parts]), strict=True):
                    # Behind autograd's back, as in DDP: an earlier forward pass may still need what it has seen.
                    t.data.copy_(part.clone().view(t.dtype).view(t.shape))
            pack = []
        if tensor is not None and tensor.numel():
            pack.append(tensor)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for field in fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """The same nested containers with floating-point tensors converted."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) is dict:
        return {key: cast_floating(value, dtype) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cast_floating(value, dtype) for value in tree)
    return tree
