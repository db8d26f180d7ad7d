"""What a rank does: it trains a program, and counts what it sends. Also the calls that must be refused."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import random
import shutil
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import onecopy
from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, checkpoint
from tests.golden.programs import Program

STEPS = 6
seen: list[tuple[str, float]] = []  # the collectives of this rank, and about how many bytes each sent

# The argument with what a rank gives, and how often it is sent by each of N ranks.
SENDS: dict[str, tuple[int, Any]] = {
    "allreduce": (0, lambda n: 2 * (n - 1) / n),
    "broadcast": (0, lambda n: (n - 1) / n),
    "allgather": (1, lambda n: n - 1),
    "_allgather_base": (1, lambda n: n - 1),
    "reduce": (0, lambda n: (n - 1) / n),
    "reduce_scatter": (1, lambda n: (n - 1) / n),
    "_reduce_scatter_base": (1, lambda n: (n - 1) / n),
    "send": (0, lambda _: 1),
    "recv": (0, lambda _: 0),
    "gather": (1, lambda n: (n - 1) / n),
    "scatter": (1, lambda n: (n - 1) / n),
    "alltoall": (1, lambda n: (n - 1) / n),
    "alltoall_base": (1, lambda n: (n - 1) / n),
    "barrier": (0, lambda _: 0),
}


def bytes_of(given: Any) -> int:
    """The bytes of nested tensors."""
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    return sum(map(bytes_of, given)) if isinstance(given, (list, tuple)) else 0


def count_collectives() -> None:
    """From now on note every collective that Python starts (those that DDP starts itself are not seen)."""

    def watch(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def counted(group: Any, *args: Any, **kwargs: Any) -> Any:
            place, times = SENDS[name]
            given = args[place] if len(args) > place else ()
            seen.append((name, bytes_of(given) * times(group.size())))
            return call(group, *args, **kwargs)

        return counted

    for name in SENDS:
        setattr(dist.ProcessGroup, name, watch(name, getattr(dist.ProcessGroup, name)))


class Model(nn.Module):
    """Parameters of many sizes, two of them only used in every second pass if ``branches``."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        sparse, branches = program.sparse, program.branch
        self.embedding = nn.Embedding(50, 24, sparse=sparse)
        self.first, self.norm = nn.Linear(24, 64), nn.LayerNorm(64)
        self.second, self.last = nn.Linear(64, 48), nn.Linear(48, 10)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.branch = nn.Linear(64, 48) if branches else None
        if program.frozen_base:
            self.base = nn.Linear(64, 64).requires_grad_(False)
            self.codes = nn.Parameter(torch.arange(100, dtype=torch.int8), requires_grad=False)

    def forward(self, tokens: torch.Tensor, number: int) -> torch.Tensor:
        hidden = self.norm(torch.tanh(self.first(self.embedding(tokens))))
        if hasattr(self, "base"):
            hidden = hidden + self.base(hidden) * self.codes.float().mean() / 100
        if self.branch is not None and number % 2:
            hidden = self.second(hidden) + self.branch(hidden)
        else:
            hidden = self.second(hidden)
        result: torch.Tensor = self.last(nn.functional.gelu(hidden) * self.scale).float()
        return result


def optimizer_class(name: str) -> Any:
    """A class of torch or of a third party."""
    if name == "AdamWScheduleFree":
        import schedulefree  # type: ignore[import-untyped]

        return schedulefree.AdamWScheduleFree
    if name == "Lion":
        import pytorch_optimizer

        return pytorch_optimizer.Lion
    return getattr(torch.optim, name)


