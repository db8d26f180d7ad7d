"""Process groups: checking the one that a user gave, and making further ones over the same ranks.

torch names a group that only its members make after the number of groups that each member is in. So all members must
be in equally many groups, and a side group is never destroyed before the group it belongs to.
"""

from __future__ import annotations

import atexit
import itertools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from onecopy.comm import gloo_threads, limits
from onecopy.common.torch_private import number_of_groups, timeout_of

# Exit functions run in reverse order: those that are registered later, and may still communicate, run before this one.
atexit.register(gloo_threads.wait_for_idle_workers)

GatherCounts = Callable[[int], list[int]]
"""Gathers one number of every rank of a group."""

_side_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Side groups by their group and their purpose."""

_tag_blocks: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""The next blocks of message tags, by group."""


def member_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The given group, by default the group of all ranks; raise if this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group is initialised: call torch.distributed.init_process_group() first "
            "(torchrun sets what it needs), also when there is only one process; with Accelerate or transformers, "
            "construct the Accelerator or the TrainingArguments before the optimizer, or give Trainer "
            "optimizer_cls_and_kwargs=(ZeroRedundancyOptimizer, {'optimizer_class': AdamW, ...})"
        )
    group = dist.group.WORLD if process_group is None else process_group
    if group is None or dist.get_rank(group) < 0:
        raise ValueError(
            f"global rank {dist.get_rank()} is not a member of the process group it was given; "
            "only the members may construct this object"
        )
    return group


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the backend for each type of device."""
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def control_device(backends: dict[str, str], device: torch.device | None) -> torch.device:
    """The device of status flags in a group, for parameters on ``device``.

    gloo is used from the CPU only: it has few collectives for other devices.
    """
    if device is not None and backends.get(device.type, "gloo") != "gloo":
        return device
    if "cpu" in backends:
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None, backends
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def side_group(
    group: dist.ProcessGroup,
    purpose: str,
    control_device: torch.device,
    gather_counts: GatherCounts,
    backend: str | None = None,
) -> dist.ProcessGroup | None:
    """Another group of the same ranks, made once for each purpose; None if torch cannot make one.

    All members make this call together.

    Args:
        group: the group.
        purpose: a name for the use of the side group, such as ``messages``.
        control_device: the device whose timeout the side group takes over.
        gather_counts: gathers one number of every rank of ``group``.
        backend: the backend of the side group, by default that of ``group``.
    """
    known = _side_groups.setdefault(group, {})
    if purpose not in known:
        all_ranks = dist.get_world_size(group) == dist.get_world_size()
        counts = gather_counts(0 if all_ranks else number_of_groups())
        if any(count != counts[0] for count in counts):
            return None
        made = dist.new_group(
            dist.get_process_group_ranks(group),
            timeout=timeout_of(group, control_device),
            backend=backend or dist.get_backend_config(group),
            use_local_synchronization=not all_ranks,
        )
        assert isinstance(made, dist.ProcessGroup)
        known[purpose] = made
    return known[purpose]


def reserve_tags(group: dist.ProcessGroup) -> int:
    """The first of ``limits.TAGS`` message tags for one user; all ranks call this in the same order."""
    blocks = _tag_blocks.setdefault(group, itertools.cycle(range(1, limits.TAG_BLOCKS)))
    return next(blocks) * limits.TAGS
