"""Compares a training program on the simulated accelerator with the same program on the CPU; used in workers."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.accelerator import device
from tests.accelerator.cases import BY_NAME, HALF_ROUNDING
from tests.accelerator.process_group import Communicator
from tests.accelerator.training import ROUNDING, Case, Place, on_device

Setting = tuple[int, int | str]
"""A seed of the order in which queued work runs, and how far the host runs ahead."""

_abandoned: list[Any] = []
"""Process groups with collectives that other ranks never joined: their destructors would wait for them."""


@contextlib.contextmanager
def abandoning_on_failure() -> Iterator[None]:
    """After an exception inside, forget all queued work of the device, as the end of a process does."""
    used: list[Any] = []
    observer = lambda communicator, *_: used.append(communicator)  # noqa: E731
    Communicator.observers.append(observer)
    try:
        yield
    except BaseException:
        _abandoned.extend({*used, *device.load().scheduler.forget_work()})
        raise
    finally:
        Communicator.observers.remove(observer)


@functools.cache
def on_cpu(name: str) -> list[Tensor]:
    """The results of a program on the CPU, with gloo."""
    return BY_NAME[name].run(Place(torch.device("cpu"), dist.new_group(backend="gloo")))


@contextlib.contextmanager
def simulated(setting: Setting) -> Iterator[device.Run]:
    """Run a program on the device under a setting."""
    seed, ahead = setting
    with warnings.catch_warnings(), device.simulate(seed=seed, host_ahead=ahead) as run:
        # Of torch itself: the model was made on another stream than it is trained on.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        yield run


def check(name: str, settings: list[Setting]) -> None:
    """Train on the CPU, then on the device under each setting, and compare."""
    case = BY_NAME[name]
    expected = on_cpu(name)
    for setting in settings:
        what = f"{name}, seed {setting[0]}, host ahead {setting[1]}"
        with simulated(setting) as run:
            actual = case.run(on_device())
        assert run.reports == [], f"{what}:\n" + "\n".join(map(str, run.reports[:10]))
        compare(case, actual, expected, what)


def compare(case: Case, actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """Bit by bit with two ranks, else within rounding."""
    half = any(tensor.dtype is torch.bfloat16 for tensor in expected)
    tolerance = case.tolerance
    if dist.get_world_size() > 2:
        tolerance = max(tolerance, HALF_ROUNDING if half else ROUNDING)
    assert len(actual) == len(expected), what
    for position, (left, right) in enumerate(zip(actual, expected, strict=True)):
        where = f"{what}: tensor {position}"
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance, msg=functools.partial(_named, where))


def _named(where: str, text: str) -> str:
    return f"{where}: {text}"
