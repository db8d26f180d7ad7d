"""The ranks that save or load a checkpoint together, with a process group that training does not use.

Without ``torch.distributed`` this process is the only rank, and the same calls work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onecopy.comm.agreement import REMEDY, FailTogether
from onecopy.comm.collectives import Collectives
from onecopy.common import tagged_json
from onecopy.common.digests import tensor_checksums
from onecopy.common.flat_views import flat_views
from onecopy.common.tensor_subclasses import leaves_of
from onecopy.errors import CheckpointError
from onecopy.state_dict.shards import OptimizerView, unwrapped


class Ranks:
    """The ranks of one save or load. Ranks are numbered in the process group, and all ranks make every call.

    Args:
        process_group: the ranks (default: all ranks; without torch.distributed, this process).
        call: the name of the user's call, for errors.

    Attributes:
        group_rank: the rank of this process.
        world_size: the number of ranks.
        global_ranks: the global rank of each rank.
    """

    def __init__(self, process_group: Any, call: str) -> None:
        self._call = call
        self._collectives: Collectives | None = None
        self.group_rank, self.world_size, self.global_ranks = 0, 1, [0]
        if dist.is_available() and dist.is_initialized():
            collectives = Collectives(process_group)
            with FailTogether(collectives, call):  # all ranks are in this call
                pass
            collectives = self._collectives = collectives.cpu_group(call)
            self.group_rank, self.world_size = collectives.group_rank, collectives.world_size
            self.global_ranks = dist.get_process_group_ranks(collectives.process_group)
        elif process_group is not None:
            raise RuntimeError("a process group was given, but torch.distributed is not initialised")

    def together(self, remedy: str = REMEDY) -> FailTogether:
        """Return a ``with`` block that raises on all ranks if it raises on one rank or if its facts differ."""
        return FailTogether(self._collectives, self._call, remedy=remedy)

    def gather_json(self, text: bytes) -> list[Any]:
        """Return the JSON data of every rank.

        A :meth:`together` block has encoded this rank's, so that a value that cannot be encoded is an error on all.
        """
        texts = [text] if self._collectives is None else self._collectives.all_gather_bytes(text, self._call)
        return [tagged_json.loads(each) for each in texts]


@contextlib.contextmanager
def explained_os_errors(action: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into a :class:`CheckpointError` that names the action."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{action} failed: {error}") from error


# What must be equal on all ranks


def described_tensors(model: nn.Module | None, views: Sequence[OptimizerView]) -> dict[str, str]:
    """Return the names, shapes and dtypes of the model's tensors, which are trainable, and the optimizers' groups."""
    found = {}
    if model is not None:
        module = unwrapped(model)
        for name, value in module.state_dict().items():
            shown = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else "data"
            found[f"{name!r} of the model"] = shown
        for name, param in module.named_parameters():
            found[f"parameter {name!r}"] = "trainable" if param.requires_grad else "frozen"
    for number, view in enumerate(views):
        shapes = {name: tuple(param.shape) for name, param in zip(view.names, view.params, strict=True)}
        for position, names in enumerate(view.split_by_group(view.names)):
            for place, name in enumerate(names):
                found[f"parameter {place} of group {position} of optimizer {number}"] = f"{name!r}, {shapes[name]}"
    return found


def parameter_checksums(view: OptimizerView) -> dict[str, str]:
    """Return checksums of an optimizer's parameters, which are equal on ranks that train one model."""
    leaves = [leaves_of(param.detach()) for param in view.params]
    checksums = iter(tensor_checksums(flat_views(list(chain.from_iterable(leaves)))))
    return {
        f"parameter {name!r}": f"checksum {', '.join(str(next(checksums)) for _ in parts)}"
        for name, parts in zip(view.names, leaves, strict=True)
    }
