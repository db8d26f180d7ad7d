"""Gathers the optimizer state of every rank on one rank, tensor by tensor, in the plain optimizer's form.

1. Each rank describes its state as tagged JSON without the tensors (``_described``); this may fail.
2. All ranks raise if a rank failed, or if options or state under keys that are not parameters differ.
3. The descriptions go to all ranks. The receiver allocates the full tensors on the CPU; this may fail.
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
from onecopy.common import nested_tensors, tagged_json
from onecopy.common.flat_views import as_bytes, dense_copy, flat_view, to_bytes
from onecopy.common.tensor_subclasses import map_parts
from onecopy.layout import Layout
from onecopy.state_dict.shards import owned_state, owners_differ, split_extras, written_states
from onecopy.step.consistency import group_facts
from onecopy.step.engine import Engine
from onecopy.step.inner_optimizer import InnerOptimizer
from onecopy.step.parameter_groups import Group

CALL = "consolidate_state_dict()"

State = dict[Any, Any]


@dataclass(frozen=True, slots=True)
class Consolidated:
    """The full optimizer state of all ranks."""

    by_param: dict[Any, Any]  # and state under keys that are not parameters under the same keys
    extras: dict[str, Any]  # entries of the state dict beside the state: master weights, averages
    version: int  # of the inner optimizer's state from which they were gathered
    is_here: bool = True  # whether this rank received them; if not, both are empty


class StateElsewhere(Mapping[Any, Any]):
    """The ``state`` of a state dict on a rank that has not received it: reading, copying and pickling it raise.

    Frameworks call ``state_dict()`` on all ranks and save on one.
    """

    def __init__(self, message: str) -> None:
        self._message = message

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError(self._message)

    __getitem__ = __iter__ = __len__ = __reduce_ex__ = _refuse


def consolidated(engine: Engine, groups: Sequence[Group], to: int) -> Consolidated:
    """Gather the full state on group rank ``to``."""
    state = consolidate(engine, groups, to)
    if state is None:
        return Consolidated({}, {}, engine.inner.version, False)
    state, extras = split_extras(state)
    by_param: dict[Any, Any] = {engine.params[index]: value for index, value in state.items()}
    by_param |= nested_tensors.map_tensors(
        engine.inner.other_state(), lambda tensor: map_parts(tensor, lambda part: part.detach().to("cpu", copy=True))
    )
    return Consolidated(by_param, extras, engine.inner.version)


def consolidate(engine: Engine, groups: Sequence[Group], to: int) -> dict[int, State] | None:
    """Return the full state by parameter index on group rank ``to``, and None on the other ranks."""
    collectives, layout = engine.collectives, engine.layout
    is_receiver = collectives.group_rank == to
    with FailTogether(collectives, CALL, [*group_facts(groups), Fact("target rank", str(to))]) as together:
        if not isinstance(to, int) or not 0 <= to < layout.world_size:
            raise ValueError(f"to must be a group rank from 0 to {layout.world_size - 1}, got {to!r}")
        header, sent = _described(engine)
        together.facts += _other_facts(engine.inner)
    headers = collectives.all_gather_bytes(header, CALL)
    with FailTogether(collectives, CALL):
        # The senders start only when the receiver has room for everything: a sender cannot be stopped later.
        by_param, targets = _allocated(layout, headers if is_receiver else [])
    if not is_receiver:
        send_ranges(sent, partial(collectives.send, destination=to, call=CALL), collectives.control_device)
    for source, views in enumerate(targets):
        if source != to:
            start = partial(collectives.receive, source=source, call=CALL)
            receive_ranges(views, start, collectives.control_device)
    with FailTogether(collectives, CALL):
        if is_receiver and sent:
            torch._foreach_copy_(targets[to], sent)
        counts = Counter(shard.param for shard in layout.shards)
        state = {
            index: _checked(layout.params[index].name, counts[index], owners)
            for index, owners in sorted(by_param.items())
        }
    return state if is_receiver else None


def _described(engine: Engine) -> tuple[bytes, list[Tensor]]:
    """Return the header of the state that this rank owns, and the bytes of its tensors in the same order.

    A row of the header is the index of the parameter and what all owners of a cut parameter must have in common: a
    tree, for each tensor the form of the full one and whether it is per element, and a checksum of those that are not.
    """
    inner = engine.inner
    known = {id(owned.tensor) for owned in inner.owned}
    for key in inner.optim.state:
        if isinstance(key, Tensor) and id(key) not in known:
            raise TypeError(
                f"rank {inner.group_rank}: {inner.kind} keeps state under {key!r:.80}, which is not a parameter, so it "
                "cannot be consolidated"
            )
    shards = owned_state(inner, [spec.name for spec in engine.layout.params])
    has_state = [each for each in shards if each.tensor in inner.optim.state or each.whole_state()]
    rows, sent = [], []
    for written in written_states(has_state):
        param = written.shard.param
        forms = []
        for tensor, per_element in zip(written.tensors, written.per_element, strict=True):
            form = tagged_json.describe_tensor(tensor)
            whole = [form[0], list(param.shape), list(param.stride())] if per_element else form
            forms.append([whole, per_element])
            sent.append(as_bytes(flat_view(tensor)))
        rows.append([written.shard.index, written.tree, forms, written.checksum])
    return tagged_json.dumps(rows), sent


Owners = list[tuple[int, Any, list[Tensor]]]
"""The owners of a parameter: their rank, their row of the header, and the full tensors."""


def _allocated(layout: Layout, headers: Sequence[bytes]) -> tuple[dict[int, Owners], list[list[Tensor]]]:
    """Allocate the full tensors; return them by parameter, and for each rank the memory into which it sends."""
    shards = {(shard.param, shard.owner): shard for shard in layout.shards}
    by_param: dict[int, Owners] = {}
    targets = []
    for source, header in enumerate(headers):
        views: list[Tensor] = []
        for index, *row in tagged_json.loads(header):
            shard, owners = shards[index, source], by_param.setdefault(index, [])
            # The tensors of the first owner have room for the ranges of all owners. A difference is refused later.
            shared = owners[0][2] if owners and owners[0][1] == row else None
            tensors = []
            for position, (form, per_element) in enumerate(row[1]):
                tensor = shared[position] if shared and per_element else tagged_json.empty_from(form)
                flat = flat_view(tensor)
                views.append(as_bytes(flat[shard.start : shard.stop] if per_element else flat))
                tensors.append(tensor)
            owners.append((source, row, tensors))
        targets.append(views)
    return by_param, targets


def _checked(name: str, count: int, owners: Owners) -> State:
    """Return the full state of one parameter; raise if its owners, of which there must be ``count``, differ."""
    if len(owners) != count:
        raise ValueError(f"parameter {name!r} is cut among ranks, but only some of them have state for it")
    (first_rank, first, tensors), *others = owners
    state: State = tagged_json.decode(first[0], tensors)
    for rank, other, other_tensors in others:
        if other != first:
            values = f": {state} and {tagged_json.decode(other[0], other_tensors)}"
            raise ValueError(owners_differ(name, f"ranks {first_rank} and {rank}", values))
    return state


def _other_facts(local: InnerOptimizer) -> list[Fact]:
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
