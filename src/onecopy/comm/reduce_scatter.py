"""Reduce-scatter of pieces by owner: every rank gets the mean, over all ranks, of the pieces of gradients that it owns.

Some gradients, the *sources*, are cut into pieces. The pieces of one owner form its *part*. Planned once, a reduction
has two halves:

1. ``start`` packs the pieces, part by part, into one buffer of the pool, and starts one collective. Between pairs of
   ranks (gloo) a large piece is not packed, but sent from where it lies.
2. ``wait`` waits for the mean. It arrives in memory for the part, or in place of the pieces that this rank owns.

Gradients are scaled before they are added up, as in DDP, because the sum of many could overflow.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onecopy.comm import limits
from onecopy.comm.buffers import BufferPool, pack
from onecopy.comm.collectives import Collectives
from onecopy.comm.work import Work
from onecopy.common.torch_private import profile_range, zero_each

CALL = "backward()"
"""The user's call that reduces gradients, for errors."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements ``[start, stop)`` of a source, which one rank owns."""

    source: int  # the position of the source among those that are given to ``start``
    start: int  # the first element
    stop: int  # the element after the last one
    owner: int  # the group rank of the owner
    offset: int  # the position of the piece in the owner's part

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(slots=True)
class _Message:
    """A range ``[start, stop)`` of an owner's part that is sent at once: one large piece, or pieces that are packed."""

    start: int
    stop: int
    pieces: list[Piece]
    packed: bool

    @property
    def numel(self) -> int:
        """The number of elements, gaps between pieces included."""
        return self.stop - self.start


class ReduceScatterPlan:
    """The reduce-scatter of some sources."""

    def __init__(
        self,
        collectives: Collectives,
        pieces: Sequence[Piece],  # the pieces, equal on all ranks; those of an owner in the order of their offsets
        source_dtype: torch.dtype,  # the type of the sources
        dtype: torch.dtype,  # the type in which gradients are sent and added up
        device: torch.device,  # the device of the sources
        # The number of elements of each rank's part; by default as many as its pieces need, and equal numbers where
        # that adds little.
        lengths: Sequence[int] | None = None,
        # The ranks that own the same pieces in other replicas (with a mesh), or None. The mean is over all.
        replicas: Collectives | None = None,
    ) -> None:
        self._collectives, self._replicas = collectives, replicas
        self._dtype, self._device = dtype, device
        self._scale = 1.0 / (collectives.world_size * (replicas.world_size if replicas else 1))
        by_owner: list[list[Piece]] = [[] for _ in range(collectives.world_size)]
        for piece in pieces:
            if piece.numel:
                by_owner[piece.owner].append(piece)
        sizes = [owned[-1].offset + owned[-1].numel if owned else 0 for owned in by_owner]
        if collectives.sends_in_place(device):
            # What is converted to another type must be packed.
            direct = limits.DIRECT_GRADIENT_BYTES // dtype.itemsize if source_dtype is dtype else sys.maxsize
            self._messages = [_cut(owned, direct) for owned in by_owner]
        else:
            self._messages = [
                [_Message(0, length, owned, packed=True)]
                for owned, length in zip(by_owner, lengths or limits.padded(sizes, dtype.itemsize), strict=True)
            ]
        self._packed = [message for owned in self._messages for message in owned if message.packed]
        # The buffer, cut into pieces and the gaps between them.
        self._lengths: list[int] = []
        self._cuts: list[Piece | None] = []
        for message in self._packed:
            end = message.start
            for piece in message.pieces:
                self._add_cut(None, piece.offset - end)
                self._add_cut(piece, piece.numel)
                end = piece.offset + piece.numel
            self._add_cut(None, message.stop - end)

    def _add_cut(self, piece: Piece | None, numel: int) -> None:
        if numel:
            self._cuts.append(piece)
            self._lengths.append(numel)

    def start(self, sources: Sequence[Tensor | None], pool: BufferPool, tag: int, into: Tensor | None) -> Reduction:
        """Start the reduction, with a tag that no other reduction in flight between these ranks has.

        The sources are flat gradients; None counts as zeros. They may not be changed before ``wait()`` has returned.
        This rank's part of the mean arrives ``into`` that memory. If it is None, the mean replaces the pieces that this
        rank owns; otherwise sources are only read.
        """
        collectives, here = self._collectives, self._collectives.group_rank
        buffer = pool.take(sum(self._lengths), self._dtype, self._device)
        values = [None if cut is None else _values(cut, sources) for cut in self._cuts]
        views = buffer.split(self._lengths)
        pack(buffer, views, values)
        missing = [number for number, cut in enumerate(self._cuts) if cut is not None and values[number] is None]
        if missing:
            zero_each([views[number] for number in missing])
        mine, buffers = self._messages[here], [buffer]
        means = [] if into is None else [into[message.start : message.stop] for message in mine]
        if collectives.sends_in_place(self._device):
            packed = iter(buffer.split([message.numel for message in self._packed]))
            pieces = [
                [next(packed) if each.packed else _lying(each.pieces[0], sources, self._dtype) for each in owned]
                for owned in self._messages
            ]
            means = means or pieces[here]
            work = collectives.reduce_scatter_in_place(pieces, means, self._scale, pool, tag, CALL)
        else:
            if not means:
                means = [pool.take(mine[0].numel, self._dtype, self._device)]
                buffers += means
            lengths = [message.numel for (message,) in self._messages]
            work = collectives.reduce_scatter(means[0], buffer, lengths, self._scale, CALL)
        if self._replicas is not None and into is not None:
            work = self._replicas.all_reduce_after(work, into, CALL, average=True)
        return Reduction(work, mine, means, None if into is not None else sources, pool, buffers)


