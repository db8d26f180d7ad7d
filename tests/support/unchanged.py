"""A training whose whole state can be compared before and after a call that is refused."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.optim import Adam

from tests.support.both import Both, tensors_of
from tests.support.failures import named, parameter

VARIANTS: tuple[dict[str, Any], ...] = (
    {"shard_by": "parameter"},
    {"shard_by": "element", "parameters_as_bucket_view": True},
)
"""Arguments of the optimizer under which a refused call must leave everything alone."""


class Training(Both):
    """Both optimizers after two steps; the first parameter may be cut."""

    def __init__(self, optimizer_class: Any = Adam, **ours: Any) -> None:
        shapes = ((64, 40), (7,), (3, 5))
        super().__init__(lambda: named(*(parameter(*shape) for shape in shapes)), optimizer_class, {"lr": 0.1}, **ours)
        self.train()

    @property
    def params(self) -> list[Tensor]:
        return tensors_of(self.ours)

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self.step()
        self.check()

    def snapshot(self) -> list[Any]:
        """Everything of this rank that a refused call must leave alone, with where the memory is."""
        state = [
            (name, value.clone() if isinstance(value, Tensor) else value)
            for param in self.params
            for name, value in self.ours.state[param].items()
        ]
        places = [param.data_ptr() for param in self.params]
        groups = [
            [copy.deepcopy({key: value for key, value in group.items() if key != "params"}), len(group["params"])]
            for group in (*self.ours.param_groups, *self.ours.optim.param_groups)
        ]
        values = [param.detach().clone() for param in self.params]
        return [state, places, groups, values, self.ours.layout, len(self.ours.optim.state)]
