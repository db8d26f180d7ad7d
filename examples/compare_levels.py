"""Train a small GPT with plain DDP and at every level, and compare memory, time and losses.

``make demo`` starts it like this::

    torchrun --standalone --nproc-per-node 2 examples/compare_levels.py --plot compare.png

It needs ``pip install 'onecopy[demo]'``, for the table and the picture. The GPT learns the sentences of a small
grammar, so nothing is downloaded. It trains on the CPU, also where there are GPUs: ``check_gpu.py`` is for those.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, Sizes, loss_of
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import ShardedDataParallel, ZeroRedundancyOptimizer, reduce_scatter_hook

LEVELS = ("DDP", "level 1", "level 2", "level 3")
KINDS = {"parameters": "#0072b2", "gradients": "#e69f00", "state": "#009e73"}
"""The kinds of memory, each with its colour, from a palette that people with any kind of colour vision tell apart."""

MB, BAR_COLUMNS = 1e6, 36

# The sentences


PHRASES = {
    "STORY": ["TIME FOLK ACT and then THEY ACT .", "FOLK ACT because the NOUN was ADJ .", "FOLK ACT near the HERE ."],
    "FOLK": ["the ADJ WHO", "a WHO with a ADJ NOUN", "the WHO and the WHO", "every WHO"],
    "THEY": ["the WHO", "the ADJ WHO", "nobody", "everyone"],
    "ACT": ["DID the ADJ NOUN", "DID a NOUN", "DID a NOUN and DID the NOUN", "WENT to the HERE", "WENT home HOW"],
    "HOW": ["slowly", "quickly", "alone", "together", "in silence", "in the rain", "at dawn", "with a song"],
    "TIME": ["in the morning ,", "one evening ,", "last winter ,", "every summer ,", "at night ,", "long ago ,"],
}
"""The grammar's rules: each name in capitals is replaced by one of its phrases or words."""

LISTS = {
    "WHO": "sailor baker fox child miller crow painter cook shepherd doctor queen clockmaker gardener fisher weaver "
    "mouse teacher traveller smith bear singer king hunter ferryman dog juggler goat merchant neighbour",
    "NOUN": "lantern boat kettle map drum ladder key letter blanket bell basket bridge coin cup door feather garden "
    "hat jar mirror needle painting ring rope sail shoe spoon table tower wheel window clock book stone",
    "ADJ": "small bright quiet broken green heavy hidden golden tired clever cold curious famous gentle hungry lost "
    "narrow patient proud red round sleepy silver soft strange tall warm wet wild young wooden",
    "DID": "found mended carried painted sold opened borrowed washed hid followed counted drew moved bought "
    "cleaned dropped forgot kept lifted polished took repaired returned shook stole wrapped",
    "WENT": "walked ran sailed climbed wandered hurried rode danced crept drifted",
    "HERE": "harbour market mill forest valley island village river field castle well crossroads hill cave",
}
RULES = {rule: [phrase.split() for phrase in phrases] for rule, phrases in PHRASES.items()}
RULES |= {rule: [[word] for word in words.split()] for rule, words in LISTS.items()}
WORDS = sorted({word for phrases in RULES.values() for phrase in phrases for word in phrase} - RULES.keys())
NUMBER = {word: number for number, word in enumerate(WORDS)}


def sentences(seed: int, batch: int, length: int) -> Tensor:
    """Return the numbers of words of random sentences, one after the other; the same for the same seed."""
    source = random.Random(seed)
    words: list[int] = []
    while len(words) < batch * length:
        waiting = ["STORY"]
        while waiting:
            symbol = waiting.pop()
            if symbol in RULES:
                waiting += reversed(source.choice(RULES[symbol]))
            else:
                words.append(NUMBER[symbol])
    return torch.tensor(words[: batch * length]).view(batch, length)


@torch.no_grad()
def write(model: GPT, count: int = 25) -> str:
    """Return a sentence that the model draws, of at most ``count`` words."""
    stop, generator = NUMBER["."], torch.Generator().manual_seed(0)
    words = [stop]
    while len(words) <= count and (len(words) == 1 or words[-1] != stop):
        chances = (model(torch.tensor([words]))[0, -1] / 0.5).softmax(0)
        words.append(int(torch.multinomial(chances, 1, generator=generator)))
    text = " ".join(WORDS[number] for number in words[1:]).replace(" ,", ",").replace(" .", ".")
    return text[:1].upper() + text[1:]


# The training


