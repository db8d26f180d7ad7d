"""Several optimizer classes in one object: the class of each parameter group, and one optimizer made of several.

A group names its class under ``optimizer_class``. In the user's groups and in state dicts this is a string, because
neither JSON nor ``weights_only`` takes a class object. No module is imported, and no name is looked up, because of
a name in a state dict: it is compared with the names that the optimizer has.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import onecopy.optim
from onecopy.common.torch_private import bare_step, run_load_post_hooks, run_load_pre_hooks
from onecopy.layout import CostFunction, ParamSpec
from onecopy.step.averages import STATE_DICT_KEY as AVERAGES
from onecopy.step.master_weights import STATE_DICT_KEY
from onecopy.step.optimizer_classes import check_class, check_shape, cost_of, is_elementwise
from onecopy.step.parameter_groups import Group, names_of, shown_group

KEY = "optimizer_class"
"""The entry of a parameter group that names its class."""

PACKAGES = (torch.optim, onecopy.optim)
"""Modules whose classes may be given by name."""


def name_of(optimizer_class: type) -> str:
    """The name of a class in parameter groups: the public one for classes of torch and onecopy."""
    for package in PACKAGES:
        if getattr(package, optimizer_class.__name__, None) is optimizer_class:
            return f"{package.__name__}.{optimizer_class.__name__}"
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def _resolved(given: object, known: Iterable[type], where: str) -> Any:
    """The class of a name. A name without a module is one of ``torch.optim`` or of a known class."""
    if not isinstance(given, str):
        return given
    module, _, name = given.rpartition(".")
    found = {each for each in known if given in (each.__name__, name_of(each))}
    for package in PACKAGES:
        if module == package.__name__ or (not module and package is torch.optim):
            found.add(getattr(package, name, None) or type(None))
    found.discard(type(None))
    if len(found) != 1:
        problem = f"may be {' or '.join(sorted(map(name_of, found)))}" if found else "is not known"
        raise ValueError(
            f"{where}: {given!r} {problem}; give the class itself, or the name of a class of torch.optim, such as "
            "'torch.optim.Muon'"
        )
    return found.pop()


@dataclass(frozen=True)
class OptimizerClasses:
    """The optimizer class of each parameter group.

    Attributes:
        main: the constructor's class, which groups have that name none.
        defaults: the constructor's keyword arguments. They are defaults of ``main`` only.
        elementwise: what the user has declared of ``main``.
        cost: the user's function for the cost of an update, of classes whose parameters stay whole.
        by_name: all classes by name, if a group names one.
    """

    main: type[Optimizer]
    defaults: dict[str, Any]
    elementwise: bool | None = None
    cost: CostFunction | None = None
    by_name: Mapping[str, type[Optimizer]] = field(default_factory=dict)

    def with_groups(self, groups: Sequence[Group], first: int, wrapper: type) -> OptimizerClasses:
        """Replace classes in new groups, from position ``first`` on, by names; return these classes and the new ones.

        If one group names its class, all do, so that a state dict says the class of each group.
        """
        named = [(position, group) for position, group in enumerate(groups, first) if KEY in group]
        if not named and not self.by_name:
            return self
        by_name = {**self.by_name, name_of(self.main): self.main}
        known = [*by_name.values(), *(group[KEY] for _, group in named if isinstance(group[KEY], type))]
        for position, group in named:
            where = f"{KEY} of {shown_group(position, names_of(group, position))}"
            found = _resolved(group[KEY], known, where)
            check_class(found, wrapper, where)
            if by_name.setdefault(name_of(found), found) is not found:
                raise ValueError(f"{where}: two different classes are called {name_of(found)}; rename one of them")
            group[KEY] = name_of(found)
        for group in groups:
            group.setdefault(KEY, name_of(self.main))
        return replace(self, by_name=by_name)

    def of(self, group: Group) -> type[Optimizer]:
        """The class of a group."""
        return self.by_name.get(group.get(KEY, ""), self.main)

    def splittable(self, groups: Sequence[Group]) -> list[bool]:
        """Whether the parameters of each group may be cut."""
        classes = map(self.of, groups)
        return [is_elementwise(each, self.elementwise if each is self.main else None) for each in classes]

    def with_costs(self, groups: Sequence[Group], specs: Sequence[ParamSpec]) -> list[ParamSpec]:
        """Parameters with the cost of their update, if they stay whole."""
        splittable = self.splittable(groups)
        return [
            spec
            if splittable[spec.group]
            else replace(spec, cost=cost_of(self.of(groups[spec.group]), spec.shape, self.cost))
            for spec in specs
        ]

    def check_shapes(self, groups: Sequence[Group], specs: Sequence[ParamSpec]) -> None:
        """Raise if a group has a parameter that its class does not take."""
        for spec in specs:
            check_shape(self.of(groups[spec.group]), spec)

    def construct(self, groups: list[Group]) -> Optimizer:
        """The optimizer of some groups: a plain instance if all are of one class."""
        members: dict[type[Optimizer], list[Group]] = {}
        for group in groups:
            members.setdefault(self.of(group), []).append(group)
        made = {
            name_of(each): each(mine, **(self.defaults if each is self.main else {})) for each, mine in members.items()
        }
        if len(made) == 1:
            return next(iter(made.values()))
        return SeveralClasses(made, [group[KEY] for group in groups])

    def add_group(self, optimizer: Optimizer, group: Group) -> Optimizer:
        """Add a group to an optimizer of these classes; return the optimizer of all groups."""
        name, names = name_of(self.of(group)), [name_of(self.of(each)) for each in optimizer.param_groups]
        made = optimizer.optimizers if isinstance(optimizer, SeveralClasses) else {names[0]: optimizer}
        if name in made:
            made[name].add_param_group(group)
            for each in made[name].param_groups if KEY in group else ():
                each.setdefault(KEY, name)
        else:
            made = {**made, name: self.construct([group])}
        if isinstance(optimizer, SeveralClasses):
            optimizer.unite(made, [*names, name])
            return optimizer
        return optimizer if len(made) == 1 else SeveralClasses(made, [*names, name])


class SeveralClasses(Optimizer):
    """One optimizer made of optimizers of several classes.

    ``param_groups`` are the groups of all of them in the user's order: the very dicts that they have. They share one
    ``state``. ``defaults`` are the options that all classes have, so that a scheduler that needs another one refuses.

    Attributes:
        optimizers: the optimizers, by the name of the class.
        names: the name of the class of each group.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], names: Sequence[str]) -> None:
        self.optimizers: dict[str, Optimizer] = {}
        super().__init__([{"params": []}], {})
        self.unite(optimizers, names)

    def unite(self, optimizers: Mapping[str, Optimizer], names: Sequence[str]) -> None:
        """Take these optimizers, with the groups and the state that they have now."""
        state = {key: value for each in optimizers.values() for key, value in each.state.items()}
        self.optimizers, self.names = dict(optimizers), list(names)
        self.state = state
        groups = {name: iter(each.param_groups) for name, each in optimizers.items()}
        self.param_groups = [next(groups[name]) for name in names]
        for group, name in zip(self.param_groups, names, strict=True):
            group[KEY] = name
        first, *others = optimizers.values()
        self.defaults = {
            key: value for key, value in first.defaults.items() if all(key in each.defaults for each in others)
        }
        self._steps = [(each, bare_step(each)) for each in optimizers.values()]

    @property
    def state(self) -> Any:
        """The state of the parameters of all classes. Assigning a mapping replaces it."""
        return self._state

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        """Replace the state, in all optimizers."""
        state = _StateOfParameters(dict)
        for key, each in value.items():
            state[key] = each
        self._state = state
        for optimizer in self.optimizers.values():
            optimizer.state = self._state

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step all optimizers, after one evaluation of the closure."""
        if kwargs:
            raise TypeError(
                f"step() takes no {', '.join(kwargs)} with several optimizer classes ({', '.join(self.optimizers)}): "
                "it would be for one of them only"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer, step in self._steps:
            step()
            if optimizer.state is not self._state:
                raise TypeError(f"{name_of(type(optimizer))} replaces its state, so no other class can be beside it")
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the groups and the state of each class into its optimizer."""
        state_dict = run_load_pre_hooks(self, dict(state_dict))
        for name, part in split_state_dict(state_dict).items():
            self.optimizers[name].load_state_dict(part)
        self.unite(self.optimizers, self.names)
        run_load_post_hooks(self)

    def __getattr__(self, name: str) -> Any:
        """``train`` and ``eval`` of the schedule-free classes."""
        if name in ("train", "eval"):
            found = [getattr(each, name, None) for each in self.__dict__.get("optimizers", {}).values()]
            methods = [each for each in found if callable(each)]
            if methods:
                return lambda: [method() for method in methods]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class _StateOfParameters(defaultdict[Any, Any]):
    """State by parameter only: two classes might use another key for different things."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, Tensor):
            raise TypeError(
                f"state under {key!r:.80}, which is no parameter, is refused with several optimizer classes"
            )
        super().__setitem__(key, value)


def kind_of(optimizer: Optimizer) -> str:
    """The full name of an optimizer's class, or the short names of several."""
    if isinstance(optimizer, SeveralClasses):
        return " + ".join(sorted(name.rpartition(".")[2] for name in optimizer.optimizers))
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def check_options_of_others(
    optimizers: Sequence[Optimizer], groups: Sequence[Group], specs: Sequence[ParamSpec], first: int
) -> None:
    """Raise if a group from ``first`` on has an option that another class here knows, and its own class does not.

    Other options pass, as in torch: schedulers and users keep values of their own in groups. This rank may own nothing
    of a group, so its first parameter is named as in ``specs``.
    """
    names = {spec.group: [spec.name] for spec in reversed(specs)}
    for position, (optimizer, group) in enumerate(zip(optimizers[first:], groups[first:], strict=True), first):
        for other in dict.fromkeys(optimizers):
            for key in sorted(group.keys() & (other.defaults.keys() - optimizer.defaults.keys())):
                raise ValueError(
                    f"{shown_group(position, names.get(position, []))} has {key}={group[key]!r}, but its class, "
                    f"{name_of(type(optimizer))}, has no option {key!r}, which is one of {name_of(type(other))}: "
                    "remove it, or change the group's optimizer_class"
                )


