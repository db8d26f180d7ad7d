"""Shows the progress of a training: live in a terminal, and as plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from onecopy.demo.training import Progress
from onecopy.planning.memory_report import COLOURS, KINDS

MB = 1e6
SECONDS_BETWEEN_FRAMES, SECONDS_BETWEEN_LINES = 0.2, 5.0
BAR_COLUMNS, LOSS_COLUMNS = 36, 60


LEVEL_TEXT = {
    "ddp": "plain DistributedDataParallel: every rank keeps everything",
    "1": "ZeroRedundancyOptimizer: the optimizer state is divided among the ranks",
    "2": "and reduce_scatter_hook: a rank gets only the gradients that it needs",
    "3": "ShardedDataParallel: gradients and state are divided among the ranks",
}


class Display:
    """Shows progress on a console. Use it as a context manager, and call :meth:`show` after every step.

    Args:
        console: where to show it. If it is not a terminal, a line is printed every few seconds.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        live = console.is_terminal and not console.quiet
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None
        self._shown = 0.0

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, progress: Progress) -> None:
        """Show the state after a step, if it was not shown just before."""
        last = progress.step == progress.settings.steps
        between = SECONDS_BETWEEN_LINES if self._live is None else SECONDS_BETWEEN_FRAMES
        if not last and self._shown and time.monotonic() - self._shown < between:
            return
        self._shown = time.monotonic()
        if self._live is None:
            self.console.print(line(progress), highlight=False, soft_wrap=True)
        else:
            self._live.update(frame(progress), refresh=True)


def line(progress: Progress) -> str:
    """Return the state as one line of text."""
    settings = progress.settings
    ranks = []
    for number, (memory, resident) in enumerate(zip(progress.memory, progress.resident, strict=True)):
        kinds = ", ".join(f"{kind} {memory[kind] / MB:.1f}" for kind in KINDS if memory[kind])
        ranks.append(f"rank {number} (MB): {kinds}, process {resident / MB:.0f}")
    start = f"{settings.name}: step {progress.step}/{settings.steps}, loss {progress.losses[-1]:.3f}"
    return "; ".join([f"{start}, {progress.tokens_per_second:,.0f} tokens/s", *ranks])


def frame(progress: Progress) -> RenderableType:
    """Return the state as one frame of the live display."""
    settings = progress.settings
    model = f"{progress.elements / 1e6:.1f}M parameters, {settings.optimizer}, {settings.precision}"
    title = Text.assemble(
        (settings.name, "bold"),
        f"  {LEVEL_TEXT[settings.level]}\n",
        (f"{progress.ranks} ranks, {model}; Ctrl-C saves and stops, the same command continues", "dim"),
    )
    step = Table.grid(padding=(0, 2))
    continued = f", continued from step {progress.first_step}" if progress.first_step else ""
    step.add_row(
        ProgressBar(settings.steps, progress.step, width=BAR_COLUMNS),
        f"step {progress.step}/{settings.steps}{continued}",
        f"{progress.tokens_per_second:,.0f} tokens/s",
    )
    loss = Text.assemble("loss ", (f"{progress.losses[-1]:.3f} ", "bold"), (sparkline(progress.losses), "#56b4e9"))
    return Group(title, Text(), step, Text(), loss, Text(), memory_table(progress))


def sparkline(values: list[float], columns: int = LOSS_COLUMNS) -> str:
    """Return values as a row of small bars, from the first value to the last."""
    chosen = [values[place * len(values) // columns] for place in range(columns)] if len(values) > columns else values
    low, high = min(chosen), max(chosen)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in chosen)


def memory_table(progress: Progress) -> Table:
    """Return the memory of each rank by kind, as numbers and as a bar that would be full with plain DDP."""
    kinds = [kind for kind in KINDS if any(memory[kind] for memory in progress.memory)]
    columns = [Column(Text(kind, COLOURS[kind])) for kind in kinds]
    table = Table("MB", *columns, "process", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_column(Text("plain DDP would fill this bar" if progress.ddp else "", "dim"))
    most = sum(progress.ddp.values()) or max(sum(memory.values()) for memory in progress.memory) or 1
    for number, (memory, resident) in enumerate(zip(progress.memory, progress.resident, strict=True)):
        bar, filled, amount = Text(), 0, 0
        for kind in kinds:
            amount += memory[kind]
            stop = round(BAR_COLUMNS * amount / most)
            bar.append("█" * (stop - filled), COLOURS[kind])
            filled = stop
        bar.append("·" * (BAR_COLUMNS - filled), "dim")
        cells = [f"{memory[kind] / MB:.1f}" for kind in kinds]
        table.add_row(f"rank {number}", *cells, f"{resident / MB:.0f}", bar)
    return table
