"""The inner optimizer: this rank's instance of the user's optimizer class, over the shards that the rank owns."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.common.torch_private import bare_step
from onecopy.layout import Layout, Shard
from onecopy.step.averages import Averages
from onecopy.step.gradients import (
    MakeSteppedTensor,
    OwnedShard,
    gradient_range,
    param_or_view,
    separate_view,
    set_flat_gradients,
    set_gradients,
)
from onecopy.step.master_weights import MasterWeight, MasterWeightPolicy, MasterWeights
from onecopy.step.optimizer_classes import (
    REFUSES_SPARSE_GRADIENTS,
    SKIPS_MISSING_GRADIENTS,
    check_dtypes,
    check_options,
)
from onecopy.step.parameter_groups import Group, apply_changes, first_places, options_of, replace_options
from onecopy.step.several_classes import KEY as CLASS_KEY
from onecopy.step.several_classes import OptimizerClasses, SeveralClasses, check_options_of_others, kind_of


class InnerOptimizer:
    """Constructs and steps the inner optimizer, and gives it options and gradients.

    Attributes:
        classes: the optimizer class of each group.
        optim: the inner optimizer: an instance of the class, or one made of several.
        owned: the shards of this rank.
        tensor_of: the stepped tensor of each parameter of which this rank owns a shard.
        params_by_group: the parameters of each of the user's groups, with repetitions.
        master_weights: the copies that are stepped in place of parameters.
        averages: running averages of the stepped tensors, by name.
        version: counts steps, loads and edits of the state.
        has_state: whether some rank has state.
        class_names: the class that each group names, or None.
        updates_without_gradient: whether a class may change parameters that have no gradient.
    """

    def __init__(
        self,
        classes: OptimizerClasses,
        groups: Sequence[Group],
        layout: Layout,
        params: Sequence[Tensor],
        flats: Sequence[Tensor],
        group_rank: int,
        make_tensor: MakeSteppedTensor = param_or_view,
        master_policy: MasterWeightPolicy | None = None,
    ) -> None:
        self.classes = classes
        self.group_rank = group_rank
        self.master_policy = master_policy or MasterWeightPolicy()
        self.averages = Averages()
        self.version = 0
        self.has_state = False
        self._pushed_options: list[Group] = []
        self._make_tensor = make_tensor
        self._replaced_gradients: list[tuple[Tensor, Tensor | None]] = []
        self._set_owned([self._own(shard, params, flats) for shard in layout.shards if shard.owner == group_rank])
        self.optim = classes.construct(
            [self._local_group(group, position, layout) for position, group in enumerate(groups)]
        )
        self.params_by_group = [list(group["params"]) for group in groups]
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            self._repeat(group, inner)
        self._may_get_sparse: list[OwnedShard] = []
        self._follow_classes(layout)

    def _follow_classes(self, layout: Layout, first: int = 0) -> None:
        """Check the options of groups, and set the attributes that depend on the classes; ``first`` is a new group."""
        groups = self.optim.param_groups
        self.class_names = [group.get(CLASS_KEY) for group in groups]
        self.optimizers = [self.optim] * len(groups)
        if isinstance(self.optim, SeveralClasses):
            self.optimizers = [self.optim.optimizers[name] for name in self.optim.names]
        self.check_options(self.master_policy.stepped_dtypes(layout.params))
        check_options_of_others(self.optimizers, groups, layout.params, first)
        self._group_of = [spec.group for spec in layout.params]
        self._run_step = bare_step(self.optim)
        self._takes_closure = "closure" in inspect.signature(type(self.optim).step).parameters
        # An unknown class may change parameters that have no gradient (weight decay alone).
        self.updates_without_gradient = any(type(each) not in SKIPS_MISSING_GRADIENTS for each in self.optimizers)

    def check_options(self, dtypes: Sequence[tuple[int, torch.dtype]]) -> None:
        """Raise if an option of a group makes sharding impossible."""
        for optimizer in dict.fromkeys(self.optimizers):
            positions = [position for position, each in enumerate(self.optimizers) if each is optimizer]
            check_options(optimizer, positions)
            check_dtypes(optimizer, dtypes, positions)

    @property
    def instances(self) -> list[Optimizer]:
        """The inner optimizer, and those that it is made of."""
        return list(dict.fromkeys([self.optim, *self.optimizers]))

    @property
    def kind(self) -> str:
        """The full names of the classes that do the updates."""
        return kind_of(self.optim)

    @property
    def uses_master_weights(self) -> bool:
        """Whether some rank steps a copy of some parameter."""
        return any(self.master_policy.applies_to(param) for params in self.params_by_group for param in params)

    def rebuilt(
        self,
        groups: Sequence[Group],
        layout: Layout,
        params: Sequence[Tensor],
        flats: Sequence[Tensor],
        master_policy: MasterWeightPolicy,
    ) -> InnerOptimizer:
        """A new inner optimizer for the same parameters in another layout. It steps views or copies only."""
        return InnerOptimizer(
            self.classes,
            groups,
            layout,
            params,
            flats,
            self.group_rank,
            separate_view,
            master_policy,
        )

    def add_group(
        self,
        group: Group,
        classes: OptimizerClasses,
        layout: Layout,
        params: Sequence[Tensor],
        flats: Sequence[Tensor],
    ) -> None:
        """Add this rank's shards of the layout's last group."""
        position = len(self.optim.param_groups)
        self.classes = classes
        self._set_owned(
            self.owned
            + [
                self._own(shard, params, flats)
                for shard in layout.shards
                if shard.owner == self.group_rank and layout.params[shard.param].group == position
            ]
        )
        self.optim = classes.add_group(self.optim, self._local_group(group, position, layout))
        self.params_by_group.append(list(group["params"]))
        self._repeat(group, self.optim.param_groups[position])
        self._follow_classes(layout, position)

    def _own(self, shard: Shard, params: Sequence[Tensor], flats: Sequence[Tensor]) -> OwnedShard:
        param = params[shard.param]
        if self.master_policy.applies_to(param):
            param_view = separate_view(shard, param, flats[shard.param])
            return OwnedShard(shard, param, self.master_policy.copy_of(param_view), param_view)
        return OwnedShard(shard, param, self._make_tensor(shard, param, flats[shard.param]))

    def _set_owned(self, owned: list[OwnedShard]) -> None:
        self.owned = owned
        self.tensor_of: dict[Any, Tensor] = {entry.param: entry.tensor for entry in owned}
        self._separate = [entry for entry in owned if entry.is_separate]
        self.master_weights = MasterWeights(
            [
                MasterWeight(entry.param, entry.tensor, entry.param_view)
                for entry in owned
                if entry.param_view is not None
            ]
        )

    def _local_group(self, group: Group, position: int, layout: Layout) -> Group:
        mine = [owned for owned in self.owned if layout.params[owned.shard.param].group == position]
        local = options_of(group)
        local["params"] = [owned.tensor for owned in mine]
        if "param_names" in group:
            local["param_names"] = [layout.params[owned.shard.param].name for owned in mine]
        return local

    def _repeat(self, group: Group, inner: Group) -> None:
        """Repeat a parameter in the inner optimizer's group as often as the user's group has it.

        This comes after the construction: torch warns of repeated parameters then, and only the owner would warn twice.
        """
        if len(first_places(group["params"])) < len(group["params"]):
            places = [place for place, param in enumerate(group["params"]) if param in self.tensor_of]
            inner["params"] = [self.tensor_of[group["params"][place]] for place in places]
            if "param_names" in group:
                inner["param_names"] = [group["param_names"][place] for place in places]

    def repoint(self, flats: Sequence[Tensor]) -> None:
        """Let views follow parameters that have moved. A view keeps its identity, and with it its state."""
        for owned in self.owned:
            if owned.param_view is not None:
                owned.param_view.data = separate_view(owned.shard, owned.param, flats[owned.shard.param])
            elif owned.is_separate:
                owned.tensor.data = separate_view(owned.shard, owned.param, flats[owned.shard.param])
        # A parameter that has moved may have other values, but it keeps its version counter.
        self.master_weights.forget_versions()
        self._may_get_sparse = [
            owned for owned in self.owned if owned.tensor.storage_offset() and not self._refuses_sparse(owned)
        ]

    def _refuses_sparse(self, owned: OwnedShard) -> bool:
        return type(self._optimizer_of(owned)) in REFUSES_SPARSE_GRADIENTS

    def _optimizer_of(self, owned: OwnedShard) -> Optimizer:
        """The optimizer that steps a shard."""
        return self.optimizers[self._group_of[owned.shard.param]]

    def refresh_master_weights(self) -> None:
        """Copy values that were written into the parameters into all master weights."""
        self.version += 1
        self.master_weights.refresh_from_params(everything=True)

    def note_loaded(self, has_state: bool) -> None:
        """Note that the state was replaced, and whether any rank has state now."""
        self.version += 1
        self.has_state = has_state

    def state_key(self, key: Any) -> Any:
        """The key of the inner optimizer's state for a parameter; None if the rank owns nothing of it.

        A key that is not a tensor stays as it is. Plain optimizers keep such keys, too.
        """
        return self.tensor_of.get(key) if isinstance(key, Tensor) else key

    def other_state(self) -> dict[Any, Any]:
        """The state under keys that are not tensors."""
        return {key: self.optim.state[key] for key in self.optim.state if not isinstance(key, Tensor)}

    def note_edited(self) -> None:
        """Note that the user has set or deleted an entry of this rank's state."""
        self.version += 1
        self.has_state = True

    def replace_state(self, states: Mapping[Any, Any]) -> None:
        """Replace this rank's state. Entries for parameters that other ranks own are left out."""
        if not isinstance(states, Mapping):
            raise TypeError(f"state must be a mapping from parameters to their state, got {type(states).__qualname__}")
        entries = dict(states.items())
        kept = {self.state_key(key): value for key, value in entries.items()}
        kept.pop(None, None)
        self.optim.state = defaultdict(dict, kept)
        if entries or self.has_state:
            self.note_loaded(has_state=True)  # an empty mapping here does not mean that it is empty on all ranks

    def push_options(self, groups: Sequence[Group]) -> None:
        """Give the inner optimizer's groups the options of ``groups``, and no others."""
        self._pushed_options = [options_of(group) for group in groups]
        for options, inner in zip(self._pushed_options, self.optim.param_groups, strict=True):
            replace_options(inner, options)

    def pull_options(self, groups: Sequence[Group]) -> None:
        """Copy into ``groups`` the options that the inner optimizer has written since :meth:`push_options`.

        An option that the user has set in ``groups`` since then stays. A group that was not pushed gets all options.
        """
        pushed = self._pushed_options + [{}] * (len(groups) - len(self._pushed_options))
        for group, before, inner in zip(groups, pushed, self.optim.param_groups, strict=True):
            apply_changes(group, before, options_of(inner))

    def pull_all_options(self, groups: Sequence[Group]) -> None:
        """Give ``groups`` the options of the inner optimizer's groups, and no others."""
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            replace_options(group, options_of(inner))

    def bind_gradients(self, layout: Layout, gradient_shards: Mapping[int, Tensor] | None = None) -> None:
        """Set the gradients of the stepped tensors: from ``param.grad``, or from flat shards for this step only."""
        if gradient_shards is not None:
            whole = [owned.tensor for owned in self.owned if not owned.is_separate]
            self._replaced_gradients = [(tensor, tensor.grad) for tensor in whole]
            set_flat_gradients(self.owned, gradient_shards)
            return
        set_gradients(self._separate, [self._gradient_shard(owned, layout) for owned in self._separate])
        for owned in self._may_get_sparse:
            gradient = owned.tensor.grad
            if gradient is not None and gradient.is_sparse and gradient.dense_dim() == 0:
                raise ValueError(
                    f"rank {self.group_rank}: parameter {layout.params[owned.shard.param].name!r} has a sparse "
                    "gradient of single elements, which torch adds at the wrong place to a tensor that is part of a "
                    "longer memory; use parameters_as_bucket_view=False"
                )

    def _gradient_shard(self, owned: OwnedShard, layout: Layout) -> Tensor | None:
        gradient, name = owned.param.grad, layout.params[owned.shard.param].name
        if not owned.is_cut or gradient is None:
            return gradient
        if gradient.layout is not torch.strided and self._refuses_sparse(owned):
            raise RuntimeError(
                f"parameter {name!r} has a sparse gradient, which {type(self._optimizer_of(owned)).__qualname__} does "
                "not support: use SparseAdam, SGD or Adagrad, or make the gradient dense"
            )
        return gradient_range(owned.shard, owned.param, name)

    def step_on(self, gradient_shards: Mapping[int, Tensor]) -> None:
        """Step only the shards for which there is a flat gradient, by parameter."""
        averaged = [owned for owned in self.owned if owned.shard.param in gradient_shards] if self.averages else []
        self.step_part(self.owned, gradient_shards, {}, averaged)

    def step_part(
        self,
        part: Sequence[OwnedShard],
        gradient_shards: Mapping[int, Tensor],
        kwargs: dict[str, Any],
        averaged: Sequence[OwnedShard] | None = None,
    ) -> None:
        """Step some owned shards. No other stepped tensor has a gradient then, so torch's optimizers skip them.

        By default all of the part are averaged, because no other call of this step updates them.
        """
        try:
            set_flat_gradients(part, gradient_shards)
            self.step(None, kwargs, part if averaged is None else averaged)
        finally:
            for owned in part:
                owned.tensor.grad = None

    def release_gradients(self) -> None:
        """Undo :meth:`bind_gradients`."""
        for owned in self._separate:
            owned.tensor.grad = None
        for tensor, gradient in self._replaced_gradients:
            tensor.grad = gradient
        self._replaced_gradients = []

    def step(
        self,
        closure: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        averaged: Sequence[OwnedShard] | None = None,
    ) -> Any:
        """Step the inner optimizer, and let averages follow; by default all owned shards are averaged.

        If the class's ``step`` takes no closure, the closure is evaluated before.
        """
        averaged = self.owned if averaged is None else averaged
        self.version += 1
        self.has_state = True
        self.averages.before_update(averaged, self.updates_without_gradient)
        if closure is None:
            loss = self._run_step(**kwargs)
        elif self._takes_closure:
            loss = self._run_step(closure=closure, **kwargs)
        else:
            with torch.enable_grad():
                loss = closure()
            self._run_step(**kwargs)
        self.master_weights.write_to_params(self.updates_without_gradient)
        self.averages.after_update(averaged, self.updates_without_gradient)
        return loss

    def end_step(self) -> None:
        """After all updates of a step, let averages follow the shards that it did not update."""
        self.averages.end_step(self.owned, self.updates_without_gradient)
