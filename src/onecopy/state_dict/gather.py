"""Gathers the optimizer state of every rank on one rank, tensor by tensor, in the plain optimizer's form.

1. Each rank describes its state as tagged JSON without the tensors (``describe_owned``); this may fail.
2. All ranks raise if a rank failed, or if options or state under keys that are not parameters differ.
3. The descriptions go to the receiver, which allocates the full tensors on the CPU; this may fail.
4. All ranks raise if the receiver could not allocate everything.
5. Each rank in turn sends its tensors; the receiver writes them into the full tensors, in bounded pieces.
6. The receiver checks that the owners of a cut parameter have equal state where it is not per element; all ranks raise
   if they do not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from onecopy.comm.agreement import Fact, FailTogether
from onecopy.comm.buffers import receive_ranges, send_ranges
from onecopy.comm.collectives import Collectives
from onecopy.common import nested_tensors, tagged_json
from onecopy.common.flat_views import as_bytes, dense_copy, flat_view, to_bytes
from onecopy.common.tensor_subclasses import check_not_cut, map_parts
from onecopy.layout import Layout, ParamSpec, Shard
from onecopy.state_dict.shards import checksum, owners_differ, state_with_master
from onecopy.step import master_weights
from onecopy.step.consistency import group_facts
from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group

CALL = "consolidate_state_dict()"

State = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The full optimizer state of all ranks.

    Attributes:
        by_param: the state by parameter, and state under keys that are not parameters under the same keys.
        masters: the master weights by parameter index.
        version: the version of the inner optimizer's state from which they were gathered.
        is_here: whether this rank received them; if not, both are empty.
    """

    by_param: dict[Any, Any]
    masters: dict[int, Tensor]
    version: int
    is_here: bool = True


class StateElsewhere(Mapping[Any, Any]):
    """The ``state`` of a state dict on a rank that has not received it: reading, copying and pickling it raise.

    Frameworks call ``state_dict()`` on all ranks and save on one.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(self._message)

    __getitem__ = __iter__ = __len__ = __reduce_ex__ = _refuse


@dataclass(slots=True)
class _OwnerState:
    """The state that one owner has of one parameter, without the tensors' values.

    Attributes:
        param: the index of the parameter.
        tree: the state as tagged JSON, with numbers in place of tensors.
        tensors: for each tensor its description for ``tagged_json.empty_from``, and whether it is per element.
        checksum: a checksum of the tensors that are not per element.
    """

    param: int
    tree: Any
    tensors: list[tuple[list[Any], bool]]
    checksum: int

    def agrees_with(self, other: _OwnerState) -> bool:
        """Whether two owners have equal state, except for the values and sizes of tensors that are per element."""
        return self._common() == other._common()

    def _common(self) -> tuple[Any, ...]:
        forms = [form[:1] if per_element else list(form) for form, per_element in self.tensors]
        return self.tree, forms, [per_element for _, per_element in self.tensors], self.checksum


def consolidated(engine: Engine, groups: Sequence[Group], to: int) -> Consolidated:
    """Gather the full state on group rank ``to``."""
    state = consolidate(engine.collectives, engine.layout, engine.inner, groups, to)
    return Consolidated({}, {}, engine.inner.version, False) if state is None else as_consolidated(engine, state)


def as_consolidated(engine: Engine, state: dict[int, State]) -> Consolidated:
    """Return the full state of the current version, from the full state by parameter index."""
    state, masters = master_weights.split_master_weights(state)
    by_param: dict[Any, Any] = {engine.params[index]: value for index, value in state.items()}
    by_param |= nested_tensors.map_tensors(
        engine.inner.other_state(), lambda tensor: map_parts(tensor, lambda part: part.detach().to("cpu", copy=True))
    )
    return Consolidated(by_param, masters, engine.inner.version)


def consolidate(
    collectives: Collectives, layout: Layout, local: InnerOptimizer, groups: Sequence[Group], to: int
) -> dict[int, State] | None:
    """Return the full state by parameter index on group rank ``to``, and None on the other ranks."""
    is_receiver = collectives.group_rank == to
    with FailTogether(collectives, CALL, [*group_facts(groups), Fact("target rank", str(to))]) as together:
        if not isinstance(to, int) or not 0 <= to < layout.world_size:
            raise ValueError(f"to must be a group rank from 0 to {layout.world_size - 1}, got {to!r}")
        header, tensors = describe_owned(layout, local)
        together.facts += other_facts(local)
    headers = _gather_headers(collectives, header, to)
    full_state = FullState(layout)
    with FailTogether(collectives, CALL):
        # The senders start only when the receiver has room for everything: a sender cannot be stopped later.
        targets = [full_state.allocate(text, source) for source, text in enumerate(headers)]
    if not is_receiver:
        start = partial(collectives.send, destination=to, call=CALL)
        send_ranges(byte_views(tensors), start, collectives.control_device)
    for source, views in enumerate(targets):
        if source != to:
            start = partial(collectives.receive, source=source, call=CALL)
            receive_ranges(views, start, collectives.control_device)
    state: dict[int, State] | None = None
    with FailTogether(collectives, CALL):
        if is_receiver:
            if targets[to]:
                torch._foreach_copy_(targets[to], byte_views(tensors))
            state = full_state.checked()
    return state


def _gather_headers(collectives: Collectives, header: bytes, to: int) -> list[bytes]:
    """Return the header of every rank on group rank ``to``, and an empty list on the other ranks."""
    sizes = [row[0] for row in collectives.all_gather_flags([len(header)], CALL)]
    device = collectives.control_device
    if collectives.group_rank != to:
        text = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
        collectives.send(text, to, CALL).wait()
        return []
    headers = []
    for source, size in enumerate(sizes):
        if source == to:
            headers.append(header)
            continue
        received = torch.empty(size, dtype=torch.uint8, device=device)
        collectives.receive(received, source, CALL).wait()
        headers.append(to_bytes(received))
    return headers


def describe_owned(layout: Layout, local: InnerOptimizer) -> tuple[bytes, list[Tensor]]:
    """Return a description of the state that this rank owns, the header, and its tensors in the same order."""
    known = {id(owned.tensor) for owned in local.owned}
    for key in local.optim.state:
        if isinstance(key, Tensor) and id(key) not in known:
            raise TypeError(
                f"rank {local.group_rank}: {type(local.optim).__qualname__} keeps state under {key!r:.80}, which is "
                "not a parameter, so it cannot be consolidated"
            )
    owner_states: list[_OwnerState] = []
    all_tensors: list[Tensor] = []
    for owned in local.owned:
        if owned.tensor not in local.optim.state and owned.param_view is None:
            continue
        spec = layout.params[owned.shard.param]
        tensors: list[Tensor] = []
        where = f"rank {local.group_rank}: state of parameter {spec.name!r}"
        state = state_with_master(local.optim.state.get(owned.tensor, {}), owned.tensor, owned.param_view)
        if owned.is_cut:
            check_not_cut(state, spec.name)
        tree = tagged_json.encode(state, tensors, where)
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                raise TypeError(f"{where} holds a tensor of layout {tensor.layout}, which cannot be gathered")
        tensors = [dense_copy(tensor) for tensor in tensors]
        per_element = [owned.is_cut and tensor.shape == owned.tensor.shape for tensor in tensors]
        copies = [tensor for tensor, split in zip(tensors, per_element, strict=True) if owned.is_cut and not split]
        forms = [tagged_json.describe_tensor(tensor) for tensor in tensors]
        described = list(zip(forms, per_element, strict=True))
        owner_states.append(_OwnerState(spec.index, tree, described, checksum(copies)))
        all_tensors += tensors
    header = tagged_json.dumps([[each.param, each.tree, each.tensors, each.checksum] for each in owner_states])
    return header, all_tensors


def other_facts(local: InnerOptimizer) -> list[Fact]:
    """Return facts about state under keys that are not parameters, which must be equal on all ranks."""
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


def byte_views(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory of dense tensors as bytes."""
    return [as_bytes(flat_view(tensor)) for tensor in tensors]


