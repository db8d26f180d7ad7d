"""One rank of a measurement, which ``compare.py`` starts with torchrun; it writes rows as JSON.

``time`` measures the steps of variants that take turns, and the bytes that they send. ``memory`` measures the tensors
of one variant. ``save`` measures how long gathering the state and saving take.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import resource
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machines import sent_bytes
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from variants import MEMORY_ONLY, VARIANTS, YARDSTICK, Sizes, Trained

from onecopy import ZeroRedundancyOptimizer, checkpoint

COUNTED = "ONECOPY_BENCH_COUNTED"
"""The environment variable that tells the ranks that they are in their own network namespace."""

TIMED = 2
"""The number of timed steps in a turn."""

COMPARED = 10
"""The number of steps after which parameters are compared with DDP's."""

KINDS = ("parameters", "gradients", "state", "other")

Row = dict[str, Any]


def iterate(trained: Trained, sizes: Sizes, number: int) -> tuple[float, float]:
    """Run one iteration, and return the times at which its backward pass and its step ended."""
    tokens = sizes.tokens(dist.get_rank(), number)
    trained.zero()
    trained.forward_backward(tokens)
    middle = time.perf_counter()
    trained.step()
    return middle, time.perf_counter()


def error_of(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


# Time


@dataclass(slots=True)
class Timed:
    """A variant and its measurements."""

    name: str
    trained: Trained | None = None
    error: str = ""
    difference: float = 0.0
    seconds: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    wire: list[float] = field(default_factory=list)

    def take_turn(self, sizes: Sizes, number: int) -> None:
        """Run a few steps in a row: all but the first are timed, and the bytes of all are counted.

        So communication that a step leaves in flight for the next one (``overlap_forward``) is inside the timed steps.
        """
        assert self.trained is not None
        dist.barrier()
        sent, first, backward = sent_bytes("lo"), (1 + TIMED) * number, 0.0
        iterate(self.trained, sizes, first)
        idle = idle_seconds()
        start = last = time.perf_counter()
        for count in range(TIMED):
            middle, end = iterate(self.trained, sizes, first + 1 + count)
            backward += middle - last
            last = end
        self.idle.append((idle_seconds() - idle) / (last - start) / (os.cpu_count() or 1))
        self.seconds.append((last - start) / TIMED)
        self.backward.append(backward / TIMED)
        self.step.append((last - start - backward) / TIMED)
        self.trained.finish()
        dist.barrier()
        self.wire.append((sent_bytes("lo") - sent) / (1 + TIMED))


def idle_seconds() -> float:
    """Return the idle time of all cores of this machine so far, added up."""
    idle, waiting_for_disks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[4:6]
    return (int(idle) + int(waiting_for_disks)) / os.sysconf("SC_CLK_TCK")


def prepare(names: Sequence[str], sizes: Sizes, warm_up: int) -> list[Timed]:
    """Construct all variants from the same weights, train each for ``warm_up`` steps, and compare it with DDP."""
    origin, found = sizes.make(), []
    reference: list[Tensor] = []
    for name in sorted(names, key=lambda name: name != YARDSTICK):
        timed = Timed(name)
        found.append(timed)
        try:
            timed.trained = VARIANTS[name](copy.deepcopy(origin))
            for number in range(warm_up):
                iterate(timed.trained, sizes, number)
            timed.trained.finish()
            values = [value.detach() for value in timed.trained.parameters()]
            reference = reference or [value.clone() for value in values]
            timed.difference = max(
                (one.float() - other.float()).abs().max().item() for one, other in zip(values, reference, strict=True)
            )
        except Exception as error:
            timed.trained, timed.error = None, error_of(error)
    return sorted(found, key=lambda timed: list(VARIANTS).index(timed.name))


def measure_time(names: Sequence[str], sizes: Sizes, rounds: int, warm_up: int) -> list[Row]:
    """Measure all variants in turns, in an order that is another one in every round."""
    prepared = prepare(names, sizes, warm_up)
    running = [timed for timed in prepared if timed.trained is not None]
    for number in range(rounds):
        order = torch.randperm(len(running), generator=torch.Generator().manual_seed(time.time_ns()))
        dist.broadcast(order, 0)
        for position in order.tolist():
            running[position].take_turn(sizes, COMPARED + number)
    counted = bool(os.environ.get(COUNTED))
    return [
        {
            "kind": "time",
            "variant": timed.name,
            "error": timed.error,
            "difference": timed.difference,
            "seconds": timed.seconds,
            "backward": timed.backward,
            "step": timed.step,
            "idle": timed.idle,
            "wire": timed.wire if counted else [],
        }
        for timed in prepared
    ]


# Memory


def measure_memory(name: str, sizes: Sizes) -> list[Row]:
    """Train for a few steps and measure tensors at the call of ``step()``, after it, and at the peak of a step."""
    trained = {**VARIANTS, **MEMORY_ONLY}[name](sizes.make())
    for number in range(3):
        iterate(trained, sizes, number)
    trained.finish()

    def step() -> None:
        iterate(trained, sizes, 3)
        trained.finish()  # torch's profiler crashes if it ends before a collective

    growth = peak_growth(step)
    between = sum(bytes_by_kind(trained).values())
    trained.zero()
    trained.forward_backward(sizes.tokens(dist.get_rank(), 4))
    found = bytes_by_kind(trained)
    trained.step()
    trained.finish()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    about = {"kind": "memory", "variant": name, "rank": dist.get_rank()}
    return [{**about, **found, "between": between, "peak": between + growth, "resident": resident}]


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the address and the bytes of each storage of some tensors; of sharded ones, that of their local part."""
    found = {}
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", getattr(tensor, "local", tensor))
        if isinstance(local, Tensor) and local.layout is torch.strided and local.device.type != "meta":
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def bytes_by_kind(trained: Trained) -> dict[str, int]:
    """Return the bytes of all tensors by kind; tensors that are no parameter, gradient or state are "other"."""
    gc.collect()
    everything = storages(value for value in gc.get_objects() if isinstance(value, Tensor))
    params = storages(trained.model.parameters())
    grads = storages([param.grad for param in trained.model.parameters()] + tree_leaves(list(trained.gradients())))
    state = storages(tree_leaves([dict(each) for each in trained.state()]))
    state = {address: size for address, size in state.items() if address not in params}
    known = params.keys() | grads.keys() | state.keys()
    other = sum(size for address, size in everything.items() if address not in known)
    return dict(zip(KINDS, [*(sum(kind.values()) for kind in (params, grads, state)), other], strict=True))


def peak_growth(run: Callable[[], object]) -> int:
    """Return the largest number of bytes by which tensors grow during ``run``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


# Saving


def measure_saving(names: Sequence[str], sizes: Sizes, rounds: int, root: Path) -> list[Row]:
    """Measure each variant in turn. It is constructed anew in every round: together they need too much memory."""
    found: dict[str, dict[str, list[float]]] = {name: {"consolidate": [], "save": []} for name in names}
    errors: dict[str, str] = {}
    for number in range(rounds):
        for place, name in enumerate(names):
            if name in errors:
                continue
            folder = root / f"{number}-{place}"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                trained = VARIANTS[name](sizes.make())
                iterate(trained, sizes, 0)
                trained.finish()
                if hasattr(trained.optimizer, "consolidate_state_dict"):
                    found[name]["consolidate"].append(timed_by_all(gather, trained.optimizer))
                found[name]["save"].append(timed_by_all(save, name, trained, folder))
                del trained
            except Exception as error:
                errors[name] = error_of(error)
            gc.collect()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root, ignore_errors=True)
    return [
        {"kind": "save", "variant": name, "error": errors.get(name, "")}
        | {part: statistics.median(seconds) for part, seconds in parts.items() if seconds}
        for name, parts in found.items()
    ]