def match_classes(saved: Sequence[dict[str, Any]], groups: Sequence[Group], only: str) -> None:
    """Raise unless saved groups are of the classes of ``groups``; let them name the class as ``groups`` do.

    Only the last part of a name counts: the state of ``torch.optim.Muon`` is that of ``onecopy.optim.Muon``. Groups
    that name no class are of the one called ``only``.
    """
    several = len({group.get(KEY) for group in groups}) > 1
    for position, (theirs, group) in enumerate(zip(saved, groups, strict=False)):  # the caller compares the numbers
        mine, found = group.get(KEY), theirs.pop(KEY, None)
        same = isinstance(found, str) and found.rpartition(".")[2] == (mine or only).rpartition(".")[2]
        if not same and (found is not None or several):
            given = f"of class {found!r}" if found is not None else f"of no class, because it has no {KEY!r},"
            raise ValueError(
                f"{shown_group(position, names_of(group, position))} is {given} in what is loaded, and of class "
                f"{(mine or only)!r} in the optimizer; onecopy.join_state_dicts makes one state dict from those of "
                "plain optimizers, in the order of given param_groups"
            )
        if mine is not None:
            theirs[KEY] = mine


def split_state_dict(state_dict: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the state dicts of plain optimizers, by the name of the class, from that of several classes.

    ``join_state_dicts(parts, state_dict["param_groups"])`` is the inverse. Tensors are not copied.

    Example::

        parts = onecopy.split_state_dict(optimizer.state_dict())
        muon.load_state_dict(parts["torch.optim.Muon"])
        adamw.load_state_dict(parts["torch.optim.AdamW"])

    Args:
        state_dict: a consolidated state dict of an optimizer with several classes.
    """
    groups = state_dict["param_groups"]
    names = []
    for position, group in enumerate(groups):
        if not isinstance(group.get(KEY), str):
            raise ValueError(f"parameter group {position} has no {KEY!r}: the state dict is one of a single class")
        names.append(group[KEY])
    members: dict[str, list[tuple[Mapping[str, Any], Group]]] = {name: [] for name in names}
    for name, group in zip(names, groups, strict=True):
        members[name].append((state_dict, {key: value for key, value in group.items() if key != KEY}))
    return {name: _assembled(mine) for name, mine in members.items()}


def join_state_dicts(
    state_dicts: Mapping[Any, Mapping[str, Any]],
    param_groups: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the state dict of an optimizer with several classes from those of plain optimizers.

    Example::

        parts = {torch.optim.Muon: muon.state_dict(), torch.optim.AdamW: adamw.state_dict()}
        optimizer.load_state_dict(onecopy.join_state_dicts(parts, optimizer.param_groups))

    Args:
        state_dicts: state dicts by class, or by the name of a class.
        param_groups: groups in the order that the result is to have. By default all groups of the first class come
            first.
    """
    parts = {}
    for key, part in state_dicts.items():
        name = name_of(key) if isinstance(key, type) else key
        parts[f"torch.optim.{name}" if hasattr(torch.optim, name) else name] = part
    names = [name for name, part in parts.items() for _ in part["param_groups"]]
    order = names if param_groups is None else [group.get(KEY) for group in param_groups]
    if len(parts) < len(state_dicts) or Counter(order) != Counter(names):
        raise ValueError(f"the state dicts have groups of classes {names}, and param_groups of {order}")
    left = {name: iter(part["param_groups"]) for name, part in parts.items()}
    return _assembled([(parts[name], {**next(left[name]), KEY: name}) for name in map(str, order)])


def _assembled(members: Sequence[tuple[Mapping[str, Any], Group]]) -> dict[str, Any]:
    """A state dict of groups of other state dicts, numbered as torch numbers parameters."""
    state: dict[int, Any] = {}
    masters: dict[int, Any] = {}
    averages: dict[str, Any] = {}
    groups, start = [], 0
    for source, group in members:
        others = source.keys() - {"state", "param_groups", STATE_DICT_KEY, AVERAGES}
        others |= source["state"].keys() - {number for each in source["param_groups"] for number in each["params"]}
        if others:
            raise ValueError(f"{min(map(repr, others))} in a state dict is of no parameter, and so of no class")
        numbers: dict[Any, int] = {}
        for place, number in enumerate(group["params"], start):
            numbers.setdefault(number, place)
        start += len(group["params"])
        for found, values in ((state, source["state"]), (masters, source.get(STATE_DICT_KEY, {}))):
            found.update({place: values[number] for number, place in numbers.items() if number in values})
        for name, average in source.get(AVERAGES, {}).items():
            found = averages.setdefault(name, {"steps": average["steps"], "values": {}})["values"]
            values = average["values"]
            found.update({place: values[number] for number, place in numbers.items() if number in values})
        groups.append({**group, "params": [numbers[number] for number in group["params"]]})
    form: dict[str, Any] = {"state": state, "param_groups": groups}
    return {**form, **{key: each for key, each in ((STATE_DICT_KEY, masters), (AVERAGES, averages)) if each}}