class FullState:
    """The full tensors on the receiver, into which every owner's values are received."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._shards = {(shard.param, shard.owner): shard for shard in layout.shards}
        self._owner_counts = Counter(shard.param for shard in layout.shards)
        self._by_param: dict[int, list[tuple[int, _OwnerState, list[Tensor]]]] = {}

    def allocate(self, header: bytes, source: int) -> list[Tensor]:
        """Allocate the tensors of a header; return the byte views into which the tensors of ``source`` are received."""
        targets: list[Tensor] = []
        for described in (_OwnerState(*row) for row in tagged_json.loads(header)):
            spec, shard = self._layout.params[described.param], self._shards[described.param, source]
            owners = self._by_param.setdefault(described.param, [])
            full = owners[0][2] if owners else []
            tensors = []
            for position, (form, per_element) in enumerate(described.tensors):
                # The full tensor of the first owner has room for the ranges of all other owners.
                existing = full[position] if per_element and position < len(full) else None
                tensor, target = _allocate(spec, shard, form, per_element, existing)
                tensors.append(tensor)
                targets.append(as_bytes(target))
            owners.append((source, described, tensors))
        return targets

    def checked(self) -> dict[int, State]:
        """Return the full state by parameter index; raise if the owners of a cut parameter differ."""
        return {index: self._checked_param(index) for index in sorted(self._by_param)}

    def _checked_param(self, index: int) -> State:
        spec = self._layout.params[index]
        (first_rank, first, tensors), *others = self._by_param[index]
        if len(others) + 1 != self._owner_counts[index]:
            raise ValueError(f"parameter {spec.name!r} is cut among ranks, but only some of them have state for it")
        state: State = tagged_json.decode(first.tree, tensors)
        for rank, other, other_tensors in others:
            if not first.agrees_with(other):
                values = f": {state} and {tagged_json.decode(other.tree, other_tensors)}"
                raise ValueError(owners_differ(spec.name, f"ranks {first_rank} and {rank}", values))
        return state


def _allocate(
    spec: ParamSpec, shard: Shard, form: list[Any], per_element: bool, existing: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return a full tensor, allocated if there is none, and the flat range of it that this owner's values fill."""
    if not per_element:
        tensor = tagged_json.empty_from(form)
        return tensor, flat_view(tensor)
    if existing is None or tagged_json.describe_tensor(existing)[0] != form[0]:  # a difference is refused at the end
        existing = tagged_json.empty_from([form[0], list(spec.shape), list(spec.stride)])
    return existing, flat_view(existing)[shard.start : shard.stop]
