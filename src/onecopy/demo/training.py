"""One rank of a training: makes the model for a level, trains, saves checkpoints, and continues from the newest one."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from onecopy import checkpoint
from onecopy.checkpoint.directories import step_of
from onecopy.data_parallel import ShardedDataParallel
from onecopy.ddp_hooks import reduce_scatter_hook
from onecopy.demo import text
from onecopy.demo.model import SmallGPT
from onecopy.demo.settings import OPTIMIZERS, Result, Settings
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.planning.memory_report import KINDS
from onecopy.step.memory_report import measured_bytes

MEASURED_EVERY = 5
"""Steps between two measurements of memory."""

TIMED_STEPS = 20
"""The time of a step is the median of this many last ones."""


@dataclass(slots=True)
class Progress:
    """The state of a training after a step, as rank 0 shows it.

    Attributes:
        settings: the settings.
        ranks: the number of ranks.
        elements: the number of elements of all parameters.
        step: the number of steps that were made.
        losses: the mean loss of all ranks in each step.
        tokens_per_second: words that all ranks together learn from in a second.
        memory: for each rank, the bytes of its tensors by kind.
        resident: for each rank, the bytes of the process in memory.
        ddp: the bytes that plain DDP would need, by kind; empty for plain DDP itself.
        first_step: the step from which the training continued.
    """

    settings: Settings
    ranks: int
    elements: int
    step: int = 0
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    memory: list[dict[str, int]] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    ddp: dict[str, float] = field(default_factory=dict)
    first_step: int = 0


class StopRequest:
    """Notes that this process was asked to stop, so that the ranks stop together after a step and save.

    Attributes:
        is_made: whether it was asked to stop.
    """

    def __init__(self) -> None:
        self.is_made = False

    def listen(self) -> StopRequest:
        """Note SIGINT and SIGTERM from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        return self

    def _note(self, *_: object) -> None:
        self.is_made = True


def make(settings: Settings) -> tuple[Any, Optimizer, SmallGPT]:
    """Return the wrapped model, the optimizer and the model itself. All levels begin with the same values."""
    torch.manual_seed(0)
    module = SmallGPT(len(text.WORDS), settings.length, settings.width, settings.layers)
    if settings.precision != "fp32":
        module = module.to(torch.bfloat16)
    named, masters = list(module.named_parameters()), settings.precision == "bf16-master"
    optimizer_class, options = OPTIMIZERS[settings.optimizer]
    optimizer: Optimizer
    if settings.level == "3":
        optimizer = ZeroRedundancyOptimizer(named, optimizer_class, master_weights=masters, **options)
        return ShardedDataParallel(module, optimizer), optimizer, module
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if settings.level == "ddp":
        # torch has no optimizer with master weights: each rank is a group of its own, and keeps all of them.
        optimizer = (
            ZeroRedundancyOptimizer(named, optimizer_class, _group_of_this_rank(), master_weights=True, **options)
            if masters
            else optimizer_class(named, **options)
        )
    else:
        by = "element" if settings.level == "2" else "parameter"
        optimizer = ZeroRedundancyOptimizer(
            named,
            optimizer_class,
            shard_by=by,
            master_weights=masters,
            **options,
        )
        if settings.level == "2":
            model.register_comm_hook(optimizer, reduce_scatter_hook)
    return model, optimizer, module