class Training:
    """A training at one level.

    Attributes:
        level: its name in ``LEVELS``.
        losses: the mean loss of all ranks in each step so far.
        seconds: the time of each step on this rank.
        memory: the bytes of parameters, gradients and optimizer state on the rank with the most.
    """

    def __init__(self, level: str, sizes: Sizes, make: Callable[[str, GPT], tuple[nn.Module, Any]]) -> None:
        self.level, self.sizes = level, sizes
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.memory: dict[str, float] = {}
        self.module = sizes.make()
        self.model, self.optimizer = make(level, self.module)

    @property
    def total(self) -> float:
        """The bytes of all kinds of memory."""
        return sum(self.memory.values())

    @property
    def milliseconds(self) -> float:
        """The median time of a step."""
        return 1e3 * statistics.median(self.seconds)

    def step(self) -> None:
        """Train for one step. All ranks make this call."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tokens = sentences(len(self.losses) * world_size + rank, self.sizes.batch, self.sizes.length + 1)
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(self.model, tokens)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)
        mine = torch.tensor([loss.item(), *memory_of(self.module, self.optimizer)], dtype=torch.float64)
        rows = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(rows, mine)
        self.losses.append(statistics.fmean(row[0].item() for row in rows))
        largest = max(rows, key=lambda row: row[1:].sum().item())
        self.memory = dict(zip(KINDS, largest[1:].tolist(), strict=True))


def make(level: str, module: GPT) -> tuple[nn.Module, Optimizer]:
    """Return the wrapped model and the optimizer."""
    if level == "level 3":
        sharded = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, lr=1e-3)
        return ShardedDataParallel(module, sharded), sharded
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    if level == "DDP":
        return model, AdamW(module.parameters(), lr=1e-3)
    optimizer = ZeroRedundancyOptimizer(module.named_parameters(), AdamW, lr=1e-3)
    if level == "level 2":
        model.register_comm_hook(optimizer, reduce_scatter_hook)
    return model, optimizer


def memory_of(module: GPT, optimizer: Any) -> list[float]:
    """Return the bytes of this rank's parameters, gradients and optimizer state."""
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        measured = optimizer.memory_report().measured
        return [float(measured[kind]) for kind in KINDS]
    params = list(module.parameters())
    state = [tensor for values in optimizer.state.values() for tensor in values.values()]
    kinds = (params, [param.grad for param in params], state)
    return [float(sum(tensor.nbytes for tensor in kind if tensor is not None)) for kind in kinds]


# What is shown


class Display:
    """Shows the progress of trainings: live in a terminal, and as a line every few seconds elsewhere."""

    def __init__(self, console: Console, about: str, steps: int) -> None:
        self.console, self.about, self.steps, self.shown = console, about, steps, 0.0
        live = console.is_terminal and not console.quiet
        self.live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def show(self, trainings: Sequence[Training]) -> None:
        """Show the state after a step, if it was not shown just before."""
        done = len(trainings[0].losses)
        if done < self.steps and time.monotonic() - self.shown < (5.0 if self.live is None else 0.2):
            return
        self.shown = time.monotonic()
        if self.live is not None:
            self.live.update(self.frame(trainings), refresh=True)
            return
        each = ", ".join(f"{training.level} {training.losses[-1]:.3f}" for training in trainings)
        self.console.print(f"step {done}/{self.steps}, loss: {each}", highlight=False)

    def frame(self, trainings: Sequence[Training]) -> RenderableType:
        """Return the state as one frame of the live display."""
        first, done = trainings[0], len(trainings[0].losses)
        step = Table.grid(padding=(0, 2))
        step.add_row(ProgressBar(self.steps, done, width=BAR_COLUMNS), f"step {done}/{self.steps}")
        loss = Text.assemble("loss ", (f"{first.losses[-1]:.3f} ", "bold"), (sparkline(first.losses), "#56b4e9"))
        columns = [Column(Text(kind, colour), justify="right") for kind, colour in KINDS.items()]
        hint = Column(Text(f"{first.level} fills this bar", "dim"))
        table = Table("MB per rank", *columns, Column("ms/step", justify="right"), hint, box=None, padding=(0, 2, 0, 0))
        for training in trainings:
            bar, filled = Text(), 0
            for amount, colour in zip(itertools.accumulate(training.memory.values()), KINDS.values(), strict=True):
                stop = min(BAR_COLUMNS, round(BAR_COLUMNS * amount / first.total))
                bar.append("█" * (stop - filled), colour)
                filled = stop
            bar.append("·" * (BAR_COLUMNS - filled), "dim")
            cells = [f"{size / MB:.1f}" for size in training.memory.values()]
            table.add_row(training.level, *cells, f"{training.milliseconds:.0f}", bar)
        return Group(Text(f"A small GPT: {self.about}", "bold"), Text(), step, Text(), loss, Text(), table)


