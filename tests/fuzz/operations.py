"""What a training program does, one operation after the other. Each is a value that prints itself as Python.

In a script ``module``, ``model``, ``optimizer`` and ``scheduler`` are those that train, ``sharded`` says whether they
are onecopy's, ``seen`` is the list of what is compared afterwards.

An operation has ``features``, by which ``tables.REFUSED`` speaks of it. It may be ``about`` a part of
the model, which must be there then. ``simpler()`` yields the same with less in it, for a failure that is made short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tests.fuzz.programs import Program


@dataclass(frozen=True)
class Text:
    """An operation of the table ``TEXTS``.

    In its text PART stands for a part of the model, PARAMS for its parameters, STATE and OPTION for an entry of the
    class's state and for one of its options, VALUE for one of ``values``, BATCH for a batch, and NUMBER for the number
    of the operation.
    """

    text: str
    features: tuple[str, ...] = ()
    values: tuple[str, ...] = ("",)


def _raising(attempt: str) -> str:
    """An error of the user's on all ranks, which the loop survives."""
    return f"""\
optimizer.zero_grad()
try:
    {attempt}
    raise AssertionError('not raised')
except LookupError:
    pass
module.fails = False
optimizer.zero_grad()
"""


def _refused(attempt: str) -> str:
    """A call that the plain optimizer refuses too, after which nothing has changed."""
    return f"""\
try:
    {attempt}
    raise AssertionError('not refused')
except ValueError:
    pass
"""


def _uneven(first: str) -> str:
    """Steps in a join context, one more on each rank than on the one before it."""
    return f"""\
with Join([model, optimizer] if sharded else [model], model=model):
    for batch in range(1 + RANK):
        optimizer.zero_grad()
{first}        loss(model, BATCH + batch).backward()
        optimizer.step()
optimizer.zero_grad()
if not sharded:  # a plain optimizer has stepped only where there were inputs
    params = [p for group in optimizer.param_groups for p in group['params']]
    states = [[optimizer.state.pop(p, {{}}) for p in params]]
    dist.broadcast_object_list(states, src=dist.get_world_size() - 1)
    optimizer.state.update({{p: state for p, state in zip(params, states[0]) if state}})
seen.append((NUMBER, values(model)))
"""


def _moving(save: str) -> str:
    """Save a checkpoint and go on from it with new objects, at another level."""
    return f"""\
optimizer.zero_grad()
if sharded:
    before, its_scheduler = module, scheduler
    {save}
    module, model, optimizer, scheduler = build(sharded, 1)
    checkpoint.load(FOLDER, model=model, optimizer=optimizer)
    for p, old in zip(module.parameters(), before.parameters()):
        p.requires_grad_(old.requires_grad)
    if scheduler:
        scheduler.load_state_dict(its_scheduler.state_dict())
"""


UNSYNCHRONISED = """\
        with model.no_sync():
            loss(model, BATCH + 5 + batch).backward()
"""
SAVE = "checkpoint.save(FOLDER, NUMBER, model=model, optimizer=optimizer)"
WAIT = "model.state_dict()  # waits for what is on its way\n"
GATHER = "state = whole_state(optimizer)\nseen.append((NUMBER, copy.deepcopy(state)))\n"
STATES = "states = [optimizer.state.get(p, {}).get('STATE') for p in PARAMS]\n"

PART = "PART"
ADD = "add a group"
HOOKS = ("hook the gradient", "hook the pass")
KEEP, USE_KEPT = "keep the state", "multiply kept state"
MOVES = ("move", "move, saved in background")
TURN = "a turn of the other optimizer"
SIMPLE = ("freeze", "edit parameters", *HOOKS)
"""Operations that know nothing of the optimizer's class."""

