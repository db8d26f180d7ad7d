"""torch.distributed.checkpoint's pair of functions for optimizer state, for sharded optimizers too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import Optimizer

from onecopy.checkpoint.optimizer_view import OptimizerView, StateShard, argument_facts, optimizer_views, wait_for
from onecopy.comm.agreement import Fact, agree
from onecopy.comm.collectives import Collectives
from onecopy.common import tagged_json
from onecopy.errors import CheckpointMismatchError
from onecopy.optimizer import ZeroRedundancyOptimizer
from onecopy.state_dict.dcp_tensor import ShardedState, local_values, sharded_state_dict
from onecopy.state_dict.gather import consolidate
from onecopy.step import master_weights
from onecopy.step.group_options import NOT_OPTIONS

StateDict = dict[str, Any]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> StateDict:
    """The state of one or several optimizers by the model's names; asking a sharded one for it changes nothing.

    By default each rank gets what it owns, as tensors that ``torch.distributed.checkpoint`` saves and loads with any
    number of ranks. Parameters without state get memory to load it into. With ``full_state_dict`` every rank gets
    everything, and with ``cpu_offload`` beside it only rank 0. All ranks make this call together, with the same
    options. If one refuses, all raise.

    Args:
        model: the model.
        optimizers: its optimizers; those that are not sharded are left to torch's function.
        submodules: not supported.
        options: torch's options; ``ignore_frozen_params`` is not supported.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    views: list[OptimizerView] = []
    facts: list[Fact] = []
    failure: Exception | None = None
    try:
        if submodules or options.ignore_frozen_params:
            raise ValueError("submodules and ignore_frozen_params are not supported for sharded optimizers")
        views = optimizer_views(model, given)
        wait_for(views, model)
        for view in views:
            if view.zero is not None:
                view.check_state_keys()
        facts = [*argument_facts(model, views), *_option_facts(options)]
    except Exception as error:
        failure = error
    _agree(given, "get_optimizer_state_dict()", facts, failure)
    found: StateDict = {"state": {}, "param_groups": []}
    for view in views:
        try:
            part = _part_of(model, view, options)
        except Exception as error:  # the others may have exchanges before them in which this rank must take part
            failure = failure or error
            continue
        found["state"].update(part.get("state", {}))
        found["param_groups"] += part.get("param_groups", [])
    try:
        if options.full_state_dict and options.cpu_offload and not found["param_groups"]:
            found = {}
        elif options.flatten_optimizer_state_dict:
            found = _flattened(found)
    except Exception as error:
        failure = failure or error
    _agree(given, "get_optimizer_state_dict()", [], failure)
    return found


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Put back what :func:`get_optimizer_state_dict` returned, or torch's function for plain optimizers.

    All ranks make this call together, with the same options. If one refuses, all raise and that optimizer has not
    changed; of several, those before it have.

    Args:
        model: the model.
        optimizers: its optimizers; those that are not sharded are left to torch's function.
        optim_state_dict: full (on every rank, or with ``broadcast_from_rank0`` on rank 0), or sharded like this
            optimizer.
        options: torch's options.
    """
    options = options or StateDictOptions()
    given = (optimizers,) if isinstance(optimizers, Optimizer) else tuple(optimizers)
    views: list[OptimizerView] = []
    facts: list[Fact] = []
    state_dict: StateDict = {}
    failure: Exception | None = None
    try:
        views = optimizer_views(model, given)
        state_dict = dict(optim_state_dict)
        if _ours(given) and not options.broadcast_from_rank0:
            state_dict = _by_name(state_dict, views)
        facts = [*argument_facts(model, views), *_option_facts(options)]
    except Exception as error:
        failure = error
    _agree(given, "set_optimizer_state_dict()", facts, failure)
    if not _ours(given):
        torchs.set_optimizer_state_dict(model, given, state_dict, options=options)
        return
    if options.broadcast_from_rank0:
        state_dict = _by_name(_broadcast(Collectives(), state_dict), views)
    for view in views:
        if view.zero is not None:
            _set(view, state_dict)
            continue
        try:
            part = _restricted(state_dict, view)
            torchs.set_optimizer_state_dict(model, view.optimizer, part, options=StateDictOptions())
        except Exception as error:
            failure = error
        _agree(given, "set_optimizer_state_dict()", [], failure)


def _ours(optimizers: Sequence[object]) -> list[ZeroRedundancyOptimizer]:
    return [optimizer for optimizer in optimizers if isinstance(optimizer, ZeroRedundancyOptimizer)]


def _agree(optimizers: Sequence[object], what: str, facts: Sequence[Fact], failure: Exception | None) -> None:
    """Raise on every rank if one has failed or if the facts differ; on this rank only if no optimizer is sharded."""
    ours = _ours(optimizers)
    if ours:
        agree(ours[0].engine.collectives, what, facts, failure)
    elif failure is not None:
        raise failure


def _option_facts(options: StateDictOptions) -> list[Fact]:
    """The options that decide what is sent, and in which form it is."""
    names = ("full_state_dict", "cpu_offload", "broadcast_from_rank0", "flatten_optimizer_state_dict")
    return [Fact(name, str(bool(getattr(options, name)))) for name in names]


def _part_of(model: nn.Module, view: OptimizerView, options: StateDictOptions) -> Mapping[str, Any]:
    """One optimizer's state."""
    if view.zero is None:
        plain = StateDictOptions(full_state_dict=options.full_state_dict, cpu_offload=options.cpu_offload)
        return torchs.get_optimizer_state_dict(model, view.optimizer, options=plain)
    if options.full_state_dict:
        return _full(view, only_first=options.cpu_offload)
    return _sharded(view, options.cpu_offload)


