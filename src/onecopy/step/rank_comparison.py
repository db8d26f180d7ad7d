"""Layouts and options as facts that must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from onecopy.comm.agreement import Fact
from onecopy.layout import Layout, ShardBy
from onecopy.step.group_options import options_of
from onecopy.step.parameter_groups import Group, first_places


def layout_facts(layout: Layout, shard_by: ShardBy) -> list[Fact]:
    """The parameters of a layout and the owners of their shards."""
    policy = shard_by if isinstance(shard_by, str) else f"function {getattr(shard_by, '__qualname__', '')}"
    owners: dict[int, list[str]] = {}
    for shard in layout.shards:
        owners.setdefault(shard.param, []).append(f"[{shard.start}:{shard.stop}) on rank {shard.owner}")
    return [
        Fact("number of ranks", str(layout.world_size)),
        *(Fact(f"parameter {spec.index} ({spec.name!r})", spec.describe()) for spec in layout.params),
        Fact("shard_by", policy),
        *(Fact(f"owners of {spec.name!r}", ", ".join(owners[spec.index])) for spec in layout.params),
    ]


def optimizer_facts(
    optimizer_class: type, layout: Layout, shard_by: ShardBy, groups: Sequence[Group], **options: object
) -> list[Fact]:
    """The arguments that must be equal on all ranks that construct an optimizer."""
    return [
        Fact("optimizer class", f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"),
        *(Fact(name, str(value)) for name, value in options.items()),
        *sharding_facts(layout, shard_by, groups, groups),
    ]


def sharding_facts(
    layout: Layout, shard_by: ShardBy, groups: Sequence[Group], inner_groups: Sequence[Group]
) -> list[Fact]:
    """The layout, the positions of repeated parameters in each group, and the options of the inner optimizer."""
    facts = layout_facts(layout, shard_by)
    for position, group in enumerate(groups):
        again = sorted(set(range(len(group["params"]))) - set(first_places(group["params"])))
        facts += [Fact(f"repeated parameters of group {position}", str(again))] if again else []
    return [*facts, *group_facts(inner_groups)]


def group_facts(groups: Sequence[Group]) -> list[Fact]:
    """The options of every group."""
    return [
        Fact(f"parameter group {position}", f"{key}={text}")
        for position, group in enumerate(groups)
        for key, text in sorted(options_text(group).items())
    ]


def options_text(group: Group) -> dict[str, str]:
    """A group's options as text. Equal options have equal text on all machines."""
    return {str(key): _option_text(value) for key, value in options_of(group).items()}


def _option_text(value: object) -> str:
    if isinstance(value, Tensor):
        # Reading it from an accelerator (capturable) would make the host wait in every step.
        content = value.tolist() if value.device.type == "cpu" else value.device.type
        return f"tensor({content}, {value.dtype})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_option_text, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{key}={_option_text(item)}' for key, item in value.items())})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    return f"a {type(value).__qualname__}"  # its repr may hold an address, which differs between ranks