TEXTS = {
    "freeze": Text("module.PART.requires_grad_(VALUE)", ("freezing",), ("False", "True")),
    # Hooks that come after the model was wrapped: on the gradient of a pass, or after it.
    "hook the gradient": Text(
        """\
for p in PARAMS:
    if p.requires_grad:
        p.register_hook(lambda grad: grad * 0.5)
"""
    ),
    "hook the pass": Text(
        """\
def halve(p):
    p.grad.mul_(0.5)
for p in PARAMS:
    if p.requires_grad:
        p.register_post_accumulate_grad_hook(halve)
""",
        ("an edit of param.grad in each pass",),
    ),
    # The part belongs to the second optimizer; the gradients of the first one are kept.
    TURN: Text(
        """\
other.zero_grad()
loss(model, BATCH).backward()
other.step()
seen.append((NUMBER, values(model)))
""",
        ("two optimizers",),
    ),
    # A part that no group has had so far.
    ADD: Text("optimizer.add_param_group({'params': PARAMSVALUE})", ("add_param_group",), ("", ", 'lr': 0.02")),
    "edit a group": Text("optimizer.param_groups[VALUE]['OPTION'] *= 0.5", ("an edited group",), ("0", "0", "-1")),
    "multiply state": Text(
        STATES
        + """\
for state in states:
    if state is not None:
        state.mul_(0.5)
"""
    ),
    "replace state": Text(
        """\
for p in PARAMS:
    if optimizer.state.get(p, {}).get('STATE') is not None:
        optimizer.state[p]['STATE'] = optimizer.state[p]['STATE'] * 0.5
""",
        ("replaced state",),
    ),
    KEEP: Text(STATES + "kept = [state for state in states if state is not None]"),
    USE_KEPT: Text("for tensor in kept:\n    tensor.mul_(0.5)"),
    "edit data": Text(WAIT + "for p in PARAMS:\n    p.data.mul_(0.5)"),
    "edit parameters": Text(WAIT + "with torch.no_grad():\n    for p in PARAMS:\n        p.mul_(0.5)"),
    "reload": Text(GATHER + "optimizer.load_state_dict(state)", ("replaced state",)),
    "reload through a plain optimizer": Text(
        GATHER
        + """\
between = CLASS([{'params': group['params']} for group in optimizer.param_groups], **options())
between.load_state_dict(state)
optimizer.load_state_dict(between.state_dict())
""",
        ("replaced state",),
    ),
    "move": Text(_moving(SAVE), ("a checkpoint",)),
    "move, saved in background": Text(
        _moving(SAVE.replace(")", ", blocking=False)") + "\n    checkpoint.wait()"), ("a checkpoint",)
    ),
    "load other values into the model": Text(
        "model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})"
    ),
    "roll back a step": Text(
        f"""\
optimizer.zero_grad()
if sharded:  # plain DDP does not make the step that is undone
    {SAVE}
    loss(model, BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.load(FOLDER, model=model, optimizer=optimizer)
""",
        ("rolling back",),
    ),
    "evaluate": Text(
        """\
model.eval()
with torch.no_grad():
    seen.append((NUMBER, loss(model, BATCH)))
model.train()
""",
        ("evaluation",),
    ),
    "begin with the state anew": Text("optimizer.state = collections.defaultdict(dict)", ("replaced state",)),
    "raise in a forward": Text("module.fails = True\n" + _raising("loss(model, BATCH)")),
    "raise in a closure": Text(_raising("optimizer.step(fail)"), ("a closure",)),
    "raise in a closure after its pass": Text(
        _raising("optimizer.step(lambda: [loss(model, BATCH).backward(), fail()])"), ("a closure",)
    ),
    "a refused load": Text(_refused("optimizer.load_state_dict({'state': {}, 'param_groups': []})")),
    "a refused group": Text(
        _refused("optimizer.add_param_group({'params': list(module.base.parameters())})"), ("add_param_group",)
    ),
    "uneven inputs": Text(_uneven(""), ("Join",)),
    "uneven inputs with no_sync": Text(_uneven(UNSYNCHRONISED), ("Join", "no_sync in Join")),
}


@dataclass(frozen=True)
class Do:
    """One of ``TEXTS``."""

    what: str
    part: str = ""
    key: str = ""  # for STATE or OPTION
    value: str = ""

    @property
    def features(self) -> frozenset[str]:
        return frozenset(TEXTS[self.what].features)

    @property
    def about(self) -> str:
        return self.part

    def lines(self, number: int, program: Program) -> list[str]:
        params = f"params_of(module, {self.part!r})"
        if program.named and self.what == ADD:
            params = f"[(name, p) for name, p in module.named_parameters() if name.split('.')[0] == {self.part!r}]"
        given = {"PARAMS": params, "PART": self.part, "STATE": self.key, "OPTION": self.key, "VALUE": self.value}
        text = TEXTS[self.what].text
        for name, value in {**given, "BATCH": str(10 * number), "NUMBER": str(number)}.items():
            text = text.replace(name, value)
        return text.splitlines()

    def simpler(self) -> Iterator[Do]:
        if self.value != TEXTS[self.what].values[0]:
            yield replace(self, value=TEXTS[self.what].values[0])


CLIPPED = """\
params = [p for group in optimizer.param_groups for p in group['params'] if p.grad is not None]
if sharded:
    norms.append({clip})
else:
    norm = nn.utils.get_total_norm([p.grad for p in params], {norm_type})
    ours = norms.pop(0) if norms else norm
    rtol = 1e-2 if norm.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours.double(), norm.double(), rtol=rtol, atol=0)
    nn.utils.clip_grads_with_norm_(params, {max_norm}, ours)
"""
"""The norm is added up in another order: it must be close, and then both sides scale by the same."""