def _sharded(view: OptimizerView, on_cpu: bool) -> StateDict:
    zero = view.zero
    assert zero is not None
    found = sharded_state_dict(zero.engine.inner, zero.layout, zero.param_groups, view.names, to_load=True)

    def moved(tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedState):
            return ShardedState(tensor.flat.to("cpu", copy=True), tensor.start, tensor)
        return tensor.to("cpu", copy=True)

    return tagged_json.map_tensors(found, moved) if on_cpu else found


def _full(view: OptimizerView, only_first: bool) -> StateDict:
    """The whole state on every rank, or on the first."""
    zero = view.zero
    assert zero is not None
    engine = zero.engine
    mine = None
    for rank in range(1 if only_first else zero.world_size):
        state = consolidate(engine.collectives, zero.layout, engine.inner, zero.param_groups, rank)
        mine = state if state is not None else mine
    if mine is None:
        return {}
    start, groups = 0, []
    for group in zero.param_groups:
        shown = {key: value for key, value in group.items() if key not in NOT_OPTIONS}
        groups.append({**shown, "params": view.names[start : start + len(group["params"])]})
        start += len(group["params"])
    by_name = {view.names[index]: values for index, values in mine.items()}
    return {"state": by_name, "param_groups": tagged_json.copy_tree(groups)}


def _set(view: OptimizerView, state_dict: StateDict) -> None:
    zero = view.zero
    assert zero is not None
    failure: Exception | None = None
    options: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    full = False
    try:
        options = _options_for(view, state_dict["param_groups"])
        names = set(view.names)
        state = {name: values for name, values in state_dict["state"].items() if name in names}
        full = _is_full(state, view)
    except Exception as error:
        failure = error
    if agree(zero.engine.collectives, "set_optimizer_state_dict()", [], failure, flag=full):
        zero.load_state_dict(_plain_form(view, state, options))
        return
    states: dict[int, dict[Any, Any]] = {}
    copies: dict[int, Tensor] = {}
    try:
        states, copies = _owned_states(view, state)
    except Exception as error:
        failure = error
    has_state = agree(zero.engine.collectives, "set_optimizer_state_dict()", [], failure, flag=bool(states))
    try:
        for shard in view.state_shards():
            if shard.index in copies and shard.param_view is not None:
                shard.tensor.detach().copy_(copies[shard.index].view(shard.tensor.shape))
        view.install(states, options, set(copies), has_state)
    except Exception as error:
        failure = error
    agree(zero.engine.collectives, "set_optimizer_state_dict()", [], failure)


