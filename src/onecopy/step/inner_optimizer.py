"""This rank's optimizer: one instance of the user's own class over what the rank owns."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.common.flat_views import flat_like
from onecopy.common.torch_private import bare_step
from onecopy.layout import Layout, Shard
from onecopy.step.group_options import apply_changes, options_of, replace_options
from onecopy.step.master_weights import MasterWeight, MasterWeightPolicy, MasterWeights
from onecopy.step.optimizer_classes import REFUSES_SPARSE_GRADIENTS, SKIPS_MISSING_GRADIENTS, check_options
from onecopy.step.owned_shards import OwnedShard, Stepped, alias, converted, parameter_or_alias
from onecopy.step.parameter_groups import Group, first_places


class InnerOptimizer:
    """Constructs, feeds and steps the inner optimizer."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        defaults: dict[str, Any],
        groups: Sequence[Group],
        layout: Layout,
        params: Sequence[Tensor],
        flats: Sequence[Tensor],
        group_rank: int,
        stepped: Stepped = parameter_or_alias,
        masters: MasterWeightPolicy | None = None,
    ) -> None:
        self.optimizer_class = optimizer_class
        self.group_rank = group_rank
        self.master_policy = masters or MasterWeightPolicy()
        self.defaults = defaults
        self.version = 0  # counts steps, loads and edits, by which others know that the state changed
        self.has_state = False  # on some rank
        self._pushed: list[Group] = []  # the options that the inner optimizer was last given
        self._stepped = stepped
        self._set_aside: list[tuple[Tensor, Tensor | None]] = []
        self._set_owned([self._own(shard, params, flats) for shard in layout.shards if shard.owner == group_rank])
        self.optim = optimizer_class(
            [self._local_group(group, position, layout) for position, group in enumerate(groups)], **defaults
        )
        self.listed = [list(group["params"]) for group in groups]  # with repetitions, as the user gave them
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            self._repeat(group, inner)
        check_options(self.optim)
        self.run_inner = bare_step(self.optim)
        self._in_buckets: list[OwnedShard] = []
        self._takes_closure = "closure" in inspect.signature(type(self.optim).step).parameters
        # An unknown class may move parameters that have no gradient (weight decay alone).
        self.moves_all = type(self.optim) not in SKIPS_MISSING_GRADIENTS

    @property
    def uses_master_weights(self) -> bool:
        """Whether some rank steps a copy of some parameter."""
        return any(self.master_policy.applies_to(param) for params in self.listed for param in params)

    def rebuilt(
        self,
        groups: Sequence[Group],
        layout: Layout,
        params: Sequence[Tensor],
        flats: Sequence[Tensor],
        masters: MasterWeightPolicy,
    ) -> InnerOptimizer:
        """Another one for the same parameters that steps aliases or copies of what ``layout`` gives this rank."""
        return InnerOptimizer(
            self.optimizer_class, self.defaults, groups, layout, params, flats, self.group_rank, alias, masters
        )

    def add_group(self, group: Group, layout: Layout, params: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
        """Give the inner optimizer its part of the layout's last group."""
        position = len(self.optim.param_groups)
        self._set_owned(
            self.owned
            + [
                self._own(shard, params, flats)
                for shard in layout.shards
                if shard.owner == self.group_rank and layout.params[shard.param].group == position
            ]
        )
        self.optim.add_param_group(self._local_group(group, position, layout))
        self.listed.append(list(group["params"]))
        self._repeat(group, self.optim.param_groups[position])
        check_options(self.optim)

    def keep_groups(self, count: int, layout: Layout) -> None:
        """Forget all but the first ``count`` groups, which ``layout`` describes."""
        for owned in self.owned:
            if owned.shard.param >= len(layout.params):
                self.optim.state.pop(owned.tensor, None)
        del self.optim.param_groups[count:], self.listed[count:]
        self._set_owned([owned for owned in self.owned if owned.shard.param < len(layout.params)])

    def _own(self, shard: Shard, params: Sequence[Tensor], flats: Sequence[Tensor]) -> OwnedShard:
        param = params[shard.param]
        if self.master_policy.applies_to(param):
            param_view = alias(shard, param, flats[shard.param])
            return OwnedShard(shard, param, self.master_policy.copy_of(param_view), param_view)
        return OwnedShard(shard, param, self._stepped(shard, param, flats[shard.param]))

    def _set_owned(self, owned: list[OwnedShard]) -> None:
        self.owned = owned
        self.tensor_of: dict[Any, Tensor] = {entry.param: entry.tensor for entry in owned}
        self._aliases = [entry for entry in owned if entry.is_alias]
        self.copies = MasterWeights(
            [MasterWeight(entry.tensor, entry.param_view) for entry in owned if entry.param_view is not None]
        )

    def _local_group(self, group: Group, position: int, layout: Layout) -> Group:
        mine = [owned for owned in self.owned if layout.params[owned.shard.param].group == position]
        local = options_of(group)
        local["params"] = [owned.tensor for owned in mine]
        if "param_names" in group:
            local["param_names"] = [layout.params[owned.shard.param].name for owned in mine]
        return local

    def _repeat(self, group: Group, inner: Group) -> None:
        """Let a parameter that the user's group has several times be as often in the inner optimizer's group.

        Afterwards, because torch warns of it when a group is added, which only the owner would see twice.
        """
        if len(first_places(group["params"])) < len(group["params"]):
            places = [place for place, param in enumerate(group["params"]) if param in self.tensor_of]
            inner["params"] = [self.tensor_of[group["params"][place]] for place in places]
            if "param_names" in group:
                inner["param_names"] = [group["param_names"][place] for place in places]

    def repoint(self, flats: Sequence[Tensor]) -> None:
        """Follow parameters that have moved: the aliases keep their identity, and with it their state."""
        for owned in self.owned:
            if owned.param_view is not None:
                owned.param_view.data = alias(owned.shard, owned.param, flats[owned.shard.param])
            elif owned.is_alias:
                owned.tensor.data = alias(owned.shard, owned.param, flats[owned.shard.param])
        refuses = type(self.optim) in REFUSES_SPARSE_GRADIENTS
        self._in_buckets = [] if refuses else [owned for owned in self.owned if owned.tensor.storage_offset()]

    def note_loaded(self, has_state: bool) -> None:
        """Note that the state has been replaced, and whether any rank has some now."""
        self.version += 1
        self.has_state = has_state

    def state_key(self, key: Any) -> Any:
        """What the inner optimizer's state has for a key of ours; None for a tensor of which the rank owns nothing.

        A key that is not a tensor, which a plain optimizer keeps too, stays as it is.
        """
        return self.tensor_of.get(key) if isinstance(key, Tensor) else key

    def other_state(self) -> dict[Any, Any]:
        """State under keys that are not tensors."""
        return {key: self.optim.state[key] for key in self.optim.state if not isinstance(key, Tensor)}

    def note_edited(self) -> None:
        """Note that someone has set or deleted a part of this rank's state."""
        self.version += 1
        self.has_state = True

    def replace_state(self, states: Mapping[Any, Any]) -> None:
        """Make this the state: by parameter, and by keys that are none. Parameters of other ranks are left out."""
        if not isinstance(states, Mapping):
            raise TypeError(f"state must be a mapping from parameters to their state, got {type(states).__qualname__}")
        entries = dict(states.items())
        kept = {self.state_key(key): value for key, value in entries.items()}
        kept.pop(None, None)
        self.optim.state = defaultdict(dict, kept)
        if entries or self.has_state:
            self.note_loaded(has_state=True)  # on some rank: that a mapping is empty here says nothing of the others

    def push_options(self, groups: Sequence[Group]) -> None:
        """Give the inner optimizer's groups the options of ``groups``, and no others."""
        self._pushed = [options_of(group) for group in groups]
        for options, inner in zip(self._pushed, self.optim.param_groups, strict=True):
            replace_options(inner, options)

    def pull_options(self, groups: Sequence[Group]) -> None:
        """Bring into ``groups`` the options that the inner optimizer has written since they were pushed, and no others.

        An option that the user has set in ``groups`` since then stays. A group that was not pushed gets all options.
        """
        pushed = self._pushed + [{}] * (len(groups) - len(self._pushed))
        for group, before, inner in zip(groups, pushed, self.optim.param_groups, strict=True):
            apply_changes(group, before, options_of(inner))

    def pull_all_options(self, groups: Sequence[Group]) -> None:
        """Give ``groups`` the options of the inner optimizer's groups, and no others."""
        for group, inner in zip(groups, self.optim.param_groups, strict=True):
            replace_options(group, options_of(inner))

    def bind_gradients(self, layout: Layout, gradient_shards: Mapping[int, Tensor] | None = None) -> None:
        """Give the stepped tensors their gradients: the parameters' own, or flat ranges lent for this step only."""
        if gradient_shards is not None:
            self._set_aside = [(owned.tensor, owned.tensor.grad) for owned in self.owned if not owned.is_alias]
            for owned in self.owned:
                owned.bind(gradient_shards.get(owned.shard.param))
            return
        for owned in self._aliases:
            owned.tensor.grad = self._own_range(owned, layout)
        for owned in self._in_buckets:
            gradient = owned.tensor.grad
            if gradient is not None and gradient.is_sparse and gradient.dense_dim() == 0:
                raise ValueError(
                    f"rank {self.group_rank}: parameter {layout.params[owned.shard.param].name!r} has a sparse "
                    "gradient of single elements, which torch adds at the wrong place to a tensor that is part of a "
                    "longer memory; use parameters_as_bucket_view=False"
                )

    def _own_range(self, owned: OwnedShard, layout: Layout) -> Tensor | None:
        gradient = owned.param.grad
        if gradient is None or not owned.is_cut:
            return gradient if gradient is None or owned.param_view is None else converted(gradient, owned.tensor)
        if gradient.layout is not torch.strided:
            raise ValueError(
                f"rank {self.group_rank}: parameter {layout.params[owned.shard.param].name!r} has a sparse gradient "
                "but is cut among ranks; keep parameters whole with elementwise=False (and shard_by='parameter')"
            )
        return converted(flat_like(gradient, owned.param)[owned.shard.start : owned.shard.stop], owned.tensor)

    def step_on(self, ranges: Mapping[int, Tensor]) -> None:
        """Step with these flat gradients, by parameter, and no others: torch's optimizers skip what has none."""
        self.step_part(self.owned, ranges, {})

    def step_part(self, part: Sequence[OwnedShard], ranges: Mapping[int, Tensor], kwargs: dict[str, Any]) -> None:
        """Step some of what is owned, where no other stepped tensor has a gradient at that time."""
        for owned in part:
            owned.bind(ranges.get(owned.shard.param))
        try:
            self.step(None, kwargs)
        finally:
            for owned in part:
                owned.tensor.grad = None

    def release_gradients(self) -> None:
        """Let go of what :meth:`bind_gradients` took, and put back what it set aside."""
        for owned in self._aliases:
            owned.tensor.grad = None
        for tensor, gradient in self._set_aside:
            tensor.grad = gradient
        self._set_aside = []

    def step(self, closure: Callable[[], Any] | None, kwargs: dict[str, Any]) -> Any:
        """Step the inner optimizer; a class whose ``step`` takes no closure has it evaluated beforehand."""
        self.version += 1
        self.has_state = True
        if closure is None:
            loss = self.run_inner(**kwargs)
        elif self._takes_closure:
            loss = self.run_inner(closure=closure, **kwargs)
        else:
            with torch.enable_grad():
                loss = closure()
            self.run_inner(**kwargs)
        self.copies.write_to_params(self.moves_all)
        return loss


class OwnedState(MutableMapping[Any, Any]):
    """This rank's optimizer state by parameter, whatever tensor the inner optimizer keeps it under.

    Like a plain optimizer's ``state`` it gives an empty dict for a parameter that has none. A parameter of another
    rank has none here. Keys that are not tensors are kept as they are.
    """

    def __init__(self, local: Callable[[], InnerOptimizer]) -> None:
        self._get_local = local

    @property
    def _local(self) -> InnerOptimizer:
        return self._get_local()

    def __getitem__(self, param: Any) -> Any:
        key = self._local.state_key(param)
        return {} if key is None else self._local.optim.state[key]

    def __setitem__(self, param: Any, value: Any) -> None:
        key = self._local.state_key(param)
        if key is None:
            raise KeyError(
                f"rank {self._local.group_rank} owns nothing of this parameter; its state is on another rank"
            )
        self._local.optim.state[key] = value
        self._local.note_edited()

    def __delitem__(self, param: Any) -> None:
        if param not in self:
            raise KeyError(f"rank {self._local.group_rank} has no state under this key")
        del self._local.optim.state[self._local.state_key(param)]
        self._local.note_edited()

    def get(self, param: Any, default: Any = None) -> Any:
        """This rank's state of a parameter, or ``default`` if it has none."""
        return self[param] if param in self else default  # noqa: SIM401 - that would call this method

    def pop(self, param: Any, *default: Any) -> Any:
        """Forget the state of a parameter and return it."""
        if param not in self and default:
            return default[0]
        value = self.get(param)
        del self[param]
        return value

    def setdefault(self, param: Any, default: Any = None) -> Any:
        """The state of a parameter, which is made ``default`` if there is none."""
        if param not in self:
            self[param] = default
        return self[param]

    def __contains__(self, param: object) -> bool:
        return self._local.state_key(param) in self._local.optim.state

    def __iter__(self) -> Iterator[Any]:
        state = self._local.optim.state
        params = [param for param, tensor in self._local.tensor_of.items() if tensor in state]
        return iter([*params, *self._local.other_state()])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"
