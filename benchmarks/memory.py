"""Bytes of tensors per rank, by kind, for every way to train; each in processes of its own.

``python benchmarks/memory.py --ranks 2`` starts torchrun once for each variant. A step is recorded with torch's memory
profiler, whose running sum over what was there before gives the peak; what is there between steps is counted by kind.
Peers that are not installed, or fail, are shown with their error.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, batch, loss_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

import onecopy

LR = 3e-4
MB = 1e6


class Trained:
    """A model, and how one step of it is made."""

    def __init__(self, model: nn.Module, step: Callable[[Tensor], None], state: Callable[[], Iterable[Any]]) -> None:
        self.model, self.step, self.state = model, step, state


def ordinary(model: nn.Module, optimizer: torch.optim.Optimizer, state: Callable[[], Iterable[Any]]) -> Trained:
    """The usual loop. Gradients are left until the next one, as they are in most scripts."""

    def step(tokens: Tensor) -> None:
        model.zero_grad()
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()

    return Trained(model, step, state)


def ddp(model: nn.Module) -> Trained:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = AdamW(wrapped.parameters(), lr=LR, fused=True)
    return ordinary(wrapped, optimizer, lambda: optimizer.state.values())


def torch_zero(model: nn.Module) -> Trained:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    zero = ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, parameters_as_bucket_view=True, lr=LR, fused=True)
    return ordinary(wrapped, zero, lambda: zero.optim.state.values())


def level_one(model: nn.Module) -> Trained:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    zero = onecopy.ZeroRedundancyOptimizer(wrapped.parameters(), AdamW, lr=LR, fused=True)
    return ordinary(wrapped, zero, lambda: zero.optim.state.values())


def sharded(model: nn.Module) -> Trained:
    zero = onecopy.ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR, fused=True)
    wrapped = onecopy.ShardedDataParallel(model, zero)
    return ordinary(wrapped, zero, lambda: zero.optim.state.values())


def sharded_bf16(model: nn.Module) -> Trained:
    zero = onecopy.ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR, fused=True)
    policy = onecopy.MixedPrecision(param_dtype=torch.bfloat16)
    wrapped = onecopy.ShardedDataParallel(model, zero, mixed_precision=policy)
    masters = [owned.tensor for owned in zero.engine.local.owned]
    return ordinary(wrapped, zero, lambda: [*zero.optim.state.values(), {"masters": masters}])


def fsdp2(reshard: bool) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        from torch.distributed.fsdp import fully_shard

        assert isinstance(model, GPT)
        for block in (*model.blocks, model.embed, model.head):
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        optimizer = AdamW(model.parameters(), lr=LR, fused=True)
        return ordinary(model, optimizer, lambda: optimizer.state.values())

    return make


def deepspeed(stage: int) -> Callable[[nn.Module], Trained]:
    def make(model: nn.Module) -> Trained:
        import deepspeed  # type: ignore[import-not-found]

        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = AdamW(model.parameters(), lr=LR, fused=True)
        engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(tokens: Tensor) -> None:
            engine.backward(loss_of(engine, tokens))
            engine.step()

        return Trained(
            engine, step, lambda: [*optimizer.state.values(), {"masters": zero.single_partition_of_fp32_groups}]
        )

    return make


def fairscale(model: nn.Module) -> Trained:
    from fairscale.nn.data_parallel import ShardedDataParallel  # type: ignore[import-not-found]
    from fairscale.optim.oss import OSS  # type: ignore[import-not-found]

    oss = OSS(model.parameters(), optim=AdamW, lr=LR, fused=True)
    wrapped = ShardedDataParallel(model, oss)
    return ordinary(wrapped, oss, lambda: oss.optim.state.values())


VARIANTS: dict[str, Callable[[nn.Module], Trained]] = {
    "DDP": ddp,
    "torch's class": torch_zero,
    "fairscale OSS + ShardedDDP": fairscale,
    "DeepSpeed ZeRO-2": deepspeed(2),
    "FSDP2, no resharding": fsdp2(reshard=False),
    "FSDP2, resharding": fsdp2(reshard=True),
    "onecopy": level_one,
    "onecopy, ShardedDataParallel": sharded,
    "onecopy, ShardedDataParallel, bf16 + masters": sharded_bf16,
}


def local(tensor: Tensor) -> Tensor:
    """What a rank really holds of a tensor."""
    inner = getattr(tensor, "_local_tensor", tensor)  # DTensor
    held: Tensor = getattr(inner, "local", inner)  # ShardGrad
    return held


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of distinct memory, by address."""
    found = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no memory of its own
            storage = local(tensor).untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def tensors_in(tree: Any) -> Iterable[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def peak_growth(run: Callable[[], None]) -> int:
    """By how many bytes the tensors alive during ``run`` exceed those before it, at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def measure(name: str) -> dict[str, Any]:
    """Train a few steps and count."""
    torch.manual_seed(0)
    trained = VARIANTS[name](copy.deepcopy(GPT()))
    rank = dist.get_rank()
    for number in range(3):
        trained.step(batch(rank, number))
    growth = peak_growth(lambda: trained.step(batch(rank, 3)))
    gc.collect()
    everything = storages(thing for thing in gc.get_objects() if isinstance(thing, Tensor))
    params = storages(trained.model.parameters())
    grads = storages(param.grad for param in trained.model.parameters() if param.grad is not None)
    state = storages(tensors_in(list(trained.state())))
    state = {address: size for address, size in state.items() if address not in params}
    known = params.keys() | grads.keys() | state.keys()
    other = sum(size for address, size in everything.items() if address not in known)
    rest = sum(sum(kind.values()) for kind in (params, grads, state)) + other
    return {
        "variant": name,
        "rank": rank,
        "parameters": sum(params.values()),
        "gradients": sum(grads.values()),
        "state": sum(state.values()),
        "other": other,
        "peak": rest + growth,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run_rank(name: str, folder: Path) -> None:
    """One rank of one variant."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(name)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def predicted(ranks: int) -> float:
    """The peak of ShardedDataParallel: 4Ψ + 12Ψ/N and two buckets, each as large as the largest parameter."""
    sizes = [4 * param.numel() for param in GPT().parameters()]
    return sum(sizes) + 3 * sum(sizes) / ranks + 2 * max(sizes)


def launch(name: str, ranks: int) -> list[dict[str, Any]] | str:
    """All ranks of one variant; their results, or the last line of the error."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, __file__, "--variant", name, "--folder", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        files = sorted(Path(folder).glob("*.json"))
        if len(files) == ranks:
            return [json.loads(file.read_text()) for file in files]
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return (errors or done.stderr.splitlines() or ["no output"])[-1 if not errors else 0]


def main() -> int:
    """Launch, or be one of the ranks launched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--variant")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.variant:
        run_rank(arguments.variant, arguments.folder)
        return 0
    table = Table("variant", "parameters", "gradients", "state", "other", "peak", "peak resident")
    table.title = f"MB on the largest of {arguments.ranks} ranks; predicted peak of ShardedDataParallel " + (
        f"{predicted(arguments.ranks) / MB:.1f}"
    )
    for name in VARIANTS:
        results = launch(name, arguments.ranks)
        if isinstance(results, str):
            table.add_row(name, results)
            continue
        largest = max(results, key=lambda result: result["peak"])
        kinds = ("parameters", "gradients", "state", "other", "peak", "resident")
        table.add_row(name, *(f"{largest[kind] / MB:.1f}" for kind in kinds))
        if arguments.json:
            for result in results:
                print(json.dumps(result), flush=True)
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
