"""A program as a script: what the ranks run, and what is printed for a failure."""

from __future__ import annotations

import re
from string import Template

from tests.fuzz.operations import Do, EditState, Lines
from tests.fuzz.programs import TOLERANCE, Program

HEAD = Template('''\
"""$title

torchrun --standalone --nproc-per-node $world_size $name
"""

$imports

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
$begin    norms = []
    ours = train(True, norms)
    plain = train(False, norms)
$end    for (operation, mine), (_, theirs) in zip(ours, plain, strict=True):
        compare(mine, theirs, f"operation {operation}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    print(f"rank {RANK}: equal to plain DDP")
    dist.destroy_process_group()
''')

PARAMS_OF = """\
def params_of(module, part):
    return [p for name, p in module.named_parameters() if name.split(".")[0] == part]
"""

VALUES = Template("""\
def values(model):
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()$which}
""")

WHOLE_STATE = """\
def whole_state(optimizer):
    if not isinstance(optimizer, onecopy.ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    for to in range(dist.get_world_size()):
        optimizer.consolidate_state_dict(to=to)
        if to == RANK:
            state = optimizer.state_dict()
    return state if "optimizer_class" not in state["param_groups"][0] else [*onecopy.split_state_dict(state).values()]
"""

PLAIN_CLASSES = """\
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
"""

FAIL = """\
def fail():
    raise LookupError("an error of the user's")
"""

CHECK_REPLICAS = """\
def check_replicas(module):
    mine = torch.cat([p.detach().double().reshape(-1) for p in module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone), "the replicas differ"
"""

COMPARE = Template("""\
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
""")

BEGIN_FOLDER = """\
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder)
    FOLDER = folder[0]
"""

END_FOLDER = """\
    if RANK == 0:
        shutil.rmtree(FOLDER)
"""


def indented(lines: Lines) -> Lines:
    """One level deeper."""
    return [f"    {line}" for line in lines]


def script(program: Program, name: str = "script.py", title: str = "") -> str:
    """The program as Python."""
    train = "\n".join(indented(_train(program)))
    build = "\n".join(indented(_build(program)))
    helpers = [PARAMS_OF] if "params_of(" in train + build else []
    helpers += [PLAIN_CLASSES] if program.matrices else []
    helpers += [FAIL] if "fail" in train else []
    helpers += [VALUES.substitute(which=_which(program)), WHOLE_STATE]
    helpers += [] if program.exact else [CHECK_REPLICAS]
    helpers.append(
        COMPARE.substitute(tolerance=0, equal="ours == plain")
        if program.exact
        else COMPARE.substitute(
            tolerance=TOLERANCE, equal=f"ours == plain or abs(ours - plain) <= {TOLERANCE} * (1 + abs(plain))"
        )
    )
    return HEAD.substitute(
        title=title or f"Program {program.seed} of make fuzz: onecopy must train as plain DDP does.",
        name=name,
        world_size=program.world_size,
        imports="\n".join(_imports(program, train + build)),
        optimizer=program.optimizer,
        options=_arguments(program.options),
        model="\n".join(indented(_model(program))).replace("\n    \n", "\n\n"),
        cast="" if program.dtype == "float32" else f".to(torch.{program.dtype})",
        build=build,
        made="module, model, optimizer, scheduler" + (", other" if program.of_other else ""),
        optimizers="optimizer, other" if program.of_other else "optimizer",
        helpers="\n\n".join(helpers) + "\n",
        train=train,
        begin=BEGIN_FOLDER if "FOLDER" in train else "",
        end=END_FOLDER if "FOLDER" in train else "",
    )


def _arguments(options: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options)


