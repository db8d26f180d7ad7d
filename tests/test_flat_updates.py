"""Small parameters that are updated together: bitwise what the class does by itself, whatever happens between steps."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import StepLR

from harness import distributed
from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from onecopy.engine import flat_updates
from onecopy.engine.classes import ELEMENTWISE
from onecopy.engine.flat_updates import FlatUpdates, Run
from onecopy.engine.held_state import HeldState
from onecopy.engine.storage import RUN_BYTES, SMALL_BYTES, Buckets, InPlace
from onecopy.layout import ParamSpec, extend

CLASSES: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"fused": True}),
    (AdamW, {"fused": True, "amsgrad": True, "maximize": True}),
    (AdamW, {"weight_decay": 0.1}),
    (AdamW, {"foreach": True}),
    (AdamW, {"lr": torch.tensor(0.01), "fused": True}),
    (Adam, {"fused": True, "weight_decay": 0.1}),
    (Adam, {"amsgrad": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}),
    (RMSprop, {"momentum": 0.9, "centered": True}),
    (Adagrad, {"lr_decay": 0.1}),
    (Adagrad, {"fused": True}),
    (NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (RAdam, {"foreach": True}),
    (Adamax, {}),
    (Adadelta, {"weight_decay": 0.1}),
    (ASGD, {}),
    (Rprop, {}),
]


def label(value: Any) -> str | None:
    return f"{value[0].__name__}-{'-'.join(value[1]) or 'plain'}" if isinstance(value, tuple) else None


class Pair:
    """The same tensors twice: under a plain optimizer, and under one with flat updates, side by side or scattered."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        options: dict[str, Any],
        shapes: list[tuple[int, ...]],
        seed: int = 0,
        scattered: bool = False,
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        values = [torch.randn(shape, generator=self.generator) for shape in shapes]
        memory = torch.cat([value.reshape(-1) for value in values])
        pieces = memory.split([value.numel() for value in values])
        self.plain_params = [nn.Parameter(value) for value in values]
        self.params = [nn.Parameter(piece.view(shape)) for piece, shape in zip(pieces, shapes, strict=True)]
        self.lone, self.plain_lone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.plain = optimizer_class(self._groups(self.plain_params, self.plain_lone), **copy.deepcopy(options))
        self.inner = optimizer_class(self._groups(self.params, self.lone), **copy.deepcopy(options))
        half = len(shapes) // 2
        cut = sum(value.numel() for value in values[:half])
        if scattered:
            for param in self.params:
                param.data = param.data.clone()
        runs = [
            Run(0, tuple(self.params[:half]), None if scattered else memory[:cut]),
            Run(1, tuple(self.params[half:]), None if scattered else memory[cut:]),
        ]
        self.flat = FlatUpdates(self.inner, copy.deepcopy(options), runs)
        self.flat_steps = 0

    @staticmethod
    def _groups(params: list[nn.Parameter], lone: nn.Parameter) -> list[dict[str, Any]]:
        half = len(params) // 2
        return [{"params": params[:half]}, {"params": [*params[half:], lone]}]

    @property
    def both(self) -> tuple[tuple[Optimizer, list[nn.Parameter]], ...]:
        return (
            (self.plain, [*self.plain_params, self.plain_lone]),
            (self.inner, [*self.params, self.lone]),
        )

    def step(
        self,
        without: int | tuple[int, int] | None = None,
        odd: dict[int, Callable[[Tensor], Tensor]] | None = None,
    ) -> int:
        """One step with new gradients, of which some may be missing or changed; how many tensors the inner one had."""
        missing = range(*without) if isinstance(without, tuple) else [without]
        gradients = [
            torch.randn(param.shape, generator=self.generator) * 10.0 ** (position % 9 - 6)
            for position, param in enumerate([*self.params, self.lone])
        ]
        for _, params in self.both:
            for position, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
                change = (odd or {}).get(position, torch.clone)
                param.grad = None if position in missing else change(gradient)
        self.plain.step()
        stepped = 0

        def run_inner() -> None:
            nonlocal stepped
            stepped = sum(len(group["params"]) for group in self.inner.param_groups)
            self.inner.step()

        self.flat.step(run_inner)
        self.flat_steps += stepped <= len(self.params) // 2
        for ours, plain in zip(self.both[1][1], self.both[0][1], strict=True):
            assert torch.equal(ours, plain)
        return stepped

    def check_state(self) -> None:
        """Compare the state, which has to be moved back for that."""
        assert len(self.inner.state) == len(self.plain.state)
        for ours, plain in zip(self.both[1][1], self.both[0][1], strict=True):
            mine, theirs = self.inner.state[ours], self.plain.state[plain]
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert torch.equal(mine[key], value), key
                assert mine[key].dtype == value.dtype
                assert mine[key].untyped_storage().nbytes() == mine[key].nbytes


