"""Registers the simulated accelerator as torch's device "sim", and runs programs on it under chosen conditions."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration

from tests.accelerator import build, process_group
from tests.accelerator.counters import Step
from tests.accelerator.operators import Operators
from tests.accelerator.races import Report
from tests.accelerator.scheduler import IDLE, Scheduler


class Device:
    """The parts of the device in this process."""

    def __init__(self) -> None:
        self.core = build.load()
        self.scheduler = Scheduler(self.core)
        self.core.on_synchronize(self.scheduler.synchronize)
        backend_registration.rename_privateuse1_backend("sim")
        self.operators = Operators(self.core, self.scheduler)
        torch._register_device_module("sim", _module(self.core))
        backend_registration.generate_methods_for_privateuse1_backend(
            for_tensor=True, for_module=True, for_storage=True
        )
        process_group.register(self.core, self.scheduler)


@functools.cache
def load() -> Device:
    """Build and register the device in this process, once."""
    return Device()


def _module(core: Any) -> Any:
    """Return the module ``torch.sim``."""
    sim: Any = types.ModuleType("torch.sim")

    def generator(device: Any = None) -> torch.Generator:
        index = torch.device(device).index if device is not None and not isinstance(device, int) else device
        found: torch.Generator = core.default_generator(core.current_device() if index is None else index)
        return found

    def manual_seed_all(seed: int) -> None:
        for index in range(4):
            core.default_generator(index).manual_seed(seed)

    sim.is_available = sim.is_initialized = lambda: True
    sim._is_in_bad_fork = lambda: False
    sim._lazy_init = lambda: None
    sim.device_count = lambda: 4
    sim.current_device = core.current_device
    sim.manual_seed_all = manual_seed_all
    sim.get_rng_state = lambda device=None: generator(device).get_state()
    sim.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    sim.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    sim.memory_allocated = lambda: core.memory()[0]
    sim.max_memory_allocated = lambda: core.memory()[1]
    sim.reset_peak_memory_stats = core.reset_peak
    return sim


@dataclass
class Run:
    """A simulation: its reports and counts."""

    scheduler: Scheduler
    core: Any
    outside: Step = field(default_factory=Step)  # what was counted outside of all steps
    reports: list[Report] = field(default_factory=list)  # the mistakes that ``collect()``, or the end, has found

    @contextlib.contextmanager
    def step(self) -> Iterator[Step]:
        """Count what the calls inside ask for."""
        step = Step()
        self.scheduler.read_log()  # what was recorded before belongs to the step before
        self.core.reset_peak()
        allocated, _, held, _ = self.core.memory()
        self.scheduler.step, self.scheduler.step_number = step, self.scheduler.step_number + 1
        try:
            yield step
        finally:
            _, peak, _, peak_held = self.core.memory()
            step.peak, step.peak_held = peak - allocated, peak_held - held
            self.scheduler.step = self.outside

    def collect(self) -> list[Report]:
        """Finish all work and return the mistakes found so far."""
        self.scheduler.finish()
        self.reports = list(self.scheduler.races.reports)
        return self.reports


@contextlib.contextmanager
def simulate(seed: int = 0, host_ahead: int | str = "far", idle: float = IDLE) -> Iterator[Run]:
    """Run a program on the device.

    Args:
        seed: of the order in which queued work runs.
        host_ahead: pieces of work that may be left undone when a call returns: 0 is lockstep, a number is random up to
            it, "far" leaves everything to the next synchronisation, and runs only what that needs.
        idle: seconds without a call of the host after which the device works on its own.
    """
    device = load()
    scheduler = device.scheduler
    scheduler.configure(seed, None if host_ahead == "far" else int(host_ahead), idle)
    run = Run(scheduler, device.core)
    scheduler.step = run.outside
    try:
        yield run
        run.collect()
    finally:
        scheduler.ahead = 0
        scheduler.step = Step()
