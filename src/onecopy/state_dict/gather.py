"""Gathering every rank's state on one rank, tensor by tensor, into the plain optimizer's form.

1. Each rank describes its state as tagged JSON with the tensors taken out (``_describe``); this may fail.
2. All ranks agree that nobody failed, and that options and state under keys that are not parameters are equal.
3. The descriptions go to the receiver, which allocates the full tensors on the CPU; this may fail.
4. All ranks agree that the receiver has room for everything.
5. Each rank in turn streams its tensors; the receiver takes them in where they belong, in bounded pieces.
6. The receiver checks that the owners of a cut parameter agree on what is not per element; all ranks hear the verdict.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecopy.comm.agreement import Fact, agree
from onecopy.comm.collectives import Collectives
from onecopy.comm.packing import receive_ranges, send_ranges
from onecopy.common import tagged_json
from onecopy.common.flat_views import as_bytes, dense_copy, flat_view, to_bytes
from onecopy.layout import Layout, ParamSpec, Shard
from onecopy.step import master_weights
from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.owned_shards import OwnedShard
from onecopy.step.parameter_groups import Group
from onecopy.step.rank_comparison import group_facts

State = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The whole state by parameter, master weights by index, and the version of the state they were gathered from.

    State under keys that are not parameters is among it, under the same keys.
    """

    by_param: dict[Any, Any]
    masters: dict[int, Tensor]
    version: int


@dataclass(slots=True)
class _Entry:
    """One owner's state of one parameter: JSON with holes, and for each tensor its description and kind."""

    param: int
    tree: Any
    tensors: list[tuple[list[Any], bool]]  # what empty_from needs, and whether it has one value per element


def consolidated(engine: Engine, groups: Sequence[Group], to: int) -> Consolidated | None:
    """The whole state, gathered on group rank ``to``, and None elsewhere."""
    state = consolidate(engine.collectives, engine.layout, engine.inner, groups, to)
    if state is None:
        return None
    state, copies = master_weights.split_master_weights(state)
    by_param: dict[Any, Any] = {engine.params[index]: value for index, value in state.items()}
    by_param |= tagged_json.map_tensors(engine.inner.other_state(), lambda tensor: tensor.detach().to("cpu", copy=True))
    return Consolidated(by_param, copies, engine.inner.version)


def consolidate(
    collectives: Collectives, layout: Layout, local: InnerOptimizer, groups: Sequence[Group], to: int
) -> dict[int, State] | None:
    """Return the full state by parameter index on group rank ``to``, and None elsewhere."""
    what, here = "consolidate_state_dict()", collectives.group_rank
    tensors: list[Tensor] = []
    header = b""
    facts = [*group_facts(groups), Fact("target rank", str(to))]
    failure: Exception | None = None
    try:
        if not isinstance(to, int) or not 0 <= to < layout.world_size:
            raise ValueError(f"to must be a group rank from 0 to {layout.world_size - 1}, got {to!r}")
        entries, tensors = _describe(layout, local)
        header = tagged_json.dumps([[entry.param, entry.tree, entry.tensors] for entry in entries])
        facts += _other_facts(local)
    except Exception as error:
        failure = error
    agree(collectives, what, facts, failure)
    headers = _gather_headers(collectives, header, to)
    assembly = _Assembly(layout)
    places: list[list[Tensor]] = []
    try:
        # Nothing is sent before the receiver has room for all of it: the others could not be told that they wait in
        # vain.
        places = [assembly.open(text, source) for source, text in enumerate(headers)]
    except Exception as error:
        failure = error
    agree(collectives, what, [], failure)
    if here != to:
        send_ranges(_byte_views(tensors), lambda buffer: collectives.send(buffer, to), collectives.control_device)
        agree(collectives, what, [])
        return None
    for source, pieces in enumerate(places):
        if source != to:
            start = partial(collectives.receive, source=source)
            receive_ranges(pieces, start, collectives.control_device)
    try:
        if places[to]:
            torch._foreach_copy_(places[to], _byte_views(tensors))
        state = assembly.close()
    except Exception as error:
        failure = error
    agree(collectives, what, [], failure)
    return state


def _gather_headers(collectives: Collectives, header: bytes, to: int) -> list[bytes]:
    """Every rank's header on group rank ``to``, and nothing elsewhere."""
    sizes = [row[0] for row in collectives.all_gather_flags([len(header)], "consolidate_state_dict()")]
    device = collectives.control_device
    if collectives.group_rank != to:
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
        collectives.send(text, to).wait()
        return []
    headers = []
    for source, size in enumerate(sizes):
        if source == to:
            headers.append(header)
            continue
        received = torch.empty(size, dtype=torch.uint8, device=device)
        collectives.receive(received, source).wait()
        headers.append(to_bytes(received))
    return headers


