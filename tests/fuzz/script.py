"""A program as a script: what the ranks run, and what is printed for a failure."""

from __future__ import annotations

import re
from string import Template

from tests.fuzz.operations import Do
from tests.fuzz.programs import TOLERANCE, Level, Program
from tests.fuzz.tables import PARTS, Options

HEAD = '''\
"""Program {seed} of make fuzz: onecopy must train as plain DDP does.

torchrun --standalone --nproc-per-node {world_size} {name}
"""

{imports}
'''

BODY = """
CLASS = torch.optim.$optimizer


def options():
    return dict($options)


class Model(nn.Module):
$model


def loss(model, step):
    generator = torch.Generator().manual_seed(1000 * step + RANK)
    inputs = torch.randn(4, 16, generator=generator)
    tokens = torch.randint(40, (4,), generator=generator)
    return model(inputs$cast, tokens, step).float().square().mean()


def build(sharded, level):
    torch.manual_seed(0)
    module = Model()$cast
$build
    return $made


$helpers


def train(sharded, norms):
    $made = build(sharded, 0)
    seen = []
$train
    seen.append(("the end", [whole_state(each) for each in [$optimizers]]))
    return seen


def main():
    global RANK, FOLDER
    RANK = dist.get_rank()
    warnings.simplefilter("error")
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    FOLDER = folder[0]
    norms = []
    ours = train(True, norms)
    plain = train(False, norms)
    if RANK == 0:
        shutil.rmtree(FOLDER)
    for (operation, mine), (_, theirs) in zip(ours, plain, strict=True):
        compare(mine, theirs, f"operation {operation}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    print(f"rank {RANK}: equal to plain DDP")
    dist.destroy_process_group()
"""

IMPORTS = """\
import collections
import copy
import shutil
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

import onecopy
from onecopy import checkpoint
"""

HELPERS = {
    "params_of": """\
def params_of(module, part):
    return [p for name, p in module.named_parameters() if name.split(".")[0] == part]
""",
    "fail": """\
def fail():
    raise LookupError("an error of the user's")
""",
    "values": """\
def values(model):
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()$which}
""",
    "whole_state": """\
def whole_state(optimizer):
    if not isinstance(optimizer, onecopy.ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    for to in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=to)
        if to == RANK:
            state = optimizer.state_dict()
    return state if "optimizer_class" not in state["param_groups"][0] else [*onecopy.split_state_dict(state).values()]
""",
    "PlainClasses": """\
class PlainClasses(torch.optim.Optimizer):
    def __init__(self, groups, options):
        matrices = {key: value for key, value in groups[0].items() if key != "optimizer_class"}
        self.parts = [torch.optim.Muon([matrices]), CLASS([groups[1]], **options)]
        super().__init__([{"params": []}], {})
        self.param_groups = [part.param_groups[0] for part in self.parts]

    def step(self, closure=None):
        result = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return result

    def state_dict(self):
        return [part.state_dict() for part in self.parts]
""",
    "check_replicas": """\
def check_replicas(module):
    mine = torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone), "the replicas differ"
""",
    "compare": """\
def compare(ours, plain, where):
    if isinstance(plain, torch.Tensor):
        assert ours.stride() == plain.stride(), f"{where}: strides {ours.stride()} instead of {plain.stride()}"
        torch.testing.assert_close(
            ours, plain, rtol=$tolerance, atol=$tolerance, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys(), f"{where}: keys {list(ours)} instead of {list(plain)}"
        for key in plain:
            compare(ours[key], plain[key], f"{where}, {key}")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), f"{where}: {len(ours)} instead of {len(plain)}"
        for number, (mine, theirs) in enumerate(zip(ours, plain)):
            compare(mine, theirs, f"{where}, {number}")
    else:
        assert $equal, f"{where}: {ours!r} instead of {plain!r}"
""",
}
"""Functions of a script; those that it uses are printed."""


def script(program: Program, name: str = "script.py") -> str:
    """The program as Python."""
    model, train = _indented(_model(program)), _indented(_train(program))
    tolerance = 0 if program.exact else TOLERANCE
    equal = "ours == plain" + ("" if program.exact else f" or abs(ours - plain) <= {TOLERANCE} * (1 + abs(plain))")
    # A new DDP sends buffers where DDP skips it (after no_sync): only rank 0's are the same then.
    differ = "batch_norm" in program.parts and program.moves
    which = " if RANK == 0 or '.running_' not in name" if differ else ""
    used = f"{model} {train} {'PlainClasses' if program.matrices else ''} values whole_state compare"
    helpers = [text for helper, text in HELPERS.items() if re.search(rf"\b{helper}\b", used)]
    body = Template(BODY).substitute(
        optimizer=program.optimizer,
        options=_arguments(program.options),
        model=model,
        cast="" if program.dtype == "float32" else f".to(torch.{program.dtype})",
        build=_indented(_build(program)),
        made="module, model, optimizer, scheduler" + (", other" if program.of_other else ""),
        optimizers="optimizer, other" if program.of_other else "optimizer",
        helpers=Template("\n\n".join(helpers).rstrip()).substitute(which=which, tolerance=tolerance, equal=equal),
        train=train,
    )
    imports = [line for line in IMPORTS.splitlines() if not line or re.search(rf"(?<!\.)\b{line.split()[-1]}\b", body)]
    head = HEAD.format(seed=program.seed, world_size=program.world_size, name=name, imports="\n".join(imports))
    return head + body