class Run:
    """A model, its optimizers and what follows them."""

    def __init__(self, program: Program, source: Run | None = None) -> None:
        torch.manual_seed(0)
        self.program = program
        self.module = Model(program).to(getattr(torch, program.dtype))
        if source is not None:
            self.module.load_state_dict(source.module.state_dict())
        names = program.optimizer.split("+")
        self.optimizers = [self.make(name, len(names)) for name in names]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if program.scaler else None
        self.schedulers = [
            torch.optim.lr_scheduler.StepLR(each, step_size=2, gamma=0.5) for each in self.optimizers if program.groups
        ]
        self.model = self.wrap()

    def make(self, name: str, count: int) -> Any:
        """One of the optimizers."""
        named = list(self.module.named_parameters())
        if self.program.late_group:
            named = [pair for pair in named if not pair[0].startswith("last")]
        if count == 2:
            special = name != "AdamW"
            part = "embed" if "Sparse" in self.program.optimizer else "branch" if self.program.turns else ""
            is_special = (lambda pair: part in pair[0]) if part else is_matrix
            named = [pair for pair in named if bool(is_special(pair)) == special]
        groups: Any = named
        if self.program.groups:
            decayed = [pair for pair in named if is_matrix(pair)]
            rest = [pair for pair in named if not is_matrix(pair)]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        if self.program.level == "ddp":
            return optimizer_class(name)(groups, **self.program.options)
        known = inspect.signature(ZeroRedundancyOptimizer.__init__).parameters
        zero = {key: value for key, value in self.program.zero.items() if key in known}
        if self.program.level in ("overlap", "interleaved"):
            zero["overlap_with_ddp"] = True
        return ZeroRedundancyOptimizer(groups, optimizer_class(name), **zero, **self.program.options)

    def wrap(self) -> Any:
        """The model in its wrapper, with the hook of the level."""
        level, optimizers = self.program.level, self.optimizers
        if level == "3":
            wrapper = dict(self.program.wrapper)
            if "mixed_precision" in wrapper:
                dtype = getattr(torch, wrapper["mixed_precision"])
                wrapper["mixed_precision"] = onecopy.MixedPrecision(param_dtype=dtype)
            return ShardedDataParallel(self.module, optimizers if len(optimizers) > 1 else optimizers[0], **wrapper)
        model = DistributedDataParallel(self.module, bucket_cap_mb=0.01, **self.program.ddp)
        if level == "2":
            state = optimizers if len(optimizers) > 1 else optimizers[0]
            model.register_comm_hook(state, onecopy.reduce_scatter_hook)
        elif level in ("overlap", "interleaved"):
            hook = onecopy.hook_with_zero_step_interleaved if level == "interleaved" else onecopy.hook_with_zero_step
            model.register_comm_hook(None, hook(allreduce_hook, model, optimizers[0]))
        return model

    def loss(self, step: int, number: int) -> torch.Tensor:
        """The loss of one pass; with ``overflow`` it is infinite on one rank in one step."""
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + dist.get_rank())
        tokens = torch.randint(50, (8,), generator=generator)
        target = torch.randint(10, (8,), generator=generator)
        loss = nn.functional.cross_entropy(self.model(tokens, step), target) / self.program.passes
        return loss * float("inf") if self.program.overflow and step == 2 and dist.get_rank() == 0 else loss

    def backward(self, step: int) -> float:
        """All passes of a step."""
        total = 0.0
        for number in range(self.program.passes):
            last = number == self.program.passes - 1
            with contextlib.nullcontext() if last or not self.program.no_sync else self.model.no_sync():
                loss = self.loss(step, number)
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.item()
        return total

    def clip(self) -> None:
        """Clip the gradients of all optimizers together."""
        if self.program.clip == "torch":
            nn.utils.clip_grad_norm_(self.module.parameters(), 0.5)
        elif self.program.clip:
            onecopy.clip_grad_norm_(self.optimizers, 0.5)

    def step(self, step: int) -> float:
        """One iteration of the training loop."""
        program = self.program
        if program.freeze:
            self.module.first.requires_grad_(step not in (2, 3))
            self.module.norm.requires_grad_(step < 4)
        if program.late_group and step == 2:
            self.optimizers[0].add_param_group({"params": list(self.module.last.named_parameters("last")), "lr": 0.05})
        stepped = self.optimizers[step % 2 if program.turns else 0 :]
        for each in self.optimizers if not program.turns else self.optimizers[1:] + self.optimizers[: step % 2]:
            each.zero_grad(set_to_none=program.to_none)
        if program.closure:
            return float(self.optimizers[0].step(lambda: self.backward(step)))
        loss = self.backward(step)
        if self.scaler is not None:
            for each in self.optimizers:
                self.scaler.unscale_(each)
        self.clip()
        if program.level == "ddp" and program.overflow and self.scaler is None and step == 2:
            return loss  # what nonfinite="skip" does
        for each in stepped:
            each.step() if self.scaler is None else self.scaler.step(each)
        if self.scaler is not None:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        return loss

    def state(self) -> list[Any]:
        """The whole state of every optimizer, on rank 0."""
        for each in self.optimizers:
            if self.program.level != "ddp":
                each.consolidate_state_dict()
        return [each.state_dict() for each in self.optimizers] if dist.get_rank() == 0 else []

    def resumed(self, folder: str) -> Run:
        """The same training in new objects."""
        if self.program.resume == "checkpoint":
            extra = checkpoint.capture(**{f"scheduler{i}": each for i, each in enumerate(self.schedulers)})
            checkpoint.save(folder, 1, model=self.model, optimizer=self.optimizers, extra=extra)
            return Run(self.program).loaded(folder)
        boxes = [copy.deepcopy(self.state())]
        dist.broadcast_object_list(boxes)
        new = Run(self.program, source=self)
        for each, state in zip(new.optimizers, boxes[0], strict=True):
            each.load_state_dict(state)
        return new

    def loaded(self, folder: str) -> Run:
        """This, with what a checkpoint has."""
        loaded = checkpoint.load(folder, model=self.model, optimizer=self.optimizers)
        assert loaded is not None
        if self.schedulers:
            checkpoint.restore(loaded.extra, **{f"scheduler{i}": each for i, each in enumerate(self.schedulers)})
        return self