def _describe(layout: Layout, local: InnerOptimizer) -> tuple[list[_Entry], list[Tensor]]:
    known = {id(owned.tensor) for owned in local.owned}
    for key in local.optim.state:
        if isinstance(key, Tensor) and id(key) not in known:
            raise TypeError(
                f"rank {local.group_rank}: {type(local.optim).__qualname__} keeps state under {key!r:.80}, which is "
                "not a parameter, so it cannot be consolidated"
            )
    entries: list[_Entry] = []
    everything: list[Tensor] = []
    for owned in local.owned:
        if owned.tensor not in local.optim.state and owned.param_view is None:
            continue
        spec = layout.params[owned.shard.param]
        tensors: list[Tensor] = []
        where = f"rank {local.group_rank}: state of parameter {spec.name!r}"
        state = dict(local.optim.state.get(owned.tensor, {}))
        if owned.param_view is not None:
            state[master_weights.STATE_KEY] = owned.tensor.detach()
        tree = tagged_json.encode(state, tensors, where)
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TypeError(f"{where} holds a tensor of layout {tensor.layout}, which cannot be gathered")
        tensors = [dense_copy(tensor) for tensor in tensors]
        kinds = [(tagged_json.describe_tensor(tensor), _is_per_element(tensor, owned)) for tensor in tensors]
        entries.append(_Entry(spec.index, tree, kinds))
        everything += tensors
    return entries, everything


def _other_facts(local: InnerOptimizer) -> list[Fact]:
    """State under keys that are not parameters: no rank owns it, so it must be the same on all."""
    facts = []
    for key, value in sorted(local.other_state().items(), key=lambda item: repr(item[0])):
        where = f"state under {key!r:.80}"
        tensors: list[Tensor] = []
        tree = tagged_json.encode([key, value], tensors, f"rank {local.group_rank}: {where}")
        contents = [dense_copy(tensor).cpu() for tensor in tensors]
        digests = [hashlib.blake2b(to_bytes(as_bytes(flat_view(each))), digest_size=8).hexdigest() for each in contents]
        described = list(zip(map(tagged_json.describe_tensor, contents), digests, strict=True))
        facts.append(Fact(where, tagged_json.dumps([tree[1][1], described]).decode()))
    return facts


def _is_per_element(tensor: Tensor, owned: OwnedShard) -> bool:
    return owned.is_cut and tensor.shape == owned.tensor.shape


def _byte_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [as_bytes(flat_view(tensor)) for tensor in tensors]


class _Assembly:
    """The receiver's side: full tensors that fill up as owner after owner sends its part."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._shards = {(shard.param, shard.owner): shard for shard in layout.shards}
        self._owners = Counter(shard.param for shard in layout.shards)
        self._entries: dict[int, list[tuple[int, _Entry, list[Tensor]]]] = {}

    def open(self, header: bytes, source: int) -> list[Tensor]:
        """Allocate what a header describes; return the byte views into which the tensors of ``source`` go."""
        entries = [_Entry(param, tree, tensors) for param, tree, tensors in tagged_json.loads(header)]
        places: list[Tensor] = []
        for entry in entries:
            spec, shard = self._layout.params[entry.param], self._shards[entry.param, source]
            others = self._entries.setdefault(entry.param, [])
            full = others[0][2] if others else None
            tensors = []
            for position, (description, per_element) in enumerate(entry.tensors):
                # A first owner's full tensor takes in every other owner's range of it.
                shared = full[position] if full is not None and per_element and position < len(full) else None
                tensor, place = _place(spec, shard, description, per_element, shared)
                tensors.append(tensor)
                places.append(as_bytes(place))
            others.append((source, entry, tensors))
        return places

    def close(self) -> dict[int, State]:
        """Check that owners agree and return the state by parameter index."""
        return {index: self._close_param(index) for index in sorted(self._entries)}

    def _close_param(self, index: int) -> State:
        spec = self._layout.params[index]
        (first, entry, tensors), *others = self._entries[index]
        if len(others) + 1 != self._owners[index]:
            raise ValueError(f"parameter {spec.name!r} is cut among ranks, but only some of them have state for it")
        for source, other, other_tensors in others:
            if other.tree != entry.tree or not _same_tensors(entry, tensors, other, other_tensors):
                raise ValueError(
                    f"parameter {spec.name!r} is cut among ranks, but ranks {first} and {source} differ in state that "
                    f"is not per element: {tagged_json.decode(entry.tree, tensors)} and "
                    f"{tagged_json.decode(other.tree, other_tensors)}; keep parameters whole with elementwise=False"
                )
        state: State = tagged_json.decode(entry.tree, tensors)
        return state


def _same_tensors(a: _Entry, a_tensors: Sequence[Tensor], b: _Entry, b_tensors: Sequence[Tensor]) -> bool:
    """Whether two owners agree on which tensors are per element, and bit by bit on those that are not."""
    if len(a_tensors) != len(b_tensors):
        return False
    for (a_form, a_split), (b_form, b_split), x, y in zip(a.tensors, b.tensors, a_tensors, b_tensors, strict=True):
        if a_split != b_split or a_form[0] != b_form[0]:
            return False
        if not a_split and (a_form != b_form or not torch.equal(as_bytes(flat_view(x)), as_bytes(flat_view(y)))):
            return False
    return True


def _place(
    spec: ParamSpec, shard: Shard, description: list[Any], per_element: bool, shared: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A tensor to fill, and the flat part of it that this owner's values fill."""
    if not per_element:
        tensor = tagged_json.empty_from(description)
        return tensor, flat_view(tensor)
    if shared is None or tagged_json.describe_tensor(shared)[0] != description[0]:  # refused at the end
        shared = tagged_json.empty_from([description[0], list(spec.shape), list(spec.stride)])
    return shared, flat_view(shared)[shard.start : shard.stop]
