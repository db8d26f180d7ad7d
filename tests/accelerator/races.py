"""Reports accesses of device memory that no stream order, event or synchronisation puts in an order.

Every stream has a vector clock: a number per stream, of the last piece of its work that is known to be done before the
stream's next piece of work. Every block of device memory remembers, range by range, the last write and the last read
of each stream. All of it is computed when work is queued, so a report does not depend on the order in which queued work
happens to run.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Clock = dict[int, int]
MOST_RUNS = 4096
"""Number of separate ranges that one strided access is divided into; above it, the access counts as one whole range."""


class Access(NamedTuple):
    """One piece of work that touched memory."""

    stream: int
    epoch: int
    work: str

    def before(self, stream: int, clock: Clock) -> bool:
        """Whether this access is known to be over when work with this clock starts on this stream."""
        return self.stream == stream or self.epoch <= clock.get(self.stream, 0)


@dataclass(frozen=True)
class Report:
    """A mistake that was found: "race", "use after free", "unwritten", "pinned source" or "collective order"."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Region:
    """A range of bytes with its last write and the last read of each stream."""

    start: int
    end: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)

    @property
    def accesses(self) -> list[Access]:
        """All of them."""
        return [*self.reads.values(), *([self.write] if self.write else [])]

    def cut(self, place: int) -> Region:
        """Return the part from a place on; this region ends there from now on."""
        rest, self.end = Region(place, self.end, self.write, dict(self.reads)), place
        return rest


@dataclass
class Block:
    """An allocation, and the accesses of the allocation that was at the same address before."""

    size: int
    stream: int
    regions: list[Region]
    stale: dict[int, Access] = field(default_factory=dict)


@functools.lru_cache(maxsize=65536)
def runs(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[tuple[int, int]]:
    """Return the byte ranges that a strided tensor covers in its storage."""
    if 0 in sizes:
        return []
    dims = sorted((stride * itemsize, size) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride)
    start, run = offset * itemsize, itemsize
    outer: list[tuple[int, int]] = []
    for stride, size in dims:
        if stride == run and not outer:
            run *= size
        else:
            outer.append((stride, size))
    if math.prod(size for _, size in outer) > MOST_RUNS:
        return [(start, start + run + sum(stride * (size - 1) for stride, size in outer))]
    places = itertools.product(*(range(0, stride * size, stride) for stride, size in outer))
    return sorted((start + sum(place), start + sum(place) + run) for place in places)


class Races:
    """The clocks of all streams and of the host, the shadow of device memory, and the reports."""

    def __init__(self) -> None:
        self.clocks: dict[int, Clock] = {}
        self.host: Clock = {}
        self.blocks: dict[int, Block] = {}
        self.reports: dict[Report, int] = {}

    def report(self, kind: str, text: str) -> None:
        """Note a mistake; equal ones are counted."""
        found = Report(kind, text)
        self.reports[found] = self.reports.get(found, 0) + 1

    def forget_history(self) -> None:
        """Start anew on a device that has finished all its work; unwritten memory stays unwritten."""
        self.clocks.clear()
        self.host.clear()
        self.reports.clear()
        past = Access(-1, 0, "earlier work")
        for block in self.blocks.values():
            block.stale.clear()
            block.regions = [Region(r.start, r.end, r.write and past) for r in block.regions]

    def clock(self, stream: int) -> Clock:
        """Return the clock of a stream."""
        return self.clocks.setdefault(stream, {})

    @staticmethod
    def merge(into: Clock, other: Clock) -> None:
        """Let ``into`` know of everything that ``other`` knows of."""
        for stream, epoch in other.items():
            if into.get(stream, 0) < epoch:
                into[stream] = epoch

    def allocate(self, address: int, size: int, stream: int) -> None:
        """A block is given to a new tensor; the accesses of the old one become stale."""
        old = self.blocks.get(address)
        stale = {} if old is None else old.stale
        for region in [] if old is None else old.regions:
            for access in region.accesses:
                if access.stream not in stale or stale[access.stream].epoch < access.epoch:
                    stale[access.stream] = access
        self.blocks[address] = Block(size, stream, [Region(0, size)], stale)

    def reuse(self, address: int, stream: int) -> None:
        """A freed block may from now on belong to another tensor of its stream: report accesses that are not over."""
        clock = dict(self.clock(stream))
        self.merge(clock, self.host)
        for region in self.blocks[address].regions:
            for access in region.accesses:
                if not access.before(stream, clock):
                    text = f"the memory that {access.work} uses was freed, and stream {stream & 0xFFFFF} may give it to"
                    text += " another tensor before that is done: record_stream is missing"
                    self.report("use after free", text)
                    region.reads.pop(access.stream, None)
                    if region.write is access:
                        region.write = Access(-1, 0, access.work)

    def release(self, address: int, finished: Clock) -> None:
        """The allocator has seen that streams have finished with a freed block: these accesses are over."""
        block = self.blocks[address]
        for region in block.regions:
            region.reads = {s: access for s, access in region.reads.items() if access.epoch > finished.get(s, 0)}
            if region.write is not None and region.write.epoch <= finished.get(region.write.stream, 0):
                region.write = Access(-1, 0, region.write.work)

    def access(
        self, stream: int, work: str, reads: Iterable[tuple[int, Any]], writes: Iterable[tuple[int, Any]]
    ) -> None:
        """Note that a piece of work on a stream reads and writes ranges, each given as base address and ranges."""
        clock = self.clock(stream)
        self.merge(clock, self.host)
        epoch = clock.get(stream, 0) + 1
        clock[stream] = epoch
        access = Access(stream, epoch, work)
        for touched, is_write in ((reads, False), (writes, True)):
            for address, ranges in touched:
                self._touch(access, clock, address, ranges, writes=is_write)

    def _touch(self, access: Access, clock: Clock, address: int, ranges: Any, *, writes: bool) -> None:
        block = self.blocks.get(address)
        if block is None or not ranges:
            return
        for old in block.stale.values():
            if not old.before(access.stream, clock):
                self._conflict("use after free", access, old, "of memory that was freed and given to another tensor")
        for start, end in ranges:
            touched = self._split(block.regions, start, end)
            for region in block.regions[touched]:
                self._compare(region, access, clock, writes=writes)
            if writes:
                block.regions[touched] = [Region(start, end, access)]
            else:
                for region in block.regions[touched]:
                    region.reads[access.stream] = access

    def _compare(self, region: Region, access: Access, clock: Clock, *, writes: bool) -> None:
        if region.write is None:
            if not writes:
                self.report("unwritten", f"{access.work} reads memory that nothing has written")
        elif not region.write.before(access.stream, clock):
            self._conflict("race", access, region.write, "which wrote the same memory")
        if writes:
            for read in region.reads.values():
                if not read.before(access.stream, clock):
                    self._conflict("race", access, read, "which reads the same memory")

    def _conflict(self, kind: str, new: Access, old: Access, what: str) -> None:
        self.report(kind, f"{new.work} is not ordered after {old.work}, {what}")

    @staticmethod
    def _split(regions: list[Region], start: int, end: int) -> slice:
        """Cut regions at both ends of a range and return the positions of those inside it."""
        first = bisect.bisect_right(regions, start, key=lambda r: r.start) - 1
        last = bisect.bisect_left(regions, end, key=lambda r: r.start)
        if regions[first].start < start:
            regions.insert(first + 1, regions[first].cut(start))
            first, last = first + 1, last + 1
        if regions[last - 1].end > end:
            regions.insert(last, regions[last - 1].cut(end))
        return slice(first, last)