def train(settings: Settings, stop: StopRequest, show: Callable[[Progress], None]) -> Result:
    """Train up to the last step, or until a rank is asked to stop. All ranks make this call together.

    Args:
        settings: the options of the training.
        stop: tells whether this process was asked to stop.
        show: is called after every step, on rank 0.
    """
    global_rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer, module = make(settings)
    losses = _resume(settings, model, optimizer)
    progress = Progress(settings, ranks, sum(param.numel() for param in module.parameters()))
    progress.step = progress.first_step = len(losses)
    progress.losses = losses
    seconds: list[float] = []
    mine, stopped = [0.0] * (len(KINDS) + 1), False
    while progress.step < settings.steps and not stopped:
        progress.step += 1
        begin = time.perf_counter()
        loss = _step(model, optimizer, settings, progress.step * ranks + global_rank)
        seconds.append(time.perf_counter() - begin)
        if not any(mine) or progress.step % MEASURED_EVERY == 0:
            mine = _measure(module, optimizer, progress)
        everyone = _gather([loss, float(stop.is_made), *mine])
        stopped = any(row[1] for row in everyone)
        losses.append(statistics.fmean(row[0] for row in everyone))
        progress.memory = [{kind: int(value) for kind, value in zip(KINDS, row[2:], strict=False)} for row in everyone]
        progress.resident = [int(row[-1]) for row in everyone]
        typical = statistics.median(seconds[-TIMED_STEPS:])
        progress.tokens_per_second = ranks * settings.batch * settings.length / typical
        if global_rank == 0:
            show(progress)
        last = stopped or progress.step == settings.steps
        if last or progress.step % settings.save_every == 0:
            extra = {**checkpoint.capture(), "losses": losses}
            checkpoint.save(
                settings.checkpoints,
                progress.step,
                model=model,
                optimizer=optimizer,
                extra=extra,
                keep=2,
                blocking=last,
            )
    return _result(progress, seconds, module)


def _step(model: nn.Module, optimizer: Optimizer, settings: Settings, seed: int) -> float:
    """Train on one batch, and return its loss on this rank."""
    words = text.batch(seed, settings.batch, settings.length + 1)
    optimizer.zero_grad()
    logits: Tensor = model(words[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def _resume(settings: Settings, model: nn.Module, optimizer: Optimizer) -> list[float]:
    """Load the newest checkpoint and return the losses of its steps. A finished training begins anew."""
    if dist.get_rank() == 0:
        newest = checkpoint.latest(settings.checkpoints)
        if newest is not None and (settings.fresh or step_of(newest) >= settings.steps):
            shutil.rmtree(settings.checkpoints)
        settings.result_file.unlink(missing_ok=True)
    dist.barrier()
    loaded = checkpoint.load(settings.checkpoints, model=model, optimizer=optimizer, missing_ok=True)
    if loaded is None:
        return []
    checkpoint.restore(loaded.extra)
    return list(loaded.extra["losses"])


def _measure(module: nn.Module, optimizer: Optimizer, progress: Progress) -> list[float]:
    """Return the bytes of this rank's tensors by kind, and the bytes of its process."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        report = optimizer.memory_report()
        measured = dict(report.measured)
        if progress.settings.level != "ddp":
            progress.ddp = {kind: report.ddp[kind] or 0.0 for kind in KINDS}
    else:
        measured = measured_bytes(module.parameters(), optimizer.state)
    return [*(float(measured[kind]) for kind in KINDS), float(resident_bytes())]


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory; where Linux does not tell, the most that there were."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * os.sysconf("SC_PAGE_SIZE")


def _gather(values: list[float]) -> list[list[float]]:
    """Return the values of every rank."""
    mine = torch.tensor(values, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return [row.tolist() for row in rows]


def _group_of_this_rank() -> Any:
    """Return a process group with this rank only. All ranks make all groups together."""
    groups = [dist.new_group([global_rank]) for global_rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def _result(progress: Progress, seconds: list[float], module: SmallGPT) -> Result:
    settings = progress.settings
    return Result(
        name=settings.name,
        settings=asdict(settings),
        ranks=progress.ranks,
        elements=progress.elements,
        losses=progress.losses,
        memory=progress.memory,
        ddp=progress.ddp,
        resident=progress.resident,
        milliseconds=1e3 * statistics.median(seconds[-TIMED_STEPS:]) if seconds else 0.0,
        tokens_per_second=progress.tokens_per_second,
        first_step=progress.first_step,
        text=text.as_text(module.write(25, text.NUMBER["."])),
        finished=progress.step == settings.steps,
    )
