"""Check onecopy on the accelerators of this machine: every level beside plain DDP, with counts and times.

Start one process for each of two or more devices of one machine, and paste the end of the output into a report::

    torchrun --nproc-per-node 2 examples/check_gpu.py

Each configuration trains a small GPT for a few steps. Its parameters are compared with those of DDP and the plain
optimizer, and must be the same on all ranks bit by bit. Then one step of each way to train is counted and timed. The
exit code is 0 only if all checks passed. ``--device cpu`` runs it without an accelerator.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import math
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Sizes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onecopy
from onecopy import MixedPrecision, ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint

STEPS, HALFWAY = 6, 3
ADAMW: dict[str, Any] = {"lr": 5e-3, "weight_decay": 0.1, "foreach": True, "eps": 1e-4}
"""A large eps: with a small one AdamW turns the rounding of a gradient near 0 into a whole update."""

TOLERANCE = {"fp32": 1e-6, "clipped": 1e-5, "scaled": 1e-5, "bf16": 2**-6}
"""The allowed difference from DDP in each mode. With bf16 it is two rounding steps of values above 1."""

SIZES = {"tiny": (Sizes(256, 32, 256, 2, 2, 8), 0.02), "small": (Sizes(8192, 512, 8192, 6, 4, 128), 25)}
SIZES["large"] = (Sizes(50304, 768, 50304, 12, 4, 512), 25)
"""The model and the size of its buckets in MB."""

Built = tuple[Any, Any]
Build = Callable[["Ranks", GPT], Built]


class OutOfStepError(Exception):
    """Some ranks have raised and others have not, or a rank has waited in vain: no collective may follow."""


class Ranks:
    """The processes: their device, their process groups, the model and the data."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device or torch.accelerator.current_accelerator() or "cpu")
        if options.device is None and self.device.type == "cpu":
            sys.exit("torch finds no accelerator here; --device cpu runs the checks on the CPU")
        if self.device.type != "cpu":
            self.device = torch.device(self.device.type, int(os.environ["LOCAL_RANK"]))
            torch.accelerator.set_device_index(self.device.index)
        self.api = torch.get_device_module(self.device)
        self.backend = options.backend or dist.get_default_backend_for_device(self.device)
        self.timeout = options.timeout
        gc.freeze()  # so that collecting the objects of a check does not look at all of torch
        dist.init_process_group(self.backend, timeout=datetime.timedelta(seconds=self.timeout))
        self.folder = Path(tempfile.gettempdir()) / f"onecopy-check-{os.environ['MASTER_PORT']}"
        shutil.rmtree(self.folder, ignore_errors=True)
        # A rank that has raised waits here for ranks that wait in a collective, until that collective times out.
        self.control = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=2 * self.timeout))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sizes, self.bucket_mb = SIZES[options.size]
        self.tokens = [self.sizes.tokens(self.rank, step).to(self.device) for step in range(STEPS)]

    def module(self, mode: str = "fp32") -> GPT:
        """Construct the model, always with the same weights."""
        module = self.sizes.make()
        if mode == "bf16":
            module.bfloat16().float()  # so that float32 copies begin with the same values everywhere
        return module.to(self.device)

    def attempt(self, call: Callable[[], Sequence[float]]) -> tuple[list[list[float]], str]:
        """Run a call on all ranks, and return the numbers that each rank returned and the error if all ranks raised."""
        error, numbers, start = "", [0.0], time.monotonic()
        try:
            numbers += call()
            self.api.synchronize()
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}".split("\n")[0]
            print(f"rank {self.rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            numbers = [2.0 if time.monotonic() - start > self.timeout else 1.0]
        gc.collect()
        mine = torch.tensor([*numbers, *[math.nan] * (32 - len(numbers))], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        try:
            dist.all_gather(rows, mine, group=self.control)
        except RuntimeError as exception:
            raise OutOfStepError(error or f"rank {self.rank}: another rank does not answer") from exception
        if {float(row[0]) for row in rows} not in ({0.0}, {1.0}):
            raise OutOfStepError(error or "another rank has raised; its error is above")
        return [row[1 : len(numbers)].tolist() for row in rows], error


# Ways to train: each takes the module and returns the wrapped model and the optimizer.


class MasterAdamW(AdamW):
    """AdamW on float32 copies of bf16 parameters: the reference for master weights."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        self.pairs = [(param, param.detach().float()) for param in params]
        super().__init__([copy for _, copy in self.pairs], **ADAMW)

    @torch.no_grad()
    def step(self, *_: Any) -> Any:
        """Update the copies, write them into the parameters, and forget the gradients."""
        for param, copy in self.pairs:
            copy.grad, param.grad = param.grad.float() if param.grad is not None else None, None
        super().step()
        for param, copy in self.pairs:
            param.copy_(copy)


def plain(ranks: Ranks, module: GPT, bf16: bool = False) -> Built:
    model = DistributedDataParallel(module.bfloat16() if bf16 else module, bucket_cap_mb=ranks.bucket_mb)
    return model, MasterAdamW(model.parameters()) if bf16 else AdamW(model.parameters(), **ADAMW)


def level_1(ranks: Ranks, module: GPT, bf16: bool = False, **options: Any) -> Built:
    model, _ = plain(ranks, module, bf16)
    return model, ZeroRedundancyOptimizer(model.parameters(), AdamW, master_weights=bf16, **options, **ADAMW)


def level_2(ranks: Ranks, module: GPT, **options: Any) -> Built:
    model, optimizer = level_1(ranks, module, **options)
    model.register_comm_hook(optimizer, onecopy.reduce_scatter_hook)
    return model, optimizer


def overlapped(ranks: Ranks, module: GPT, make_hook: Callable[..., Any]) -> Built:
    model, optimizer = level_1(ranks, module, overlap_with_ddp=True)
    model.register_comm_hook(None, make_hook(allreduce_hook, model, optimizer))
    return model, optimizer


def level_3(ranks: Ranks, module: GPT, offload: Any = None, **options: Any) -> Built:
    optimizer = ZeroRedundancyOptimizer(module.parameters(), AdamW, offload=offload, **ADAMW)
    if ranks.bucket_mb < 1:
        options["bucket_bytes"] = int(ranks.bucket_mb * 1e6)
    return ShardedDataParallel(module, optimizer, **options), optimizer


def torch_zero(ranks: Ranks, module: GPT) -> Built:
    model, _ = plain(ranks, module)
    return model, TorchZero(model.parameters(), AdamW, **ADAMW)


def fsdp2(ranks: Ranks, module: GPT) -> Built:
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,))
    for part in (*module.blocks, module):
        fully_shard(part, mesh=mesh)
    return module, AdamW(module.parameters(), **ADAMW)


def train(ranks: Ranks, built: Built, mode: str = "fp32", steps: Sequence[int] = range(STEPS)) -> None:
    """Train for some of the steps, with clipping or a GradScaler if the mode says so."""
    model, optimizer = built
    scaler = torch.amp.GradScaler(ranks.device.type, 1024.0, growth_interval=2, enabled=mode == "scaled")
    for step in steps:
        optimizer.zero_grad()
        with torch.autocast(ranks.device.type, torch.float16, enabled=mode == "scaled"), sdpa_kernel(SDPBackend.MATH):
            logits = model(ranks.tokens[step][:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ranks.tokens[step][:, 1:].flatten())
        if mode == "scaled" and step == 2 and ranks.rank == ranks.world_size - 1:
            loss = loss * math.inf  # all ranks must skip this step
        scaler.scale(loss).backward()
        if mode == "clipped" and hasattr(optimizer, "clip_grad_norm_"):
            optimizer.clip_grad_norm_(0.1)
        elif mode == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    getattr(optimizer, "wait", int)()  # for parameters that are still in flight


# Checks: each trains and returns the module.


def trained(ranks: Ranks, mode: str, build: Build) -> GPT:
    module = ranks.module(mode)
    train(ranks, build(ranks, module), mode)
    return module


def consolidated(ranks: Ranks) -> GPT:
    """Train at level 1, consolidate the state, and go on with the plain optimizer."""
    model, optimizer = level_1(ranks, ranks.module())
    train(ranks, (model, optimizer), steps=range(HALFWAY))
    module = ranks.module()
    module.load_state_dict(model.module.state_dict())
    built, state = plain(ranks, module), dict[str, Any]()
    for to in range(ranks.world_size):  # each rank needs the whole state to load it
        optimizer.consolidate_state_dict(to=to)
        state = optimizer.state_dict() if ranks.rank == to else state
    built[1].load_state_dict(state)
    train(ranks, built, steps=range(HALFWAY, STEPS))
    return module


def saved(ranks: Ranks) -> GPT:
    """Train at level 1, save, load into ShardedDataParallel, and go on there."""
    model, optimizer = level_1(ranks, ranks.module())
    train(ranks, (model, optimizer), steps=range(HALFWAY))
    checkpoint.save(ranks.folder, HALFWAY, model=model, optimizer=optimizer)
    module = ranks.module()
    model, optimizer = level_3(ranks, module)
    checkpoint.load(ranks.folder, model=model, optimizer=optimizer)
    train(ranks, (model, optimizer), steps=range(HALFWAY, STEPS))
    return module


half = MixedPrecision(param_dtype=torch.bfloat16)
half_and_single = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

TRAININGS: dict[str, tuple[str, Build]] = {
    "level 1": ("fp32", level_1),
    "level 1, shard_by='parameter'": ("fp32", partial(level_1, shard_by="parameter")),
    "level 1, bucket views": ("fp32", partial(level_1, parameters_as_bucket_view=True)),
    "level 1, bf16 with master weights": ("bf16", partial(level_1, bf16=True)),
    "level 1, offload='cpu'": ("fp32", partial(level_1, offload="cpu")),
    "level 1, clipped": ("clipped", level_1),
    "level 1, fp16 with GradScaler": ("scaled", level_1),
    "reduce_scatter_hook": ("fp32", level_2),
    "reduce_scatter_hook, shard_by='parameter'": ("fp32", partial(level_2, shard_by="parameter")),
    "reduce_scatter_hook, clipped": ("clipped", level_2),
    "reduce_scatter_hook, fp16 with GradScaler": ("scaled", level_2),
    "hook_with_zero_step": ("fp32", partial(overlapped, make_hook=onecopy.hook_with_zero_step)),
    "hook_with_zero_step_interleaved": ("fp32", partial(overlapped, make_hook=onecopy.hook_with_zero_step_interleaved)),
    "ShardedDataParallel": ("fp32", level_3),
    "ShardedDataParallel, overlap_forward": ("fp32", partial(level_3, overlap_forward=True)),
    "ShardedDataParallel, bf16": ("bf16", partial(level_3, mixed_precision=half)),
    "ShardedDataParallel, bf16 reduced in fp32": ("bf16", partial(level_3, mixed_precision=half_and_single)),
    "ShardedDataParallel, offload='cpu'": ("fp32", partial(level_3, offload="cpu")),
    "ShardedDataParallel, clipped": ("clipped", level_3),
    "ShardedDataParallel, fp16 with GradScaler": ("scaled", partial(level_3, overlap_forward=True)),
}
RESUMED = {"consolidated, then DDP": ("fp32", consolidated), "saved, then ShardedDataParallel": ("fp32", saved)}
PEERS: dict[str, Build] = {"DDP": plain, "torch's ZeroRedundancyOptimizer": torch_zero, "FSDP2": fsdp2}


def check(ranks: Ranks, mode: str, run: Callable[[Ranks], GPT], references: dict[str, list[Tensor]]) -> list[float]:
    """Return the largest difference from DDP, and a checksum that must be equal on all ranks."""
    if mode not in references:
        expected = trained(ranks, mode=mode, build=partial(plain, bf16=mode == "bf16"))
        references[mode] = [param.detach().float().cpu() for param in expected.parameters()]
    params = [param.detach().float().cpu() for param in run(ranks).parameters()]
    pairs = zip(params, references[mode], strict=True)
    largest = max(float((one - other).abs().max().nan_to_num(math.inf)) for one, other in pairs)
    return [largest, float(sum(int(param.view(torch.int32).sum(dtype=torch.int64)) for param in params) % 2**50)]


class CountCollectives(TorchDispatchMode):
    """Counts calls of torch.distributed and their bytes: the larger of what a call takes and gives."""

    calls, size = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and count it if it is a collective or a message."""
        if func.namespace == "c10d" and "recv" not in func.name():
            self.calls += 1
            self.size += max(sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args)
        return func(*args, **(kwargs or {}))


def count(ranks: Ranks, build: Build) -> list[float]:
    """Count one step: collectives, their MB, host synchronisations, kernels, and the peak of memory in MB."""
    kind = ranks.device.type
    before = ranks.api.memory_allocated() if kind != "cpu" else 0
    built = build(ranks, ranks.module())
    train(ranks, built)
    with warnings.catch_warnings(record=True) as caught, CountCollectives() as collectives:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn") if kind == "cuda" else None
        train(ranks, built, steps=[0])
        torch.cuda.set_sync_debug_mode("default") if kind == "cuda" else None
    waits = kernels = peak = math.nan
    if kind != "cpu":
        ranks.api.reset_peak_memory_stats()
        train(ranks, built, steps=[0])
        peak = (ranks.api.max_memory_allocated() - before) / 1e6
    if kind == "cuda":
        waits = sum("synchronizing" in str(each.message) for each in caught)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            train(ranks, built, steps=[0])
            ranks.api.synchronize()
        kernels = sum(each.device_type.name == "CUDA" and not each.is_user_annotation for each in profiled.events())
    return [collectives.calls, collectives.size / 1e6, waits, kernels, peak]


def measure(ranks: Ranks, builds: Sequence[Build], rounds: int) -> list[float]:
    """Return the median ms of a step for each way to train; they run in turns."""
    everything: list[tuple[Built, list[float]]] = [(build(ranks, ranks.module()), []) for build in builds]
    for number in range(rounds + 1):
        for built, times in everything:
            dist.barrier(ranks.control)
            start = time.perf_counter()
            train(ranks, built)
            ranks.api.synchronize()
            if number:  # the first round warms up
                times.append(1000 * (time.perf_counter() - start) / STEPS)
    return [float(torch.tensor(times).median()) for _, times in everything]


def run_checks(ranks: Ranks, say: Callable[[str], None]) -> bool:
    """Train in every way, show a table, and return whether all is well."""
    again = {f"DDP again, {mode}": (mode, partial(plain, bf16=mode == "bf16")) for mode in TOLERANCE}
    every = (again | TRAININGS).items()
    trainings = {name: (mode, partial(trained, mode=mode, build=build)) for name, (mode, build) in every}
    references, passed = dict[str, list[Tensor]](), True
    say("| check | result | largest difference from DDP | allowed |\n| --- | --- | --- | --- |")
    for name, (mode, run) in (trainings | RESUMED).items():
        rows, error = ranks.attempt(partial(check, ranks, mode, run, references))
        if not error and len({row[1] for row in rows}) > 1:
            error = "the ranks have different parameters"
        largest, allowed = max((row[0] for row in rows if row), default=math.nan), TOLERANCE[mode]
        passed &= (well := not error and largest <= allowed)
        say(f"| {name} | {'ok' if well else f'**FAILED** {error}'} | {largest:.1e} | {allowed:.0e} |")
    return passed


def run_measurements(ranks: Ranks, say: Callable[[str], None], rounds: int) -> bool:
    """Count and time one step of every way to train, and return whether those of onecopy ran."""
    builds = PEERS | {name: build for name, (mode, build) in TRAININGS.items() if mode == "fp32"}
    counts = {name: ranks.attempt(partial(count, ranks, build)) for name, build in builds.items()}
    works = [name for name, (_, error) in counts.items() if not error]
    times, failed = ranks.attempt(partial(measure, ranks, [builds[name] for name in works], rounds))
    medians = {} if failed else dict(zip(works, map(max, zip(*times, strict=True)), strict=True))
    say("\n| one step of a rank | ms | collectives | MB | host waits | kernels | peak MB |\n|" + " --- |" * 7)
    for name, (rows, error) in counts.items():
        numbers = [medians.get(name, math.nan), *map(max, zip(*rows, strict=True))]
        cells = ["-" if math.isnan(number) else f"{number:.1f}".removesuffix(".0") for number in numbers]
        say(f"| {name} | {error or ' | '.join(cells)} |")
    if ranks.device.type in ("cpu", "sim"):
        say("\nTimes on this device mean nothing.")
    return not failed and all(name in PEERS for name in builds if name not in works)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="the type of the device, by default the accelerator of this machine")
    parser.add_argument("--backend", help="by default that of the device; for example cpu:gloo,cuda:nccl")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--quick", action="store_const", dest="size", const="tiny", help="the same as --size tiny")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a collective has failed")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        sys.exit("start one process for each device: torchrun --nproc-per-node 2 examples/check_gpu.py")
    ranks, lines, passed, in_step = Ranks(options), list[str](), False, True

    def say(line: str) -> None:
        lines.append(line)
        if ranks.rank == 0:
            print(line, flush=True)

    name = getattr(ranks.api, "get_device_name", platform.machine)()
    say(f"onecopy {onecopy.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}, {platform.platform()}")
    say(f"{ranks.world_size} ranks on {ranks.device.type} ({name}), {ranks.backend}, size {options.size}\n")
    try:
        passed = run_checks(ranks, say) & run_measurements(ranks, say, 1 if options.size == "tiny" else 10)
    except OutOfStepError as error:
        in_step = False
        say(f"\n**Stopped**, because the ranks are out of step: {error}")
    say("\n**All checks passed.**" if passed else "\n**Some checks failed.**")
    if ranks.rank == 0:
        shutil.rmtree(ranks.folder, ignore_errors=True)
        print("\n--- paste this into a report:", *lines, sep="\n", flush=True)
    if not in_step:
        os._exit(1)  # collectives that never end would keep the process alive
    dist.destroy_process_group()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