def sparkline(values: list[float], columns: int = 60) -> str:
    """Return values as a row of small bars, from the first value to the last."""
    chosen = [values[place * len(values) // columns] for place in range(columns)] if len(values) > columns else values
    low, high = min(chosen), max(chosen)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in chosen)


def difference(training: Training, reference: Training) -> float:
    """Return the largest difference between the losses of two trainings in the same step."""
    return max(abs(one - other) for one, other in zip(training.losses, reference.losses, strict=True))


def print_report(console: Console, about: str, trainings: Sequence[Training]) -> None:
    """Print the table of memory, time and loss, an explanation of its columns, and a sentence by the model."""
    columns = [*KINDS, "total", f"of {trainings[0].level}", "ms/step", "last loss", "loss differs by"]
    headings = [Column(name, justify="right", no_wrap=True) for name in columns]
    table = Table("MB per rank", *headings, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    whole = trainings[0].total
    for training in trainings:
        total = training.total
        cells = [f"{size / MB:.2f}" for size in (*training.memory.values(), total)]
        cells += [f"{total / whole:.0%}", f"{training.milliseconds:.0f}", f"{training.losses[-1]:.4f}"]
        table.add_row(training.level, *cells, f"{difference(training, trainings[0]):.1g}")
    console.print(Text.assemble(("\nA small GPT: ", "bold"), f"{about}, {len(trainings[0].losses)} steps"))
    console.print(table)
    best = min(trainings, key=lambda training: training.total)
    saved = whole - best.total
    console.print(f"{best.level} saves {saved / MB:.1f} MB of {whole / MB:.1f} MB on each rank ({saved / whole:.0%}).")
    console.print(
        "Bytes are those of tensors on the rank with the most, between two steps. The trainings take turns.",
        style="dim",
    )
    console.print(Text.assemble("The model writes: ", (f'"{write(trainings[-1].module)}"', "italic")))


def draw(about: str, trainings: Sequence[Training], path: Path) -> None:
    """Draw memory and losses side by side; the suffix of the path tells the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 2.6 + 0.5 * len(trainings)), layout="constrained")
    memory, losses = figure.subplots(1, 2, width_ratios=(1.15, 1))
    names, left = [training.level for training in trainings], [0.0] * len(trainings)
    whole = trainings[0].total / MB
    for kind, colour in KINDS.items():
        widths = [training.memory[kind] / MB for training in trainings]
        bars = memory.barh(names, widths, left=left, height=0.68, color=colour, label=kind)
        memory.bar_label(bars, fmt="%.1f", label_type="center", color="k" if kind == "gradients" else "w", fontsize=9)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for place, total in enumerate(left):
        text = f"{total:.1f} MB" + (f", {total / whole:.0%}" if place else "")
        memory.annotate(text, (total, place), (4, 0), textcoords="offset points", va="center", fontsize=9)
    memory.invert_yaxis()
    memory.set_xlim(0, 1.28 * max(left))
    memory.set_xlabel("MB on the rank with the most")
    memory.set_title("Memory per rank", loc="left", fontsize=11, pad=24)
    memory.legend(loc="lower left", bbox_to_anchor=(-0.02, 1), ncols=4, frameon=False, fontsize=9)
    # Equal curves hide each other: the first is wide, and the others have marks in different places.
    styles = zip(
        ("#000000", "#e69f00", "#009e73", "#0072b2"), ("", "o", "s", "^"), (4, 1, 1, 1), (0.3, 1, 1, 1), strict=True
    )
    for place, (training, (colour, mark, width, alpha)) in enumerate(zip(trainings, styles, strict=False)):
        count, look = len(training.losses), {"color": colour, "linewidth": width, "alpha": alpha}
        steps, every = range(1, count + 1), (count // 20 * place // 2, max(1, count // 10))
        losses.plot(steps, training.losses, marker=mark, markevery=every, label=training.level, **look)
    most = max(difference(training, trainings[0]) for training in trainings)
    title = "equal in every step" if most == 0 else f"largest difference {most:.1g}"
    losses.legend(frameon=False, fontsize=9, loc="upper right", title=title, alignment="left")
    losses.set_xlabel("step")
    losses.set_ylabel("loss, the mean of all ranks")
    losses.set_title("Loss", loc="left", fontsize=11)
    losses.grid(alpha=0.25)
    for axes in (memory, losses):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"A small GPT: {about}", fontsize=12)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Train at every level, one after the other, and show the comparison on rank 0."""
    parser = argparse.ArgumentParser(description="Compare plain DDP and every level. Start it with torchrun.")
    parser.add_argument("--levels", default=",".join(LEVELS), help="names of levels, separated by commas")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=32, help="words per sequence")
    parser.add_argument("--width", type=int, default=192, help="the width of the layers, a multiple of 8")
    parser.add_argument("--depth", type=int, default=4, help="the number of layers")
    parser.add_argument("--plot", type=Path, help="the picture to write, as PNG or SVG")
    options = parser.parse_args()
    model = (len(WORDS), options.width, len(WORDS), options.depth)
    sizes = Sizes(*model, options.batch, options.length, positions=max(options.length, 26))
    dist.init_process_group("gloo")
    console = Console(quiet=dist.get_rank() != 0)
    console.width = max(console.width, 100)
    about = f"{sizes.elements() / 1e6:.2f}M parameters, AdamW, {dist.get_world_size()} ranks"
    trainings = [Training(level, sizes, make) for level in options.levels.split(",")]
    display = Display(console, about, options.steps)
    with display.live or contextlib.nullcontext():
        for _ in range(options.steps):
            for training in trainings:
                training.step()
            display.show(trainings)
    if dist.get_rank() == 0:
        print_report(console, about, trainings)
        if options.plot:
            draw(about, trainings, options.plot)
            console.print(f"wrote {options.plot}", highlight=False)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
