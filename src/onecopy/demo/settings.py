"""The settings of a training, and its result: plain values that are passed on and stored as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

LEVELS = ("ddp", "1", "2", "3")
"""Plain DDP, and the levels of onecopy."""

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": 1e-3}),
    "adam": (Adam, {"lr": 1e-3}),
    "momentum": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd": (SGD, {"lr": 0.3}),
    "rmsprop": (RMSprop, {"lr": 1e-3}),
    "adagrad": (Adagrad, {"lr": 0.02}),
}
"""Optimizers by name, with their options. ``onecopy plan --optimizer`` has the same names."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one training: level of sharding, optimizer, precision, sizes and directories.

    Attributes:
        level: one of ``LEVELS``.
        optimizer: a name in ``OPTIMIZERS``.
        precision: one of the planner's ``PRECISIONS``.
        steps: the number of steps.
        batch: sequences per rank and step.
        length: words per sequence.
        width: the width of the model's layers.
        layers: the number of its blocks.
        save_every: steps between two checkpoints.
        folder: the directory for checkpoints and results.
        fresh: whether to begin anew although there are checkpoints.
        tensorboard: a directory for TensorBoard, or an empty text.
        to_stderr: whether progress goes to the standard error output, because the output is for a program.
    """

    level: str = "1"
    optimizer: str = "adamw"
    precision: str = "fp32"
    steps: int = 150
    batch: int = 8
    length: int = 32
    width: int = 192
    layers: int = 4
    save_every: int = 25
    folder: str = "onecopy-train"
    fresh: bool = False
    tensorboard: str = ""
    to_stderr: bool = False

    @property
    def name(self) -> str:
        """The level in words."""
        return "DDP" if self.level == "ddp" else f"level {self.level}"

    @property
    def run_folder(self) -> Path:
        """The directory of this training."""
        return Path(self.folder) / f"{self.name.replace(' ', '-').lower()}-{self.optimizer}-{self.precision}"

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return self.run_folder / "checkpoints"

    @property
    def result_file(self) -> Path:
        """The file of its result."""
        return self.run_folder / "result.json"

    def to_json(self) -> str:
        """Return the settings as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings of a text."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of one training: losses, memory of each rank, and speed.

    Attributes:
        name: the level in words.
        settings: the settings.
        ranks: the number of ranks.
        elements: the number of elements of all parameters.
        losses: the mean loss of all ranks in each step, from the first step of the run on.
        memory: for each rank, the bytes of its tensors by kind.
        ddp: the bytes that plain DDP would need, by kind, as predicted; empty for plain DDP itself.
        resident: for each rank, the bytes of the process in memory.
        milliseconds: the median of the time of a step.
        tokens_per_second: words that all ranks together learn from in a second.
        first_step: the step from which this process continued; 0 if it began anew.
        text: a sentence that the model writes.
        finished: whether all steps were made.
    """

    name: str
    settings: dict[str, Any]
    ranks: int
    elements: int
    losses: list[float]
    memory: list[dict[str, int]]
    ddp: dict[str, float]
    resident: list[int]
    milliseconds: float
    tokens_per_second: float
    first_step: int
    text: str
    finished: bool

    def total(self, group_rank: int) -> int:
        """Return the bytes of all kinds on one rank."""
        return sum(self.memory[group_rank].values())

    @property
    def largest(self) -> int:
        """The rank with the most bytes."""
        return max(range(self.ranks), key=self.total)

    def write(self, file: Path) -> None:
        """Write the result as JSON."""
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> Result | None:
        """Return a written result, or None if there is none that can be read."""
        try:
            return cls(**json.loads(file.read_text()))
        except (OSError, ValueError, TypeError):
            return None