@dataclass(slots=True)
class Reduction:
    """A reduce-scatter in flight."""

    _work: Work
    _messages: Sequence[_Message]  # that this rank owns
    _means: Sequence[Tensor]  # the memory in which the mean of each of them arrives
    # Where the mean is copied to, in place of the pieces that were packed; None if it is not.
    _sources: Sequence[Tensor | None] | None
    _pool: BufferPool
    _buffers: Sequence[Tensor]

    def wait(self) -> None:
        """Wait until the mean is where it belongs; on an accelerator, make the current stream wait."""
        with profile_range("onecopy.add"):
            self._work.wait()
            if self._sources is not None:
                self._copy_back(self._sources)
        self._pool.give_back(*self._buffers)

    def _copy_back(self, sources: Sequence[Tensor | None]) -> None:
        """Replace the pieces of this rank that were packed by their mean."""
        targets, values = [], []
        for message, mean in zip(self._messages, self._means, strict=True):
            for piece in message.pieces if message.packed else ():
                target = _values(piece, sources)
                if target is not None:
                    start = piece.offset - message.start
                    targets.append(target)
                    values.append(mean[start : start + piece.numel])
        if targets:
            torch._foreach_copy_(targets, values)


def _cut(pieces: Sequence[Piece], direct_numel: int) -> list[_Message]:
    """The messages of one owner: large pieces alone, and small ones packed with their neighbours."""
    messages: list[_Message] = []
    for piece in pieces:
        packed = piece.numel < direct_numel
        if packed and messages and messages[-1].packed:
            messages[-1].pieces.append(piece)
            messages[-1].stop = piece.offset + piece.numel
        else:
            messages.append(_Message(piece.offset, piece.offset + piece.numel, [piece], packed))
    return messages


def _values(piece: Piece, sources: Sequence[Tensor | None]) -> Tensor | None:
    """The values of a piece; None if its source is missing."""
    source = sources[piece.source]
    return None if source is None else source[piece.start : piece.stop]


def _lying(piece: Piece, sources: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor:
    """The values of a piece to send from where they lie."""
    values = _values(piece, sources)
    return torch.zeros(piece.numel, dtype=dtype) if values is None else values.to(dtype)