def timed_by_all(action: Callable[..., object], *arguments: Any) -> float:
    """Return the seconds until all ranks have finished an action."""
    dist.barrier()
    start = time.perf_counter()
    action(*arguments)
    dist.barrier()
    return time.perf_counter() - start


def gather(optimizer: Any) -> None:
    """Gather the whole state on rank 0, with any class that has ``consolidate_state_dict``."""
    if type(optimizer).__module__.startswith("fairscale"):
        optimizer.consolidate_state_dict(recipient_rank=0)
    else:
        optimizer.consolidate_state_dict(to=0)


def save(name: str, trained: Trained, folder: Path) -> None:
    """Save model and optimizer in the usual way of a variant, and flush the files to the disk."""
    if isinstance(trained.optimizer, ZeroRedundancyOptimizer):
        checkpoint.save(folder, 1, model=trained.model, optimizer=trained.optimizer)
    elif name.startswith("DeepSpeed"):
        trained.model.save_checkpoint(str(folder), tag="all")  # type: ignore[operator]
    elif name.startswith("FSDP2"):
        from torch.distributed.checkpoint.state_dict import get_state_dict
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        model, optimizer = get_state_dict(trained.model, trained.optimizer)
        dcp_save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "dcp")
    else:
        if hasattr(trained.optimizer, "consolidate_state_dict"):
            gather(trained.optimizer)
        if dist.get_rank() == 0:
            state = {"model": trained.model.state_dict(), "optimizer": trained.optimizer.state_dict()}
            with (folder / "all.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())


def main() -> None:
    """Measure, and write the rows of rank 0 to a file; for memory, the rows of every rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["time", "memory", "save"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--names", required=True, help="variants, as JSON")
    parser.add_argument("--sizes", required=True, help="the model's sizes, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=COMPARED, help="steps before the first timed step")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names, sizes = json.loads(options.names), Sizes(**json.loads(options.sizes))
    if options.kind == "time":
        rows = measure_time(names, sizes, options.rounds, options.warm_up)
    elif options.kind == "memory":
        rows = measure_memory(names[0], sizes)
    else:
        rows = measure_saving(names, sizes, options.rounds, options.folder / "saved")
    if options.kind == "memory" or dist.get_rank() == 0:
        about = {"ranks": dist.get_world_size(), "sizes": asdict(sizes)}
        lines = [json.dumps({**about, **row}) for row in rows]
        (options.folder / f"{dist.get_rank()}.jsonl").write_text("\n".join(lines) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
