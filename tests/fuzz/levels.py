"""The levels of sharding with their arguments, and what each of them refuses."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from tests.fuzz.optimizers import CLASSES, Options

REFUSED = {
    "zero": frozenset(),
    "overlap": frozenset(
        {
            "a closure",
            "a GradScaler",
            "clipping",
            "edited gradients",
            "several synchronising passes",
            "a second step",
            "a pass without a step",
            "Join",
            "two optimizers",
        }
    ),
    "scatter": frozenset(),
    "sharded": frozenset({"add_param_group", "Join"}),
}
"""What docs/ says that a level refuses, by feature. Anything else must work."""

OTHER_REFUSED = frozenset({"Join", "a GradScaler", "rolling back", "a checkpoint"})
"""What is not drawn with a second optimizer: it is not saved, joins nothing, and its gradients are not unscaled."""

OFF: dict[str, str] = {}
"""What is not drawn today because it is known to fail. An entry goes when its fault is mended."""


@dataclass(frozen=True)
class Level:
    """How training is sharded."""

    kind: str = "zero"  # a key of REFUSED
    arguments: Options = ()  # of the optimizer, or at level 3 of the wrapper
    hook: str = ""

    @property
    def scatters(self) -> bool:
        """Whether a rank has only a part of the gradients."""
        return self.kind in ("scatter", "sharded")

    def lines(self, ddp: str, with_other: bool) -> list[str]:
        """Python that makes ``optimizer``, ``other`` and ``model`` from ``module``, ``groups`` and ``others``."""
        arguments = "".join(f", {name}={value}" for name, value in self.arguments)
        own = arguments if self.kind != "sharded" else ""
        if self.kind == "overlap":
            own += ", overlap_with_ddp=True"
        lines = [f"optimizer = onecopy.ZeroRedundancyOptimizer(groups, CLASS{own}, **options())"]
        if with_other:
            lines.append(f"other = onecopy.ZeroRedundancyOptimizer(others, CLASS{own}, **options())")
        given = "[optimizer, other]" if with_other else "optimizer"
        if self.kind == "sharded":
            return [*lines, f"model = onecopy.ShardedDataParallel(module, {given}{arguments})"]
        lines.append(f"model = DDP(module{ddp})")
        if self.kind == "scatter":
            lines.append(f"model.register_comm_hook({given}, onecopy.reduce_scatter_hook)")
        if self.kind == "overlap":
            lines.append(f"model.register_comm_hook(None, onecopy.{self.hook}(allreduce_hook, model, optimizer))")
        return lines


POLICIES = (
    '"parameter"',
    '"element"',
    "lambda specs, ranks: [(5 * spec.index + 1) % ranks for spec in specs]",
    "lambda specs, ranks: [ranks - 1 for spec in specs]",
)


def draw_level(random: Random, optimizer: str, broadcast_buffers: bool) -> Level:
    """A level that this class can be trained at."""
    kind = random.choice(("zero", "zero", "overlap", "scatter", "sharded", "sharded"))
    arguments: dict[str, str] = {}
    if kind == "sharded":
        if not broadcast_buffers:
            arguments["broadcast_buffers"] = "False"
        if random.random() < 0.7:
            arguments["bucket_bytes"] = random.choice(("1", "500", "2000", "20000"))
        if random.random() < 0.4:
            arguments["overlap_forward"] = "True"
    else:
        if random.random() < 0.7:
            policies = [policy for policy in POLICIES if CLASSES[optimizer].cuts or policy != '"element"']
            arguments["shard_by"] = random.choice(policies)
        if random.random() < 0.4:
            arguments["parameters_as_bucket_view"] = "True"
        if random.random() < 0.15 and arguments.get("shard_by") != '"element"':
            arguments["elementwise"] = "False"
    hook = random.choice(("hook_with_zero_step", "hook_with_zero_step_interleaved")) if kind == "overlap" else ""
    return Level(kind, tuple(arguments.items()), hook)
