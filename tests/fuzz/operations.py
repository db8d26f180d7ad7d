"""What a training program does, one operation after the other. Each is a value that prints itself as Python.

In a script ``module``, ``model``, ``optimizer`` and ``scheduler`` are those that train, ``sharded`` says whether they
are onecopy's, ``seen`` is the list of what is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tests.fuzz.programs import Program

Lines = list[str]


@dataclass(frozen=True)
class Operation:
    """Something that a program does.

    An operation says what it needs: ``part`` is the part of the model that it is about, if there is one, and
    ``features`` are names that ``levels.REFUSED`` and ``levels.OFF`` speak of.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    @property
    def features(self) -> frozenset[str]:
        return self.needs

    @property
    def about(self) -> str:
        """The part of the model that must be there, if any."""
        return str(getattr(self, "part", ""))

    def lines(self, number: int, program: Program) -> Lines:
        raise NotImplementedError

    def simpler(self) -> Iterator[Operation]:
        """The same with one more field as it is by default."""
        for field in fields(self):
            if field.default is not MISSING and getattr(self, field.name) != field.default:
                changed: Any = {field.name: field.default}
                yield replace(self, **changed)


@dataclass(frozen=True)
class Freeze(Operation):
    """Stop training a part, or go on with it."""

    part: str
    trained: bool = False

    needs = frozenset({"freezing"})

    def lines(self, number: int, program: Program) -> Lines:
        return [f"module.{self.part}.requires_grad_({self.trained})"]


@dataclass(frozen=True)
class LateHook(Operation):
    """Register hooks on a part's parameters after the model was wrapped: on the gradient of a pass, or after it."""

    part: str
    after: bool = False

    @property
    def features(self) -> frozenset[str]:
        return frozenset({"an edit of param.grad in each pass"} if self.after else ())

    def lines(self, number: int, program: Program) -> Lines:
        hook = (
            ["def halve(p):", "    p.grad.mul_(0.5)"] if self.after else ["def halve(grad):", "    return grad * 0.5"]
        )
        register = "register_post_accumulate_grad_hook" if self.after else "register_hook"
        params = f"params_of(module, {self.part!r})"
        return [*hook, f"for p in {params}:", "    if p.requires_grad:", f"        p.{register}(halve)"]


@dataclass(frozen=True)
class Turn(Operation):
    """A step of the second optimizer, which this part belongs to; the gradients of the first one are kept."""

    part: str

    needs = frozenset({"two optimizers"})

    def lines(self, number: int, program: Program) -> Lines:
        return [
            "other.zero_grad()",
            f"loss(model, {10 * number}).backward()",
            "other.step()",
            f"seen.append(({number}, values(model)))",
        ]


@dataclass(frozen=True)
class AddGroup(Operation):
    """Add a part that no group has had so far."""

    part: str
    lr: float = 0.0

    needs = frozenset({"add_param_group"})

    def lines(self, number: int, program: Program) -> Lines:
        options = f", 'lr': {self.lr}" if self.lr else ""
        params = f"params_of(module, {self.part!r})"
        if program.named:
            params = f"[(name, p) for name, p in module.named_parameters() if name.split('.')[0] == {self.part!r}]"
        return [f"optimizer.add_param_group({{'params': {params}{options}}})"]


@dataclass(frozen=True)
class EditGroup(Operation):
    """Change an option of a group."""

    key: str
    factor: float = 0.5
    group: int = 0

    needs = frozenset({"an edited group"})

    def lines(self, number: int, program: Program) -> Lines:
        return [f"optimizer.param_groups[{self.group}][{self.key!r}] *= {self.factor}"]


@dataclass(frozen=True)
class EditState(Operation):
    """Multiply state: what is there now, in place or not, or what was there when an earlier operation kept it."""

    part: str
    key: str
    factor: float = 0.5
    keeps: bool = False
    kept: bool = False
    replaces: bool = False

    def lines(self, number: int, program: Program) -> Lines:
        if self.kept:
            return ["for tensor in kept:", f"    tensor.mul_({self.factor})"]
        if self.replaces:
            return [
                f"for p in params_of(module, {self.part!r}):",
                f"    if optimizer.state.get(p, {{}}).get({self.key!r}) is not None:",
                f"        optimizer.state[p][{self.key!r}] = optimizer.state[p][{self.key!r}] * {self.factor}",
            ]
        lines = [f"states = [optimizer.state.get(p, {{}}).get({self.key!r}) for p in params_of(module, {self.part!r})]"]
        if self.keeps:
            return [*lines, "kept = [state for state in states if state is not None]"]
        return [*lines, "for state in states:", "    if state is not None:", f"        state.mul_({self.factor})"]