def is_matrix(pair: tuple[str, torch.Tensor]) -> bool:
    """Whether a parameter has two dimensions."""
    return pair[1].dim() == 2


def digest(value: Any) -> str:
    """A digest of nested tensors and plain data."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            whole = value.detach().cpu().to_dense().contiguous()
            found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            found.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            found.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        else:
            found.update(repr(getattr(value, "item", lambda: value)()).encode())  # numpy's numbers as Python's

    add(value)
    return found.hexdigest()[:16]


def train(program: Program, folder: str, part: str = "") -> dict[str, Any]:
    """Train, and return what is recorded: of a part ("save" or "load") of a program that changes its ranks too."""
    steps = range(STEPS + dist.get_world_size() - dist.get_rank() if program.join else STEPS)
    if program.resize[0]:
        steps = range(STEPS // 2) if part == "save" else range(STEPS // 2, STEPS)
    seen.clear()
    random.seed(0)  # a checkpoint has these states, and its length depends on them
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    run, losses = Run(program), list[float]()
    if part == "load":
        run.loaded(folder)
    joined = [run.model] if program.level == "ddp" else [run.model, *run.optimizers]
    with Join(joined, model=run.model) if program.join else contextlib.nullcontext():
        for step in steps:
            if program.resume and step == STEPS // 2:
                run = run.resumed(folder)
            if program.optimizer == "AdamWScheduleFree":
                run.optimizers[0].train()
            losses.append(run.step(step))
    if part == "save":
        checkpoint.save(folder, 1, model=run.model, optimizer=run.optimizers)
    # Inside the backward pass of another rank it is a matter of time which buckets are sent together.
    collectives = list(seen) if program.level in ("1", "2", "3") else [each for each in seen if each[0] == "allreduce"]
    if run.program.level == "3":
        run.model.wait()
    params = {name: each.detach().float().clone() for name, each in run.module.named_parameters()}
    state = run.state()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True) if part != "save" else None
    counts = Counter(name for name, _ in collectives)
    return {
        "losses": digest([loss.hex() for loss in losses]),
        "params": digest(params),
        "state": digest(state),
        "bytes": round(sum(size for _, size in collectives)),
        "collectives": " ".join(f"{name}:{count}" for name, count in sorted(counts.items())),
        "order": digest([name for name, _ in collectives]),
        "values": torch.cat([each.reshape(-1) for each in params.values()]).tolist() if not dist.get_rank() else [],
    }