def _is_full(state: Mapping[str, Any], view: OptimizerView) -> bool:
    """Whether this must be the whole state: there is some of parameters that this rank does not own, or not all of."""
    mine = {view.names[shard.index]: shard for shard in view.state_shards()}
    tensors: dict[str, list[Tensor]] = {name: [] for name in state}
    for name, values in state.items():
        tagged_json.map_tensors(values, tensors[name].append)
    if any(isinstance(tensor, ShardedState) for found in tensors.values() for tensor in found):
        return False
    cut = {name for name, shard in mine.items() if shard.stop - shard.start != view.params[shard.index].numel()}
    return any(
        name not in mine or (name in cut and any(tensor.dim() > 0 for tensor in found))
        for name, found in tensors.items()
    )


def _options_for(view: OptimizerView, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The saved options of each of an optimizer's groups, found by its parameters."""
    by_name = {name: group for group in groups for name in group["params"]}
    found, start = [], 0
    for position, group in enumerate(view.optimizer.param_groups):
        names = view.names[start : start + len(group["params"])]
        start += len(group["params"])
        missing = [name for name in names if name not in by_name]
        if missing:
            raise CheckpointMismatchError(f"the state dict has no parameter {missing[0]!r} of group {position}")
        saved = by_name[names[0]] if names else {}
        odd = [name for name in names if by_name[name] is not saved]
        if odd:
            raise CheckpointMismatchError(f"{names[0]!r} and {odd[0]!r} are in different groups of the state dict")
        found.append({key: value for key, value in saved.items() if key not in NOT_OPTIONS})
    return tagged_json.copy_tree(found)  # type: ignore[no-any-return]


def _owned_states(
    view: OptimizerView, state: Mapping[str, Mapping[str, Any]]
) -> tuple[dict[int, dict[Any, Any]], dict[int, Tensor]]:
    """State by parameter, cut down to what this rank owns, and master weights."""
    states, copies = {}, {}
    foreign = set(state) - {view.names[shard.index] for shard in view.state_shards()}
    if foreign:
        raise CheckpointMismatchError(
            f"there is state of parameter {min(foreign)!r}, of which another range than this rank owns is here: load "
            "the checkpoint into what get_optimizer_state_dict() returns for this optimizer"
        )
    for shard in view.state_shards():
        name = view.names[shard.index]
        if name not in state:
            continue
        for key, value in state[name].items():
            right = not isinstance(value, ShardedState) or (
                (value.start, value.start + value.flat.numel()) == (shard.start, shard.stop)
                and value.shape == view.params[shard.index].shape
            )
            if not right:
                raise CheckpointMismatchError(
                    f"state {key!r} of parameter {name!r} is another range than this rank owns: load the checkpoint "
                    "into what get_optimizer_state_dict() returns for this optimizer"
                )
        values = local_values(state[name])
        _check_shapes(values, name, shard, view.params[shard.index])
        master = values.pop(master_weights.STATE_KEY, None)
        if master is not None:
            copies[shard.index] = master
        if values:
            states[shard.index] = values
    return states, copies


def _check_shapes(values: Mapping[str, Any], name: str, shard: StateShard, param: Tensor) -> None:
    """Raise if a tensor that must be per element is not of the size that this rank owns."""
    for key, value in values.items():
        wrong = (
            isinstance(value, Tensor) and key == master_weights.STATE_KEY and value.numel() != shard.stop - shard.start
        )
        cut = shard.stop - shard.start != param.numel()
        if wrong or (
            cut and isinstance(value, Tensor) and value.dim() > 0 and value.numel() != shard.stop - shard.start
        ):
            raise CheckpointMismatchError(
                f"state {key!r} of parameter {name!r} has {value.numel()} elements, but this rank owns "
                f"{shard.stop - shard.start}"
            )


def _plain_form(view: OptimizerView, state: Mapping[str, Any], options: Sequence[dict[str, Any]]) -> StateDict:
    """The plain optimizer's state dict, by position."""
    index_of = {name: index for index, name in enumerate(view.names)}
    by_index = {index_of[name]: dict(values) for name, values in state.items()}
    by_index, copies = master_weights.split_master_weights(by_index)
    start, groups = 0, []
    for group, values in zip(view.optimizer.param_groups, options, strict=True):
        groups.append({**values, "params": list(range(start, start + len(group["params"])))})
        start += len(group["params"])
    form: StateDict = {"state": by_index, "param_groups": groups}
    return {**form, master_weights.STATE_DICT_KEY: copies} if copies else form


def _restricted(state_dict: StateDict, view: OptimizerView) -> StateDict:
    """What concerns one optimizer."""
    names = set(view.names)
    return {
        "state": {name: values for name, values in state_dict["state"].items() if name in names},
        "param_groups": [group for group in state_dict["param_groups"] if names.intersection(group["params"])],
    }


def _broadcast(collectives: Collectives, state_dict: StateDict) -> StateDict:
    """Rank 0's full state dict on every rank, its tensors on the CPU."""
    tensors: list[Tensor] = []
    failure: Exception | None = None
    tree: Any = None
    try:
        if collectives.group_rank == 0:
            tree = tagged_json.encode(state_dict, tensors, "the state dict")
            tensors = [tensor.detach().cpu().contiguous() for tensor in tensors]
    except Exception as error:
        failure = error
    agree(collectives, "set_optimizer_state_dict() from rank 0", [], failure)
    text = tagged_json.dumps([tree, [tagged_json.describe_tensor(tensor) for tensor in tensors]])
    tree, described = tagged_json.loads(collectives.broadcast_bytes(text if collectives.group_rank == 0 else None, 0))
    if collectives.group_rank != 0:
        tensors = [tagged_json.empty_from(description) for description in described]
    for tensor in tensors:
        moving = tensor.to(collectives.control_device)
        collectives.broadcast(moving, 0).wait()
        if moving is not tensor:
            tensor.copy_(moving)
    decoded: StateDict = tagged_json.decode(tree, tensors)
    return decoded


def _flattened(state_dict: StateDict) -> StateDict:
    """One level of keys, as torch flattens: ``state.<parameter>.<key>`` and ``param_groups.<parameter>.<option>``."""
    flat: StateDict = {}
    for name, values in state_dict["state"].items():
        for key, value in values.items():
            if not isinstance(key, str) or isinstance(value, (dict, list)):
                raise ValueError(f"state {key!r} of parameter {name!r} cannot be flattened")
            flat[f"state.{name}.{key}"] = value
    for group in state_dict["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        flat.update({f"param_groups.{name}.{key}": value for name in group["params"] for key, value in options.items()})
    return flat


def _by_name(state_dict: StateDict, views: Sequence[OptimizerView]) -> StateDict:
    """A state dict with groups, made from a flattened one if it is that."""
    return state_dict if "param_groups" in state_dict else _unflattened(state_dict, views)


def _unflattened(flat: Mapping[str, Any], views: Sequence[OptimizerView]) -> StateDict:
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for view in views:
        for name in view.names:
            front = f"state.{name}."
            values = {key[len(front) :]: value for key, value in flat.items() if key.startswith(front)}
            if values:
                state[name] = values
        start = 0
        for group in view.optimizer.param_groups:
            names = view.names[start : start + len(group["params"])]
            start += len(group["params"])
            front = f"param_groups.{names[0]}." if names else "\0"
            options = {key[len(front) :]: value for key, value in flat.items() if key.startswith(front)}
            groups.append({**options, "params": names})
    return {"state": state, "param_groups": groups}