@dataclass(frozen=True)
class EditParams(Operation):
    """Multiply parameters in place."""

    part: str
    factor: float = 0.5
    data: bool = True

    def lines(self, number: int, program: Program) -> Lines:
        if self.data:
            edit = [f"for p in params_of(module, {self.part!r}):", f"    p.data.mul_({self.factor})"]
        else:
            edit = [
                "with torch.no_grad():",
                f"    for p in params_of(module, {self.part!r}):",
                f"        p.mul_({self.factor})",
            ]
        return ["model.state_dict()  # waits for what is on its way", *edit]


@dataclass(frozen=True)
class Reload(Operation):
    """The whole state dict into a plain optimizer, and from there back."""

    through_plain: bool = True

    def lines(self, number: int, program: Program) -> Lines:
        through = [
            "between = CLASS([{'params': group['params']} for group in optimizer.param_groups], **options())",
            "between.load_state_dict(state)",
            "state = between.state_dict()",
        ]
        return [
            "state = whole_state(optimizer)",
            f"seen.append(({number}, copy.deepcopy(state)))",
            *(through if self.through_plain else []),
            "optimizer.load_state_dict(state)",
        ]


@dataclass(frozen=True)
class Move(Operation):
    """Save a checkpoint and go on from it with new objects, at another level."""

    to: int
    blocking: bool = True

    needs = frozenset({"a checkpoint"})

    def lines(self, number: int, program: Program) -> Lines:
        return [
            "optimizer.zero_grad()",
            "if sharded:",
            "    before, its_scheduler = module, scheduler",
            f"    checkpoint.save(FOLDER, {number}, model=model, optimizer=optimizer"
            f"{'' if self.blocking else ', blocking=False'})",
            *([] if self.blocking else ["    checkpoint.wait()"]),
            f"    module, model, optimizer, scheduler = build(sharded, {self.to})",
            "    checkpoint.load(FOLDER, model=model, optimizer=optimizer)",
            "    for p, old in zip(module.parameters(), before.parameters()):",
            "        p.requires_grad_(old.requires_grad)",
            *(["    scheduler.load_state_dict(its_scheduler.state_dict())"] if program.scheduler else []),
        ]


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
{first}        loss(model, @ + batch).backward()
        optimizer.step()
optimizer.zero_grad()
if not sharded:  # a plain optimizer has stepped only where there were inputs
    params = [p for group in optimizer.param_groups for p in group['params']]
    states = [[optimizer.state.pop(p, {{}}) for p in params]]
    dist.broadcast_object_list(states, src=dist.get_world_size() - 1)
    optimizer.state.update({{p: state for p, state in zip(params, states[0]) if state}})
seen.append((#, values(model)))
"""


UNSYNCHRONISED = """\
        with model.no_sync():
            loss(model, @ + 5 + batch).backward()
"""

TEXTS: dict[str, tuple[frozenset[str], str]] = {
    "load other values into the model": (
        frozenset(),
        """\
model.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in model.state_dict().items()})
""",
    ),
    "roll back a step": (
        frozenset({"rolling back"}),
        """\
optimizer.zero_grad()
if sharded:  # plain DDP does not make the step that is undone
    checkpoint.save(FOLDER, #, model=model, optimizer=optimizer)
    loss(model, @).backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.load(FOLDER, model=model, optimizer=optimizer)
""",
    ),
    "evaluate": (
        frozenset({"evaluation"}),
        """\
model.eval()
with torch.no_grad():
    seen.append((#, loss(model, @)))
model.train()
""",
    ),
    "begin with the state anew": (
        frozenset({"another state"}),
        "optimizer.state = collections.defaultdict(dict)",
    ),
    "raise in a forward": (frozenset(), "module.fails = True\n" + _raising("loss(model, @)")),
    "raise in a closure": (frozenset({"a closure"}), _raising("optimizer.step(fail)")),
    "raise in a closure after its pass": (
        frozenset({"a closure"}),
        _raising("optimizer.step(lambda: [loss(model, @).backward(), fail()])"),
    ),
    "a refused load": (frozenset(), _refused("optimizer.load_state_dict({'state': {}, 'param_groups': []})")),
    "a refused group": (
        frozenset({"add_param_group"}),
        _refused("optimizer.add_param_group({'params': list(module.base.parameters())})"),
    ),
    "uneven inputs": (frozenset({"Join"}), _uneven("")),
    "uneven inputs with no_sync": (frozenset({"Join", "no_sync in Join"}), _uneven(UNSYNCHRONISED)),
}
"""Operations without fields: what not every level can do, and the text, with @ for a batch and # for the number."""


@dataclass(frozen=True)
class Do(Operation):
    """One of ``TEXTS``."""

    what: str

    @property
    def features(self) -> frozenset[str]:
        return TEXTS[self.what][0]

    def lines(self, number: int, program: Program) -> Lines:
        text = TEXTS[self.what][1].replace("@", str(10 * number))
        return text.replace("(#,", f"({number},").replace("FOLDER, #", f"FOLDER, {number}").splitlines()