def _imports(program: Program, text: str) -> list[str]:
    standard = ["import warnings"]
    standard += ["import collections"] if "collections." in text else []
    standard += ["import copy"] if re.search(r"\bcopy\.", text) else []
    standard += ["import shutil", "import tempfile"] if "FOLDER" in text else []
    torchs = ["import torch", "import torch.distributed as dist", "from torch import nn"]
    if "Join(" in text:
        torchs.append("from torch.distributed.algorithms.join import Join")
    if "allreduce_hook" in text:
        torchs.append("from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook")
    torchs.append("from torch.nn.parallel import DistributedDataParallel as DDP")
    if program.scheduler:
        torchs.append(f"from torch.optim.lr_scheduler import {program.scheduler.partition('(')[0]}")
    ours = ["import onecopy", *(["from onecopy import checkpoint"] if "FOLDER" in text else [])]
    return [*sorted(standard), "", *torchs, "", *ours]


def _model(program: Program) -> list[str]:
    fails = Do("raise in a forward") in program.operations
    forward = [part.forward() for part in program.parts]
    if fails:
        forward.insert((len(forward) + 1) // 2, ["if self.fails:", "    fail()"])
    lines = ["def __init__(self):", "    super().__init__()"]
    lines += ["    self.fails = False"] if fails else []
    lines += [f"    {line}" for part in program.parts for line in part.init()]
    lines += ["", "def forward(self, h, tokens, step):"]
    lines += [f"    {line}" for lines in forward for line in lines]
    return [*lines, "    return h"]


def _build(program: Program) -> list[str]:
    ddp = f", {_arguments(program.ddp)}" if program.ddp else ""
    lines = _groups(program)
    plain = "PlainClasses(groups, options())" if program.matrices else "CLASS(groups, **options())"
    lines += ["if not sharded:", f"    optimizer = {plain}", f"    model = DDP(module{ddp})"]
    lines += ["    other = CLASS(others, **options())"] if program.of_other else []
    if program.world_size > 2 and program.levels[0].kind == "overlap":
        # It divides by three where DDP itself multiplies by a third.
        lines.append("    model.register_comm_hook(None, allreduce_hook)")
    for number, level in enumerate(program.levels):
        condition = "else:" if number == len(program.levels) - 1 else f"elif level == {number}:"
        lines += [condition, *indented(level.lines(ddp, bool(program.of_other)))]
    return [*lines, f"scheduler = {program.scheduler or None}"]


def _groups(program: Program) -> list[str]:
    source = "module.named_parameters()" if program.named else "module.parameters()"
    late, others = program.added + program.of_other, []
    if late:
        pair = "(name, p)" if program.named else "p"
        source = f"[{pair} for name, p in module.named_parameters() if name.split('.')[0] not in {late}]"
    if program.of_other:
        others = [f"others = {source.replace(f'not in {late}', f'in {program.of_other}')}"]
    if program.matrices:
        matrices = "{'params': [p for p in params if p.dim() == 2], 'optimizer_class': torch.optim.Muon, 'lr': 0.01}"
        rest = "{'params': [p for p in params if p.dim() != 2]}"
        return [f"params = list({source})", f"groups = [{matrices}, {rest}]", *others]
    if len(program.groups) == 1:
        return [f"groups = {source}" if late else f"groups = list({source})", *others]
    count = len(program.groups)
    groups = [
        f"{{'params': params[{number}::{count}]" + "".join(f", {key!r}: {value}" for key, value in group) + "}"
        for number, group in enumerate(program.groups)
    ]
    return [f"params = list({source})", f"groups = [{', '.join(groups)}]", *others]


def _which(program: Program) -> str:
    """A new DDP sends buffers where DDP skips it (after ``no_sync``): only rank 0's are the same then."""
    if not (program.has("batch_norm") and program.moves):
        return ""
    return " if RANK == 0 or '.running_' not in name"


def _train(program: Program) -> list[str]:
    lines: list[str] = []
    if any(isinstance(operation, EditState) and operation.kept for operation in program.operations):
        lines.append("kept = []")
    for number, operation in enumerate(program.operations):
        lines += [f"# operation {number}", *operation.lines(number, program)]
    if not program.exact:
        lines.append("check_replicas(model.module)")
    return lines
