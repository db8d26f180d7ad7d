"""Train one small language model three times, from the same weights and with the same data.

The three runs differ in one line, the optimizer:

1. plain DDP with ``torch.optim.AdamW``: every rank holds the whole optimizer state;
2. ``torch.distributed.optim.ZeroRedundancyOptimizer``: each rank holds the state of some parameters;
3. ``onecopy.ZeroRedundancyOptimizer``: each rank holds an equal part of the state.

Start it with ``make demo``, or with ``torchrun --standalone --nproc-per-node 2 examples/demo.py``.
"""

from __future__ import annotations

import os
import socket
import statistics
import struct
import time
import warnings
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import onecopy

with warnings.catch_warnings():
    # Importing torch's class compiles TorchScript, which warns that TorchScript is deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

VOCABULARY, WIDTH, LENGTH, BATCH = 8192, 128, 32, 4
ROUNDS, WARM_UP = 40, 10


class LittleGPT(nn.Module):
    """A GPT with two blocks and a large embedding that is also the output layer: 1.4M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each next token."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.tokens(tokens) + self.positions.weight
        hidden = self.norm(self.blocks(hidden, mask=mask, is_causal=True))
        return nn.functional.linear(hidden, self.tokens.weight)


@dataclass
class Run:
    """One of the three trainings, and its measurements."""

    name: str
    model: DistributedDataParallel
    optimizer: Optimizer
    losses: list[float] = field(default_factory=list)
    milliseconds: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    def train_step(self, tokens: Tensor) -> None:
        """Train on one batch, and measure the time and the bytes sent."""
        dist.barrier()  # so that no rank's time includes another rank's delay in the run before
        sent, start = bytes_sent(), time.perf_counter()
        self.optimizer.zero_grad()
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.milliseconds.append(1000 * (time.perf_counter() - start))
        self.sent.append(bytes_sent() - sent)
        self.losses.append(loss.item())

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state on this rank."""
        inner = getattr(self.optimizer, "optim", self.optimizer)
        return sum(value.nbytes for state in inner.state.values() for value in state.values())

    def largest_difference(self, other: Run) -> float:
        """Return the largest difference between this run's parameters and another run's."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)

    def measurements(self, reference: Run) -> list[float]:
        """Return this rank's figures for the table."""
        return [
            self.state_bytes(),
            statistics.mean(self.sent[WARM_UP:]),
            statistics.median(self.milliseconds[WARM_UP:]),
            self.largest_difference(reference),
        ]


def bytes_sent() -> int:
    """Return the bytes that this process has written to TCP connections; 0 if the system is not Linux.

    These are all bytes that gloo sends, its own headers included. The Linux kernel counts them per socket. The offsets
    are those of ``struct tcp_info``.
    """
    total = 0
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            connection = socket.socket(fileno=int(descriptor))
        except OSError:
            continue  # not a socket
        try:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue  # not a TCP connection
        finally:
            connection.detach()  # gloo closes it
        if len(info) >= 216:
            (not_sent_yet,) = struct.unpack_from("=I", info, 144)
            sent, sent_again = struct.unpack_from("=QQ", info, 200)
            total += sent - sent_again + not_sent_yet
    return total


def make_run(name: str) -> Run:
    torch.manual_seed(0)  # the same weights in every run and on every rank
    model = DistributedDataParallel(LittleGPT())
    optimizer: Optimizer
    if name == "plain DDP":
        optimizer = AdamW(model.parameters(), lr=1e-3)
    elif name == "torch's class":
        optimizer = TorchZero(model.parameters(), AdamW, lr=1e-3)
    else:
        optimizer = onecopy.ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=1e-3)
    return Run(name, model, optimizer)


def make_batch(generator: torch.Generator) -> Tensor:
    """Return token sequences in which each token determines the next one, so that the model can learn them."""
    first = torch.randint(97, (BATCH, 1), generator=generator)
    return (first + 31 * torch.arange(LENGTH + 1)) % 97


def show(console: Console, runs: list[Run], rows: Tensor) -> None:
    """Print the table; ``rows[run][rank]`` contains the measurements."""
    table = Table(title=f"{ROUNDS} steps each, in turns; the first {WARM_UP} are not counted")
    for column in ("run", "rank", "state", "sent/step*", "median step", "max |Δ| to DDP"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run, ranks in zip(runs, rows.tolist(), strict=True):
        for rank, (state, sent, milliseconds, difference) in enumerate(ranks):
            cells = [f"{state / 1e6:.2f} MB", f"{sent / 1e6:.2f} MB" if sent else "-", f"{milliseconds:.1f} ms"]
            table.add_row("" if rank else run.name, str(rank), *cells, f"{difference:.1g}", end_section=rank > 0)
    console.print(table)
    console.print("* TCP payload that the rank wrote, from the kernel's per-socket counters.")
    console.print(f"\nLoss on rank 0: {runs[0].losses[0]:.6f} at first, and at the end")
    console.print("  " + ", ".join(f"{run.losses[-1]:.6f} ({run.name})" for run in runs))
    ours = runs[-1].optimizer
    assert isinstance(ours, onecopy.ZeroRedundancyOptimizer)
    console.print("\nThe layout with onecopy, print(optimizer.layout):")
    console.print(str(ours.layout), highlight=False)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = Console(quiet=rank != 0)
    runs = [make_run(name) for name in ("plain DDP", "torch's class", "onecopy")]
    generator = torch.Generator().manual_seed(rank)  # each rank has different data
    columns = (TextColumn("training three times"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=ROUNDS * len(runs))
        for _ in range(ROUNDS):
            batch = make_batch(generator)
            for run in runs:  # step by step in turns, so that a disturbance of the machine hits all three
                run.train_step(batch)
                progress.advance(task)
    mine = torch.tensor([run.measurements(runs[0]) for run in runs], dtype=torch.float64)
    everyone = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyone, mine)
    show(console, runs, torch.stack(everyone, dim=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