def _indented(lines: list[str]) -> str:
    """Lines one level deeper."""
    return "\n".join(f"    {line}" if line else "" for line in lines)


def _arguments(options: Options) -> str:
    return ", ".join(f"{name}={value}" for name, value in options)


def _model(program: Program) -> list[str]:
    fails = Do("raise in a forward") in program.operations

    def lines_of(which: str) -> list[list[str]]:
        return [getattr(PARTS[part], which).replace("@", f"self.{part}").splitlines() for part in program.parts]

    init, forward = lines_of("init"), lines_of("forward")
    if fails:
        init.insert(0, ["self.fails = False"])
        forward.insert((len(forward) + 1) // 2, ["if self.fails:", "    fail()"])
    lines = ["def __init__(self):", "    super().__init__()"]
    lines += [f"    {line}" for each in init for line in each]
    lines += ["", "def forward(self, h, tokens, step):"]
    lines += [f"    {line}" for each in forward for line in each]
    return [*lines, "    return h"]


def _build(program: Program) -> list[str]:
    ddp = "".join(f", {name}={value}" for name, value in program.ddp)
    lines = _groups(program)
    plain = "PlainClasses(groups, options())" if program.matrices else "CLASS(groups, **options())"
    lines += ["if not sharded:", f"    optimizer = {plain}", f"    model = DDP(module{ddp})"]
    lines += ["    other = CLASS(others, **options())"] if program.of_other else []
    if program.world_size > 2 and program.levels[0].kind == "overlap":
        # It divides by three where DDP itself multiplies by a third.
        lines.append("    model.register_comm_hook(None, allreduce_hook)")
    for number, level in enumerate(program.levels):
        lines.append("else:" if number == len(program.levels) - 1 else f"elif level == {number}:")
        lines += [f"    {line}" for line in _sharded(level, ddp, bool(program.of_other))]
    return [*lines, f"scheduler = {f'torch.optim.lr_scheduler.{program.scheduler}' if program.scheduler else None}"]


def _sharded(level: Level, ddp: str, with_other: bool) -> list[str]:
    """Lines that make ``optimizer``, ``other`` and ``model`` from ``module``, ``groups`` and ``others``."""
    arguments = "".join(f", {name}={value}" for name, value in level.arguments)
    own = "" if level.kind == "sharded" else arguments
    if level.kind == "overlap":
        own += ", overlap_with_ddp=True"
    lines = [f"optimizer = onecopy.ZeroRedundancyOptimizer(groups, CLASS{own}, **options())"]
    if with_other:
        lines.append(f"other = onecopy.ZeroRedundancyOptimizer(others, CLASS{own}, **options())")
    given = "[optimizer, other]" if with_other else "optimizer"
    if level.kind == "sharded":
        return [*lines, f"model = onecopy.ShardedDataParallel(module, {given}{arguments})"]
    lines.append(f"model = DDP(module{ddp})")
    if level.kind == "scatter":
        lines.append(f"model.register_comm_hook({given}, onecopy.reduce_scatter_hook)")
    if level.kind == "overlap":
        lines.append(f"model.register_comm_hook(None, onecopy.{level.hook}(allreduce_hook, model, optimizer))")
    return lines


def _groups(program: Program) -> list[str]:
    pair = "(name, p)" if program.named else "p"
    params = f"[{pair} for name, p in module.named_parameters() if name.split('.')[0]"
    lines = [f"groups = params = {params} not in {program.added + program.of_other}]"]
    lines += [f"others = {params} in {program.of_other}]"] if program.of_other else []
    if program.matrices:
        matrices = "{'params': [p for p in params if p.dim() == 2], 'optimizer_class': torch.optim.Muon, 'lr': 0.01}"
        return [*lines, f"groups = [{matrices}, {{'params': [p for p in params if p.dim() != 2]}}]"]
    count = len(program.groups)
    groups = [
        f"{{'params': params[{number}::{count}]" + "".join(f", {key!r}: {value}" for key, value in group) + "}"
        for number, group in enumerate(program.groups)
    ]
    return [*lines, f"groups = [{', '.join(groups)}]"] if count > 1 else lines


def _train(program: Program) -> list[str]:
    lines: list[str] = []
    for number, operation in enumerate(program.operations):
        lines += [f"# operation {number}", *operation.lines(number, program)]
    if not program.exact:
        lines.append("check_replicas(model.module)")
    return lines
