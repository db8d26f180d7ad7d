"""Queues of work per stream, run later in an order that only streams and events constrain."""

from __future__ import annotations

import collections
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.accelerator import counters
from tests.accelerator.counters import Step, Synchronization
from tests.accelerator.races import Clock, Races

ALLOCATED, FREED, USED_BY, FREED_LATER, RECORDED, WAITED, OBSERVED, MOVED = range(8)
IDLE = 0.02
"""Seconds without a call of the host after which the device works on its own, if a simulation says nothing else."""
STUCK = 60.0
"""Seconds without progress after which a host that waits gives up."""

Place = tuple[int, int]
"""A stream, and the number of pieces of work on it that must be done."""


@dataclass(slots=True, eq=False)
class Item:
    """One piece of queued work: a function to run, or a place to wait for."""

    name: str
    site: str
    run: Callable[[], Any] | None
    after: Place | None = None
    poll: Callable[[], bool] | None = None  # what ``run`` has returned: whether the work is done


class Scheduler:
    """All queues of one process. Queued work runs inside the calls that queue or wait, chosen by a seeded generator."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.lock = threading.RLock()
        self.races = Races()
        self.step = Step()  # where calls are counted
        self.step_number = 0
        self.ahead: int | None = 0  # how much work may be left undone when the host goes on; None for all of it
        self.idle = IDLE
        self.errors: list[str] = []
        self._random = random.Random(0)
        self._queues = collections.defaultdict[int, collections.deque[Item]](collections.deque)
        self._queued: collections.Counter[int] = collections.Counter()
        self._done: collections.Counter[int] = collections.Counter()
        self._priority: dict[int, float] = {}
        self._events: dict[int, tuple[int, Place, Clock, int]] = {}
        self._unsignalled = collections.defaultdict[int, collections.deque[tuple[int, int, int]]](collections.deque)
        self._used = collections.defaultdict[int, list[int]](list)
        self._freed = collections.defaultdict[int, list[tuple[int, int]]](list)
        self._releases: list[tuple[int, int, int, dict[int, int], Clock]] = []
        self._touched = time.monotonic()
        threading.Thread(target=self._work_when_idle, daemon=True, name="simulated device").start()

    def configure(self, seed: int, ahead: int | None, idle: float) -> None:
        """Finish all work and start anew with these settings."""
        self.finish()
        with self.lock:
            self._random.seed(seed)
            self.ahead, self.idle = ahead, idle
            self._priority.clear()
            self.races.forget_history()
            self._events = {event: (v, place, {}, 0) for event, (v, place, _, _) in self._events.items()}

    # Queueing

    def enqueue(
        self,
        name: str,
        run: Callable[[], Any],
        reads: Iterable[tuple[int, Any]] = (),
        writes: Iterable[tuple[int, Any]] = (),
        *,
        shape: Any = "",
        stream: int | None = None,
        where: str | None = None,
    ) -> Place:
        """Queue work on a stream and let the device run as far as the settings say."""
        where = where or counters.site()
        with self.lock:
            self.read_log()
            target = self.core.current_stream() if stream is None else stream
            self.races.access(target, f"{name}{shape} on stream {target & 0xFFFFF} at {where}", reads, writes)
            place = self._append(target, Item(name, where, run))
            self._run_ahead()
            return place

    def wait_stream(self, waiting: int, other: int) -> None:
        """Make a stream wait for all that another one has queued."""
        with self.lock:
            self.read_log()
            self._wait_for(waiting, (other, self._queued[other]), self.races.clock(other))

    def _append(self, stream: int, item: Item) -> Place:
        self._touched = time.monotonic()
        self._queues[stream].append(item)
        self._queued[stream] += 1
        return stream, self._queued[stream]

    def _wait_for(self, waiting: int, place: Place, clock: Clock) -> None:
        self.races.merge(self.races.clock(waiting), clock)
        if waiting != place[0] and not self._is_done(place):
            self._append(waiting, Item("wait", "", None, place))

    def _is_done(self, place: Place) -> bool:
        return self._done[place[0]] >= place[1]

    def read_log(self) -> None:
        """Take over what the C++ part has noted since the last call, in the host's order."""
        with self.lock:
            for entry in self.core.take_log():
                self._take_over(*entry)
            self._release()

    def _take_over(self, kind: int, first: int, second: int, third: int) -> None:
        if kind == ALLOCATED:
            self._reuse(third)
            self.races.allocate(first, second, third)
        elif kind == FREED:
            self._freed[third].append((first, second))
        elif kind == USED_BY:
            self._used[first].append(second)
        elif kind == FREED_LATER:
            streams = self._used.pop(first)
            clock = {s: self.races.clock(s).get(s, 0) for s in streams}
            self._releases.append((first, second, third, {s: self._queued[s] for s in streams}, clock))
        elif kind == RECORDED:
            self._record(first, second, third)
        elif kind == WAITED:
            if first in self._events:
                _, place, clock, _ = self._events[first]
                self._wait_for(third, place, clock)
        elif kind == OBSERVED:
            self.races.merge(self.races.host, self._events[first][2])
        else:
            self._move(first, second, third)

    def _reuse(self, stream: int) -> None:
        """Treat all freed memory of a stream as reused: a real allocator may give any of it to the next tensor."""
        for address, size in self._freed.pop(stream, ()):
            self.races.reuse(address, stream)
            self._append(stream, Item("reuse", "", functools.partial(self.core.poison, address, size)))

    def _record(self, event: int, version: int, stream: int) -> None:
        place = (stream, self._queued[stream])
        self.races.merge(self.races.clock(stream), self.races.host)
        self._events[event] = (version, place, dict(self.races.clock(stream)), self.step_number)
        if self._is_done(place):
            self.core.event_done(event, version)
        else:
            self._unsignalled[stream].append((place[1], event, version))

    def _move(self, to: int, source: int, size: int) -> None:
        """A storage was resized: its bytes move on the stream of the new block."""
        stream = self.races.blocks[to].stream
        shadow = self.races.blocks[source].regions
        ranges = [(r.start, min(r.end, size)) for r in shadow if r.write is not None and r.start < size]
        self.races.access(stream, f"resize on stream {stream & 0xFFFFF}", [(source, ranges)], [(to, ranges)])
        self._append(stream, Item("resize", "", lambda: self.core.move(to, source, size)))

    def _release(self) -> None:
        """Give blocks back that were freed while other streams used them, once those streams are done."""
        for each in list(self._releases):
            address, size, stream, places, clock = each
            if all(map(self._is_done, places.items())):
                self._releases.remove(each)
                self.races.release(address, clock)
                self._freed[stream].append((address, size))
                self.core.release(address)

    # Running

    def _run_ahead(self) -> None:
        if self.ahead is not None:
            limit = self._random.randint(0, self.ahead)
            while sum(map(len, self._queues.values())) > limit and self._run_one(list(self._queues)):
                pass

    def _run_one(self, streams: Iterable[int]) -> bool:
        """Run the first piece of work of one of these streams; False if none of them can go on."""
        if self._random.random() < 0.1:
            self._priority.clear()
        waiting = [stream for stream in streams if self._queues[stream]]
        for stream in waiting:
            self._priority.setdefault(stream, self._random.random())
        return any(self._try(stream) for stream in sorted(waiting, key=self._priority.__getitem__))

    def _try(self, stream: int) -> bool:
        queue = self._queues[stream]
        item = queue[0]
        try:
            if item.after is not None and not self._is_done(item.after):
                return False
            if item.poll is not None and not item.poll():
                return False
            if item.run is not None and item.poll is None:
                started = item.run()
                if callable(started):
                    item.poll = started
                    return True
        except Exception as error:
            self.errors.append(f"{item.name}, queued at {item.site}, failed on the device: {error}")
        queue.popleft()
        self._finish(stream, 1)
        return True

    def _finish(self, stream: int, count: int) -> None:
        """Note that so many pieces of work of a stream are done, and signal the events after them."""
        self._done[stream] += count
        signals = self._unsignalled[stream]
        while signals and signals[0][0] <= self._done[stream]:
            _, event, version = signals.popleft()
            self.core.event_done(event, version)

    def forget_work(self) -> list[Item]:
        """Give up all queued work, as the end of a process does, and return it."""
        with self.lock:
            self.read_log()
            forgotten = [item for queue in self._queues.values() for item in queue]
            for stream, queue in self._queues.items():
                self._finish(stream, len(queue))
                queue.clear()
            self.errors.clear()
        return forgotten

    def _needed(self, places: Sequence[Place]) -> list[int]:
        """Return the streams on which work must run for these places to be reached."""
        needed: list[int] = []
        places = list(places)
        while places:
            stream, position = places.pop()
            if self._is_done((stream, position)) or stream in needed:
                continue
            needed.append(stream)
            item = self._queues[stream][0]
            if item.after is not None:
                places.append(item.after)
        return needed

    def _run_until(self, places: Sequence[Place]) -> None:
        deadline = time.monotonic() + STUCK
        while True:
            with self.lock:
                self.read_log()
                needed = self._needed(places)
                if not needed:
                    return
                self._touched = time.monotonic()
                moved = self._run_one(needed if self.ahead is None else list(self._queues))
            if moved:
                deadline = time.monotonic() + STUCK
            elif time.monotonic() > deadline:
                heads = {s: (q[0].name, q[0].site, q[0].after) for s, q in self._queues.items() if q}
                raise RuntimeError(f"the simulated device is stuck; the first piece of work of each stream: {heads}")
            else:
                time.sleep(3e-5)

    def _work_when_idle(self) -> None:
        """A host that waits elsewhere does not stop the device."""
        while True:
            time.sleep(IDLE / 4)
            if time.monotonic() - self._touched < self.idle:
                continue
            with self.lock:
                self.read_log()
                for _ in range(64):
                    if not self._run_one(list(self._queues)):
                        break

    # Waiting

    def synchronize(self, kind: str, which: int) -> bool:
        """Let the host wait for a "stream", a "device" or an "event", or "query" whether a stream is done."""
        with self.lock:
            self.read_log()
            if kind == "query":
                self._run_ahead()
                done = not self._queues[which]
                if done:
                    self.races.merge(self.races.host, self.races.clock(which))
                return done
            if kind == "event":
                _, place, clock, step = self._events[which]
                self.step.synchronizations.append(Synchronization(kind, counters.site(), self.step_number - step))
        if kind == "event":
            self._wait_on_host([place], clock)
        else:
            self.wait_for(kind, *([which] if kind == "stream" else [s for s in list(self._queued) if s >> 20 == which]))
        return True

    def wait_for(self, kind: str, *streams: int) -> None:
        """Let the host wait for streams, because of an operator or copy of this name."""
        self.step.synchronizations.append(Synchronization(kind, counters.site()))
        self._wait_on_streams(streams)

    def finish(self) -> None:
        """Run all work that is queued, without counting a synchronisation."""
        self.read_log()
        self._wait_on_streams(list(self._queued))

    def _wait_on_streams(self, streams: Iterable[int]) -> None:
        with self.lock:
            self.read_log()
            places, clock = [(s, self._queued[s]) for s in streams], Clock()
            for stream in streams:
                self.races.merge(clock, self.races.clock(stream))
        self._wait_on_host(places, clock)

    def _wait_on_host(self, places: Sequence[Place], clock: Clock) -> None:
        self._run_until(places)
        with self.lock:
            self.races.merge(self.races.host, clock)
            if self.errors:
                errors, self.errors = self.errors, []
                raise RuntimeError("\n".join(errors))