@dataclass(frozen=True)
class Train:
    """Backward passes and a step, in all the ways of a training loop."""

    zero: str = "none"  # what becomes of earlier gradients: none, zeros, kept; with after, these are let go too
    unsynchronised: int = 0  # how many passes under no_sync come first
    freeze_between: str = ""  # a part that is frozen after these, and trained again after the step
    synchronised: int = 1  # how many passes that synchronise
    closure: bool = False  # whether the one pass runs in a closure
    max_norm: float = 0.0  # what gradients are clipped to; 0 is not at all
    norm_type: str = "2.0"
    by_torch: bool = True  # whether torch's function clips, and not the optimizer's method
    steps: int = 1  # how many times step() is called
    in_evaluation: bool = False  # whether the model is in evaluation mode meanwhile
    scale: int = 0  # of a GradScaler, a power of two; 0 is none
    edited: str = ""  # a part whose gradients are edited before the step
    edit: str = "p.grad.mul_(0.5)"  # what is done to them

    what: ClassVar[str] = "train"

    @property
    def about(self) -> str:
        return self.freeze_between or self.edited

    def simpler(self) -> Iterator[Train]:
        for field in fields(self):
            if getattr(self, field.name) != field.default:
                changed: Any = {field.name: field.default}
                yield replace(self, **changed)

    @property
    def features(self) -> frozenset[str]:
        present = {
            "gradients that add up over steps": self.zero == "kept",
            "several synchronising passes": self.synchronised > 1,
            "a closure": self.closure,
            "clipping": self.max_norm > 0,
            "clipping by the largest": self.max_norm > 0 and "inf" in self.norm_type,
            "a second step": self.steps > 1,
            "a pass without a step": self.steps == 0,
            "evaluation mode": self.in_evaluation,
            "a GradScaler": self.scale > 0,
            "no_sync": self.unsynchronised > 0,
            "freezing after no_sync": bool(self.freeze_between),
            "edited gradients": bool(self.edited),
        }
        return frozenset(name for name, holds in present.items() if holds)

    def lines(self, number: int, program: Program) -> list[str]:
        zero = ["optimizer.zero_grad(set_to_none=False)" if self.zero == "zeros" else "optimizer.zero_grad()"]
        if self.closure:
            body = ["def closure():", f"    {zero[0]}", f"    result = loss(model, {10 * number})"]
            body += ["    result.backward()", "    return result"]
            body += [f"seen.append(({number}, optimizer.step(closure).item()))"] * self.steps
        else:
            body = [*(zero if self.zero != "kept" else []), *self._in_order(number, program)]
        if self.in_evaluation:
            body = ["model.eval()", *body, "model.train()"]
        if self.steps and program.scheduler:
            body.append("scheduler.step()")
        body.append(f"seen.append(({number}, values(model)))")
        return body + (["optimizer.zero_grad()"] if self.zero == "after" or self.steps == 0 else [])

    def _in_order(self, number: int, program: Program) -> list[str]:
        last = self.unsynchronised + self.synchronised
        losses = [f"loss(model, {batch})" for batch in range(10 * number, 10 * number + last)]
        passes = [f"scaler.scale({each}).backward()" if self.scale else f"{each}.backward()" for each in losses]
        lines = [f"scaler = torch.amp.GradScaler('cpu', init_scale={self.scale}.0)"] if self.scale else []
        if self.unsynchronised:
            lines += ["with model.no_sync():", *[f"    {each}" for each in passes[: self.unsynchronised]]]
        if self.freeze_between:
            lines.append(f"module.{self.freeze_between}.requires_grad_(False)")
        lines += passes[self.unsynchronised :]
        if self.scale:
            lines.append("scaler.unscale_(optimizer)")
        if self.edited:
            lines.append(f"for p in params_of(module, {self.edited!r}):")
            lines += ["    if p.grad is not None:", f"        {self.edit}"]
        if self.max_norm:
            lines += self._clip(number, program)
        lines += ["scaler.step(optimizer)" if self.scale else "optimizer.step()"] * self.steps
        if self.freeze_between:
            lines.append(f"module.{self.freeze_between}.requires_grad_(True)")
        return lines

    def _clip(self, number: int, program: Program) -> list[str]:
        arguments = f"{self.max_norm}, norm_type={self.norm_type}"
        if not program.scatters:
            clip = f"norm = nn.utils.clip_grad_norm_(module.parameters(), {arguments})"
            return [clip, f"seen.append(({number}, norm))"]
        clip = f"optimizer.clip_grad_norm_({arguments})"
        if self.by_torch:
            clip = f"nn.utils.clip_grad_norm_(params, {arguments})"
        return CLIPPED.format(clip=clip, norm_type=self.norm_type, max_norm=self.max_norm).splitlines()


VARIANTS: tuple[dict[str, tuple[Any, ...]], ...] = (
    {"zero": ("kept",)},
    {"unsynchronised": (1, 2)},
    {"unsynchronised": (1,), "freeze_between": (PART,)},
    {"synchronised": (2,)},
    {"closure": (True,)},
    {"max_norm": (0.01, 0.1, 100.0)},
    {"max_norm": (0.1,), "by_torch": (False,)},
    {"max_norm": (0.01,), "norm_type": ("float('inf')", "3.0", "1.0")},
    {"steps": (0, 2)},
    {"in_evaluation": (True,)},
    {"scale": (256,)},
    {"edited": (PART,), "edit": ("p.grad.mul_(0.5)", "p.grad = None", "p.grad.zero_()")},
)
"""What is drawn for a step, beside a plain one: fields with values to choose from."""

Operation = Do | Train