@pytest.mark.parametrize("case", CLASSES, ids=label)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("scattered", [False, True])
def test_every_class_is_updated_bitwise_as_by_itself(
    case: tuple[type[Optimizer], dict[str, Any]], threads: int, scattered: bool
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # So long that torch divides the work among threads.
        pair = Pair(*case, [(512 * (1 + position % 7),) for position in range(100)], scattered=scattered)
        for _ in range(4):
            pair.step()
        pair.check_state()
    finally:
        torch.set_num_threads(before)
    assert pair.flat_steps == (4 if case[0] is Adagrad else 3), "Adagrad alone has state before its first step"


def test_all_classes_that_may_be_updated_together_are_tried() -> None:
    assert {optimizer_class for optimizer_class, _ in CLASSES} == ELEMENTWISE


def test_another_class_is_left_to_itself() -> None:
    class Mine(AdamW):
        pass

    pair = Pair(Mine, {"fused": True}, [(64,)] * 64)
    for _ in range(3):
        pair.step()
    assert not pair.flat_steps
    assert type(pair.inner.state) is defaultdict


def replace_state(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param] = {key: torch.zeros_like(value) for key, value in optimizer.state[param].items()}


def replace_entry(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["exp_avg"] = torch.ones_like(param)


def equal_but_another_counter(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["step"] = optimizer.state[param]["step"].clone()


def write_entry(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["exp_avg"].fill_(2.0)


def write_counter(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["step"].data.fill_(7.0)


def write_all_counters(optimizer: Optimizer, param: nn.Parameter) -> None:
    del param
    for state in optimizer.state.values():
        state["step"].fill_(9.0)


def forget_one(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state.pop(param)


def forget_all(optimizer: Optimizer, param: nn.Parameter) -> None:
    del param
    optimizer.state.clear()


def give_to_another(optimizer: Optimizer, param: nn.Parameter) -> None:
    entries = list(optimizer.state.items())
    optimizer.state.clear()
    optimizer.state.update((torch.ones(1) if tensor is param else tensor, state) for tensor, state in entries)


def add_entry(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["note"] = torch.tensor(1.0)


def give_state_other_memory(optimizer: Optimizer, param: nn.Parameter) -> None:
    del param
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def reset_by_other_memory(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["exp_avg"].data = torch.zeros_like(param)


def reload(optimizer: Optimizer, param: nn.Parameter) -> None:
    if any(type(tensor) is Tensor for tensor in optimizer.state):
        return  # torch saves no state of what is in no group
    del param
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def other_options(optimizer: Optimizer, param: nn.Parameter) -> None:
    del param
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.param_groups[1]["weight_decay"] = 0.3


def other_implementation(optimizer: Optimizer, param: nn.Parameter) -> None:
    del param
    for group in optimizer.param_groups:
        group["fused"] = not group["fused"]


def write_parameter(optimizer: Optimizer, param: nn.Parameter) -> None:
    del optimizer
    with torch.no_grad():
        param.fill_(0.25)


CHANGES: dict[str, Callable[[Optimizer, nn.Parameter], None]] = {
    function.__name__: function
    for function in (
        replace_state,
        replace_entry,
        equal_but_another_counter,
        write_entry,
        write_counter,
        write_all_counters,
        forget_one,
        forget_all,
        give_to_another,
        add_entry,
        give_state_other_memory,
        reset_by_other_memory,
        reload,
        other_options,
        other_implementation,
        write_parameter,
    )
}


@settings(max_examples=60, deadline=None)
@given(
    actions=st.lists(
        st.one_of(
            st.just(("step", 0)),
            st.tuples(st.sampled_from(("without", "keep")), st.integers(0, 64)),
            st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 64)),
        ),
        min_size=1,
        max_size=10,
    ),
    seed=st.integers(0, 1000),
    scattered=st.booleans(),
)
def test_whatever_happens_between_steps_the_result_is_the_same(
    actions: list[tuple[str, int]], seed: int, scattered: bool
) -> None:
    shapes: list[tuple[int, ...]] = [(64,), (2, 64), (128,), (4, 4, 4), (192,), (64, 2), (64,), (64,)] * 8
    pair = Pair(AdamW, {"fused": True}, shapes, seed, scattered)
    pair.step()
    pair.step()
    assert pair.flat_steps == 1
    kept: list[list[Tensor]] = [[], []]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat_updates, "PAYS_OFF", 0)  # so that state is adopted again in the next step
        for action, position in actions:
            for own, (optimizer, params) in zip(kept, pair.both, strict=True):
                if action in CHANGES and "exp_avg" in optimizer.state[params[position]]:
                    CHANGES[action](optimizer, params[position])
                elif action == "keep":
                    own += optimizer.state[params[position]].values()
            if action == "reload":
                pair.flat.wake()
            pair.step(position if action == "without" else None)
            assert all(map(torch.equal, *kept))
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("change", ["reload", "write_all_counters", "other_options", "write_entry", "forget_one"])
def test_what_leaves_the_counters_equal_does_not_end_it(change: str) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(1 + flat_updates.PAYS_OFF):
        pair.step()
    for optimizer, params in pair.both:
        CHANGES[change](optimizer, params[1])
    before = pair.flat_steps
    for _ in range(4):
        pair.step()
    assert pair.flat_steps >= before + 3


def test_parameters_that_differ_in_their_counters_are_updated_in_parts() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 200)
    pair.step(without=20)
    pair.step(without=150)
    for _ in range(6):
        pair.step()
    assert pair.flat_steps >= 3
    pair.check_state()


def test_hooks_of_the_inner_optimizer_are_heard() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 64)
    pair.step()
    pair.step()
    heard: list[str] = []
    handle = pair.inner.register_step_post_hook(lambda *_: heard.append("after"))
    pair.step()
    assert heard == ["after"]
    assert pair.flat_steps == 1
    handle.remove()
    for _ in range(3):
        pair.step()
    assert pair.flat_steps >= 2


@pytest.mark.parametrize("left", [{"grad_scale": 4.0, "found_inf": 0.0}, {"grad_scale": 4.0}, {"found_inf": 1.0}])
def test_a_scale_left_for_the_optimizer_is_applied(left: dict[str, float]) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 64)
    for _ in range(2):
        pair.step()
    for optimizer, _ in pair.both:
        for name, value in left.items():
            setattr(optimizer, name, torch.tensor(value))
    pair.step()
    assert pair.flat_steps == 1
    pair.check_state()


def sparse(gradient: Tensor) -> Tensor:
    return (gradient * (torch.arange(gradient.numel()).view(gradient.shape) % 5 == 0)).to_sparse()


def every_other(gradient: Tensor) -> Tensor:
    return torch.stack([gradient, gradient], -1)[..., 0]


def differentiable(gradient: Tensor) -> Tensor:
    return gradient * torch.ones((), requires_grad=True)


@pytest.mark.parametrize("odd", [sparse, every_other, differentiable, Tensor.double])
@pytest.mark.parametrize("position", [1, 50])
@pytest.mark.parametrize("options", [{"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9, "fused": True}])
def test_odd_gradients_are_not_copied_as_if_they_were_plain(
    odd: Callable[[Tensor], Tensor], position: int, options: dict[str, Any]
) -> None:
    if odd is sparse and "fused" in options:
        pytest.skip("torch's fused SGD takes no sparse gradients")
    if odd is Tensor.double and "fused" in options:
        pytest.skip("torch's fused SGD takes no gradients of another type")
    pair = Pair(SGD, options, [(64,) if position < 40 else (4, 16) for position in range(80)])
    pair.step()
    pair.step()
    before = pair.flat_steps
    if odd is Tensor.double:
        for _, params in pair.both:
            params[position].grad_dtype = None
    pair.step(odd={position: odd})
    pair.step()
    assert before
    pair.check_state()


def living_bytes() -> int:
    """The bytes of the memory of all tensors that there are."""
    gc.collect()
    tensors = [value for value in gc.get_objects() if type(value) in (Tensor, nn.Parameter)]
    storages = [value.untyped_storage() for value in tensors if value.layout is torch.strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_parameters_that_fall_out_of_a_run_do_not_keep_its_memory() -> None:
    pair = Pair(AdamW, {"fused": True}, [(1024,)] * 200)
    pair.step()
    before = living_bytes()
    for position in range(60):
        pair.step(without=position)
    assert living_bytes() < 1.1 * before
    pair.check_state()
    assert living_bytes() < 1.1 * before


@pytest.mark.parametrize("how", ["clear", "replace", "load"])
def test_nothing_keeps_old_state_alive(how: str) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(3):
        pair.step()
    holder = weakref.ref(next(iter(held_state(pair.inner)._holders)))
    alone = weakref.ref(pair.inner.state[pair.lone]["exp_avg"])
    assert held_state(pair.inner).held == 80
    if how == "clear":
        for optimizer, _ in pair.both:
            optimizer.state.clear()
    elif how == "replace":
        for optimizer, _ in pair.both:
            optimizer.state = defaultdict(dict)
    else:
        reload(pair.inner, pair.lone)
        pair.flat.wake()
    if how != "load":
        pair.step()
    gc.collect()
    assert alone() is None
    assert holder() is None
    pair.step()
    pair.check_state()


def held_state(optimizer: Optimizer) -> HeldState:
    state = optimizer.state
    assert isinstance(state, HeldState)
    return state


def test_a_step_that_is_refused_changes_nothing() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    pair.step()
    before = copy.deepcopy(pair.params)
    pair.lone.grad = sparse(torch.ones(3))
    with pytest.raises(RuntimeError, match="sparse"):
        pair.flat.step(pair.inner.step)
    assert all(map(torch.equal, pair.params, before))
    assert all(pair.inner.state[param]["step"].item() == 2.0 for param in pair.params)
    assert all(len(group["params"]) == count for group, count in zip(pair.inner.param_groups, (40, 41), strict=True))


def test_parameters_taken_out_of_the_inner_groups_are_not_stepped() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    pair.step()
    for optimizer, _ in pair.both:
        del optimizer.param_groups[0]["params"][3]
    pair.step()


def test_state_that_often_does_not_fit_is_looked_at_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    def count(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return alike_parts(*args)

    alike_parts = flat_updates._alike_parts
    monkeypatch.setattr(flat_updates, "_alike_parts", count)
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 200)
    for position in range(100):
        pair.step(without=position)
    assert tries < 2 * 16


def test_one_missing_gradient_costs_one_run_its_flat_step() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    pair.step()
    assert pair.step(without=(40, 80)) == 1, "a run without any gradient is left out; the lone one is stepped"
    assert pair.step(without=3) == 40 + 1, "the run of that parameter"


def test_state_asked_for_now_and_then_is_adopted_again_at_once() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    for _ in range(3):
        pair.flat_steps = 0
        for _ in range(flat_updates.PAYS_OFF):
            pair.step()
        assert pair.flat_steps == flat_updates.PAYS_OFF
        pair.check_state()


def test_state_asked_for_after_every_step_is_left_alone() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(40):
        pair.step()
        pair.check_state()
    assert pair.flat_steps < 8


@pytest.mark.parametrize(
    "kept",
    [
        lambda state: state,
        lambda state: state["exp_avg"],
        lambda state: state["exp_avg"].view(8, 8)[2:],
        lambda state: state["step"].detach(),
        lambda state: torch.from_numpy(state["exp_avg_sq"].numpy()),
        lambda state: state["exp_avg"].untyped_storage(),
    ],
    ids=["dict", "tensor", "view", "detached", "array", "storage"],
)
@pytest.mark.parametrize("since", [1, 3])
def test_state_that_somebody_keeps_stays_the_current_one(kept: Callable[[Any], Any], since: int) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(since):
        pair.step()
    mine = kept(pair.inner.state[pair.params[7]])
    for _ in range(20):
        pair.step()
    theirs = kept(pair.plain.state[pair.plain_params[7]])
    if isinstance(mine, torch.UntypedStorage):
        assert mine.tolist() == theirs.tolist()
    else:
        assert_equal(mine, theirs)
    assert pair.flat_steps >= 10, "the others are updated together"


def test_state_may_be_asked_for_while_evaluating() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(3):
        pair.step()
    with torch.inference_mode():
        assert len(pair.inner.state.values()) == 81
    for _ in range(4):
        pair.step()
    pair.check_state()


def test_a_step_in_inference_mode_leaves_state_that_can_be_changed() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    with torch.inference_mode():
        pair.step()
    for _ in range(4):
        pair.step()
    pair.check_state()


def test_state_may_be_asked_for_under_a_mode() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    for _ in range(3):
        pair.step()
    with FakeTensorMode():
        assert all(type(each["exp_avg"]) is Tensor for each in pair.inner.state.values())
    pair.step()
    pair.check_state()


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("when", ["before", "while"])
def test_state_may_be_asked_for_in_the_middle_of_a_step(
    when: str, scattered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the handler of a signal does: where the inner optimizer makes its part of the step, and the twin its own."""
    pair = Pair(AdamW, {"fused": True}, [(64,), (8, 8)] * 40, scattered=scattered)
    for _ in range(3):
        pair.step()
    kept: list[Any] = []
    original = AdamW.step

    def step(self: AdamW, closure: Any = None) -> Any:
        is_twin = self is not pair.inner and self is not pair.plain
        if is_twin == (when == "while") and self is not pair.plain:
            kept.append(pair.inner.state[pair.params[1]]["exp_avg"])
        return original(self, closure)

    step.hooked = True  # type: ignore[attr-defined]
    step.__wrapped__ = step  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(AdamW, "step", step)
        assert held_state(pair.inner).held == 80
        pair.flat.wake()  # a part binds its twin's step when it is made
        pair.inner.state.values().__iter__().__next__()
        for _ in range(3):
            pair.step()
    assert kept
    assert torch.equal(kept[-1], pair.plain.state[pair.plain_params[1]]["exp_avg"])
    pair.check_state()


def test_state_may_be_asked_for_by_another_thread_at_any_time() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    done = threading.Event()

    def ask() -> int:
        times = 0
        while not done.wait(0.003):
            times += all(each["step"].item() > 0 for each in pair.inner.state.values())
        return times

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(flat_updates, "PAYS_OFF", 0)
        pair.step()
        asking = pool.submit(ask)
        try:
            for _ in range(200):
                pair.step()
        finally:
            done.set()
    assert asking.result() > 10
    assert pair.flat_steps > 20
    pair.check_state()


def test_an_adoption_that_fails_half_way_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 240)
    pair.step(without=60)
    original, calls = flat_updates._side_by_side, 0

    def fail(states: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return original(states)

    monkeypatch.setattr(flat_updates, "_side_by_side", fail)
    for param in [*pair.params, pair.lone]:
        param.grad = torch.ones_like(param)
    with pytest.raises(MemoryError):
        pair.flat.step(pair.inner.step)
    for _ in range(6):
        pair.step()
    pair.check_state()
    assert pair.flat_steps


def test_a_part_asked_for_while_gradients_are_gathered_is_stepped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 240)
    pair.step(without=60)
    pair.step()
    assert held_state(pair.inner).held == 240 - 1, "the first run is in two parts"
    original = flat_updates._Part.find_gradients

    def ask(self: Any) -> Any:
        if self.tensors[0] is pair.params[61]:
            assert len(pair.inner.state[pair.params[0]]) == 3
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(flat_updates._Part, "find_gradients", ask)
        pair.step()
    assert held_state(pair.inner).held == 240 - 61
    pair.check_state()


def test_a_mapping_that_somebody_took_stays_the_current_one() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    taken = pair.inner.state
    pair.step()
    pair.step()
    assert len(taken) == 81
    assert taken is pair.inner.state
    mine: defaultdict[Any, Any] = defaultdict(dict)
    pair.inner.state = mine
    pair.plain.state = defaultdict(dict)
    for _ in range(3):
        pair.step()
    assert pair.inner.state is mine
    del mine
    pair.flat_steps = 0
    for _ in range(3):
        pair.step()
    assert pair.flat_steps
    pair.check_state()


@pytest.mark.parametrize("odd", [lambda: torch.ones(3), lambda: torch.ones(64).to_sparse(), lambda: 3.0])
def test_state_of_another_sort_is_left_alone(odd: Callable[[], Any]) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 80)
    pair.step()
    for optimizer, params in pair.both:
        for param in params[:40]:
            optimizer.state[param]["odd"] = odd()
    for _ in range(3):
        pair.step()
    assert held_state(pair.inner).held == 40
    assert "odd" in pair.inner.state[pair.params[0]]


def test_matrices_are_adopted_again() -> None:
    pair = Pair(AdamW, {"fused": True}, [(8, 8)] * 80)
    for _ in range(1 + flat_updates.PAYS_OFF):
        pair.step()
    pair.check_state()
    pair.step()
    assert held_state(pair.inner).held == 80


def test_an_implementation_that_makes_new_state_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(AdamW, {}, [(64,)] * 80)
    pair.step()
    original = AdamW.step

    def step(self: AdamW, closure: Any = None) -> Any:
        loss = original(self, closure)
        for group in self.param_groups:
            for param in group["params"]:
                old = self.state[param]["exp_avg"]
                self.state[param]["exp_avg"] = old.clone()
                old.fill_(torch.nan)
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    step.__wrapped__ = step  # type: ignore[attr-defined]
    monkeypatch.setattr(AdamW, "step", step)
    for _ in range(4):
        pair.step()
    assert pair.flat_steps
    pair.check_state()


def specs(count: int) -> tuple[list[nn.Parameter], list[ParamSpec]]:
    """Parameters of every sort, in two groups."""
    shapes: list[tuple[int, ...]] = [(64,), (61,), (8, 64), (4096,), (3,), (128,), (0,)]
    params = [nn.Parameter(torch.randn(shapes[index % len(shapes)])) for index in range(count)]
    for index in range(0, count, 9):
        params[index] = nn.Parameter(torch.randn(16, 8).t())
    for index in range(4, count, 11):
        params[index] = nn.Parameter(torch.randn(64).bfloat16())
    return params, [
        ParamSpec(index, str(index), tuple(param.shape), param.stride(), param.dtype, int(index > count // 2))
        for index, param in enumerate(params)
    ]


@pytest.mark.parametrize("storage_class", [InPlace, Buckets])
def test_only_small_parameters_of_whole_vectors_keep_company(storage_class: type[InPlace]) -> None:
    params, found = specs(8000)
    layout = extend(None, found, 2, "parameter", True)
    storage = storage_class(params, layout)
    owner = {shard.param: shard.owner for shard in layout.shards}
    seen: set[int] = set()
    for company in storage.companies:
        assert not seen & set(company.params)
        seen.update(company.params)
        members = [params[index] for index in company.params]
        assert len({(owner[index], found[index].group) for index in company.params}) == 1
        assert sum(member.nbytes for member in members) <= RUN_BYTES + SMALL_BYTES
        for member in members:
            assert member.is_contiguous()
            assert member.dtype == torch.float32
            assert 0 < member.nbytes <= SMALL_BYTES
            assert member.numel() % 64 == 0
        if storage_class is Buckets:
            assert company.memory is not None
            assert torch.equal(company.memory, torch.cat([member.detach().reshape(-1) for member in members]))
            assert company.memory.data_ptr() == members[0].data_ptr()
    fitting = [
        index
        for index, param in enumerate(params)
        if param.is_contiguous() and param.dtype == torch.float32 and param.numel() in (64, 128, 512)
    ]
    assert seen == set(fitting) - set(layout.cut_params)


class Small(nn.Module):
    """Many small layers among a few that are larger or of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(120)])
        self.low = nn.ParameterList([nn.Parameter(torch.randn(8, 64)) for _ in range(6)])
        self.odd = nn.Parameter(torch.randn(61))
        self.large = nn.Parameter(torch.randn(96, 64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs @ self.large.T @ self.large
        for scale in self.scales:
            hidden = torch.tanh(hidden * scale)
        for low in self.low:
            hidden = hidden + hidden @ low.T @ low * 0.01
        return hidden.sum() + (self.odd.square() * inputs.mean()).sum()


class Training:
    """A model under our optimizer, and its equal under the plain one."""

    def __init__(self, optimizer_class: type[Optimizer] = AdamW, bucket_view: bool = True, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Small()
        self.plain_model = copy.deepcopy(self.model)
        self.plain = optimizer_class(self._groups(self.plain_model), **options)
        self.bucket_view = bucket_view
        self.ours = self.optimizer(optimizer_class, **options)

    def optimizer(self, optimizer_class: type[Optimizer] = AdamW, **options: Any) -> ZeroRedundancyOptimizer:
        groups = self._groups(self.model)
        return ZeroRedundancyOptimizer(groups, optimizer_class, parameters_as_bucket_view=self.bucket_view, **options)

    @staticmethod
    def _groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [
            {"params": [pair for pair in named if "scales" not in pair[0]]},
            {"params": [pair for pair in named if "scales" in pair[0]], "weight_decay": 0.0},
        ]

    def train(self, steps: int = 3) -> None:
        for _ in range(steps):
            inputs = torch.randn(4, 64)
            for model in (self.model, self.plain_model):
                model.zero_grad()
                model(inputs).backward()
            self.ours.step()
            self.plain.step()
        for (name, param), plain in zip(self.model.named_parameters(), self.plain_model.parameters(), strict=True):
            assert torch.equal(param, plain), name

    def check_state(self) -> None:
        """Compare the consolidated state with the plain optimizer's, on every rank in turn."""
        for rank in range(dist.get_world_size()):
            self.ours.consolidate_state_dict(to=rank)
            if rank == dist.get_rank():
                assert_equal(self.ours.state_dict()["state"], self.plain.state_dict()["state"])

    def is_flat(self) -> bool:
        """Whether many parameters are updated together."""
        return held_state(self.ours.optim).held > 32


def assert_equal(ours: Any, plain: Any) -> None:
    if isinstance(plain, dict):
        assert ours.keys() == plain.keys()
        for key, value in plain.items():
            assert_equal(ours[key], value)
    elif isinstance(plain, Tensor):
        assert torch.equal(ours, plain)
    else:
        assert ours == plain


BOTH = pytest.mark.parametrize("bucket_view", [False, True])
IMPLEMENTATIONS = pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["fused", "loop"])


@distributed(2, 3)
@BOTH
@IMPLEMENTATIONS
def test_training_and_state_are_those_of_the_plain_optimizer(
    world_size: int, bucket_view: bool, options: dict[str, Any]
) -> None:
    training = Training(bucket_view=bucket_view, lr=0.01, **options)
    schedulers = [StepLR(optimizer, 2, 0.5) for optimizer in (training.ours, training.plain)]
    for _ in range(3):
        training.train(2)
        for scheduler in schedulers:
            scheduler.step()
    assert training.is_flat()
    training.check_state()
    assert all(param.grad is not None for param in training.model.parameters())


@distributed(2)
@BOTH
def test_parameters_of_every_sort_are_those_of_the_plain_optimizer(world_size: int, bucket_view: bool) -> None:
    torch.manual_seed(5)
    params, found = specs(400)
    plain_params = [nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype).copy_(p)) for p in params]
    groups, plain_groups = (
        [
            {"params": [param for param, spec in zip(each, found, strict=True) if spec.group == group]}
            for group in (0, 1)
        ]
        for each in (params, plain_params)
    )
    ours = ZeroRedundancyOptimizer(groups, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(plain_groups, lr=0.1)
    for _ in range(4):
        for param, other in zip(params, plain_params, strict=True):
            gradient = torch.randn(param.shape).to(param.dtype)
            param.grad, other.grad = gradient, gradient.clone()
        ours.step()
        plain.step()
    for param, other in zip(params, plain_params, strict=True):
        assert torch.equal(param, other)


@distributed(2)
@BOTH
def test_steps_with_a_closure_or_without_some_gradients_mix_in(world_size: int, bucket_view: bool) -> None:
    training = Training(bucket_view=bucket_view, lr=0.01, fused=True)
    training.train(3)
    inputs = torch.randn(4, 64)
    for optimizer, model in ((training.ours, training.model), (training.plain, training.plain_model)):

        def closure(optimizer: Any = optimizer, model: nn.Module = model) -> Any:
            optimizer.zero_grad()
            loss = model(inputs)
            loss.backward()
            return loss

        optimizer.step(closure)
        model.zero_grad()
        model(inputs).backward()
        model.get_parameter("scales.3").grad = None
        optimizer.step()
    training.train(3)
    training.check_state()


@distributed(2)
@pytest.mark.parametrize("how", ["closure", "moved", "hook", "plain"])
def test_the_inner_optimizer_is_given_state_with_memory_of_its_own(world_size: int, how: str) -> None:
    """torch adds sparse gradients of single elements at the wrong place to a view."""
    params, plain_params = ([nn.Parameter(torch.ones(64)) for _ in range(100)] for _ in range(2))
    ours = ZeroRedundancyOptimizer(params, SGD, lr=0.1, momentum=0.9)
    plain = SGD(plain_params, lr=0.1, momentum=0.9)

    def give(change: Callable[[Tensor], Tensor]) -> None:
        for position, (param, other) in enumerate(zip(params, plain_params, strict=True)):
            gradient = torch.arange(64.0) + position
            param.grad, other.grad = change(gradient), change(gradient)

    for _ in range(3):
        give(torch.clone)
        ours.step()
        plain.step()
    assert held_state(ours.optim).held
    if how == "moved":
        for param in (params[0], params[-1]):
            param.data = param.data.clone()
    elif how == "hook":
        ours.optim.register_step_post_hook(lambda *_: None)
    if how == "closure":
        ours.step(lambda: give(sparse) or 1.0)  # type: ignore[func-returns-value]
    else:
        give(sparse)
        ours.step()
    plain.step()
    assert all(map(torch.equal, params, plain_params))


@distributed(2)
@BOTH
def test_state_goes_through_files_and_state_dicts(world_size: int, bucket_view: bool, tmp_path: Path) -> None:
    training = Training(bucket_view=bucket_view, lr=0.01, fused=True)
    training.train(3)
    assert training.is_flat()
    save(tmp_path, model=training.model, optimizer=training.ours, step=3)
    training.ours.consolidate_state_dict(to=0)
    whole: list[Any] = [training.ours.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(whole, src=0)
    full = StateDictOptions(full_state_dict=True)
    named = get_optimizer_state_dict(training.model, training.ours, options=full)
    training.train(2)
    for fresh in (False, True):
        for way in ("files", "state dict", "named"):
            if fresh:
                training.ours = training.optimizer(lr=0.01, fused=True)
            load(tmp_path, model=training.model, optimizer=training.ours if way == "files" else None)
            if way == "state dict":
                training.ours.load_state_dict(whole[0])
            elif way == "named":
                set_optimizer_state_dict(training.model, training.ours, copy.deepcopy(named), options=full)
            training.plain_model.load_state_dict(training.model.state_dict())
            training.plain.load_state_dict(copy.deepcopy(whole[0]))
            training.train(3)
            assert training.is_flat()
            training.check_state()


@distributed(2)
@BOTH
def test_moved_parameters_and_new_groups_are_followed(world_size: int, bucket_view: bool) -> None:
    training = Training(bucket_view=bucket_view, lr=0.01, fused=True)
    training.train(3)
    for model in (training.model, training.plain_model):
        model.scales[5].data = torch.full((64,), 0.5)
    training.train(8)
    assert training.is_flat()
    for optimizer, model in ((training.ours, training.model), (training.plain, training.plain_model)):
        model.scales.append(nn.Parameter(torch.ones(64)))
        optimizer.add_param_group({"params": [("scales.120", model.scales[120])], "lr": 0.1})
    training.train(3)
    training.check_state()


@distributed(2)
@BOTH
def test_the_state_that_people_look_at_is_alive(world_size: int, bucket_view: bool) -> None:
    training = Training(bucket_view=bucket_view, lr=0.01, fused=True)
    training.train(2)
    mine = [param for param in training.model.scales if param in training.ours.state]
    seen = [training.ours.state[param]["exp_avg"] for param in mine]
    counters = [training.ours.state[param]["step"] for param in mine]
    training.train(2)
    plain = dict(training.plain_model.named_parameters())
    names = {id(param): name for name, param in training.model.named_parameters()}
    for param, average, counter in zip(mine, seen, counters, strict=True):
        expected = training.plain.state[plain[names[id(param)]]]
        assert torch.equal(average, expected["exp_avg"])
        assert counter.item() == 4.0
