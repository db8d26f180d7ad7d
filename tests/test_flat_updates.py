"""Small parameters that are updated together: bitwise what the class does by itself, whatever happens between steps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import StepLR

from harness import distributed
from onecopy import ZeroRedundancyOptimizer
from onecopy.checkpoint import get_optimizer_state_dict, load, save, set_optimizer_state_dict
from onecopy.engine.classes import ELEMENTWISE
from onecopy.engine.flat_updates import FlatUpdates, Run

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
    """The same tensors twice: each by itself under a plain optimizer, and side by side under one with flat updates."""

    def __init__(
        self, optimizer_class: type[Optimizer], options: dict[str, Any], shapes: list[tuple[int, ...]], seed: int = 0
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
        runs = [Run(0, tuple(self.params[:half]), memory[:cut]), Run(1, tuple(self.params[half:]), memory[cut:])]
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

    def step(self, without: int | None = None) -> None:
        """One step with new gradients, of which one may be missing."""
        gradients = [
            torch.randn(param.shape, generator=self.generator) * 10.0 ** (position % 9 - 6)
            for position, param in enumerate([*self.params, self.lone])
        ]
        for _, params in self.both:
            for position, (param, gradient) in enumerate(zip(params, gradients, strict=True)):
                param.grad = None if position == without else gradient.clone()
        self.plain.step()
        if self.flat.step():
            self.flat_steps += 1
        else:
            self.inner.step()
        self.check()

    def check(self) -> None:
        for ours, plain in zip(self.both[1][1], self.both[0][1], strict=True):
            assert torch.equal(ours, plain)
            mine, theirs = self.inner.state[ours], self.plain.state[plain]
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert torch.equal(mine[key], value), key
                assert mine[key].dtype == value.dtype


@pytest.mark.parametrize("case", CLASSES, ids=label)
@pytest.mark.parametrize("threads", [1, 3])
def test_every_class_is_updated_bitwise_as_by_itself(
    case: tuple[type[Optimizer], dict[str, Any]], threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pair = Pair(*case, [(64 * (1 + position % 7),) for position in range(200)])
        for _ in range(4):
            pair.step()
    finally:
        torch.set_num_threads(before)
    assert pair.flat_steps == (4 if case[0] is Adagrad else 3), "Adagrad alone has state before its first step"


def test_all_classes_that_may_be_updated_together_are_tried() -> None:
    assert {optimizer_class for optimizer_class, _ in CLASSES} == ELEMENTWISE


def test_another_class_is_left_to_itself() -> None:
    class Mine(AdamW):
        pass

    pair = Pair(Mine, {"fused": True}, [(64,)] * 32)
    for _ in range(3):
        pair.step()
    assert not pair.flat_steps


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


def add_entry(optimizer: Optimizer, param: nn.Parameter) -> None:
    optimizer.state[param]["note"] = torch.tensor(1.0)


def reload(optimizer: Optimizer, param: nn.Parameter) -> None:
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
        add_entry,
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
            st.tuples(st.just("without"), st.integers(0, 32)),
            st.tuples(st.sampled_from(sorted(CHANGES)), st.integers(0, 32)),
        ),
        min_size=1,
        max_size=10,
    ),
    seed=st.integers(0, 1000),
)
def test_whatever_happens_between_steps_the_result_is_the_same(actions: list[tuple[str, int]], seed: int) -> None:
    shapes: list[tuple[int, ...]] = [(64,), (2, 64), (128,), (4, 4, 4), (192,), (64, 2), (64,), (64,)] * 4
    pair = Pair(AdamW, {"fused": True}, shapes, seed)
    pair.step()
    pair.step()
    assert pair.flat_steps == 1
    for action, position in actions:
        if action in CHANGES:
            for optimizer, params in pair.both:
                if "exp_avg" in optimizer.state.get(params[position], {}):
                    CHANGES[action](optimizer, params[position])
            if action == "reload":
                pair.flat.wake()
        pair.step(position if action == "without" else None)
    pair.step()


@pytest.mark.parametrize("change", ["reload", "write_all_counters", "other_options", "write_entry", "forget_one"])
def test_what_leaves_the_counters_equal_does_not_end_it(change: str) -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 40)
    for _ in range(3):
        pair.step()
    for optimizer, params in pair.both:
        CHANGES[change](optimizer, params[1])
    before = pair.flat_steps
    pair.step()
    pair.step()
    assert pair.flat_steps == before + 2


def test_parameters_that_differ_in_their_counters_are_updated_in_parts() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 90)
    pair.step(without=20)
    pair.step(without=70)
    pair.step()
    assert pair.flat_steps == 1


def test_hooks_of_the_inner_optimizer_are_heard() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 32)
    pair.step()
    pair.step()
    heard: list[str] = []
    handle = pair.inner.register_step_post_hook(lambda *_: heard.append("after"))
    pair.step()
    assert heard == ["after"]
    assert pair.flat_steps == 1
    handle.remove()
    pair.step()
    assert pair.flat_steps == 2


def test_a_scale_left_for_the_optimizer_is_applied() -> None:
    pair = Pair(AdamW, {"fused": True}, [(64,)] * 32)
    for _ in range(2):
        pair.step()
    for optimizer, _ in pair.both:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    pair.step()
    assert pair.flat_steps == 1


class Small(nn.Module):
    """Eighty small layers among a few that are larger or of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(64)) for _ in range(80)])
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
    """A model under our optimizer with bucket views, and its equal under the plain one."""

    def __init__(self, optimizer_class: type[Optimizer] = AdamW, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = Small()
        self.plain_model = copy.deepcopy(self.model)
        self.plain = optimizer_class(self._groups(self.plain_model), **options)
        self.ours = self.optimizer(optimizer_class, **options)

    def optimizer(self, optimizer_class: type[Optimizer] = AdamW, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(
            self._groups(self.model), optimizer_class, parameters_as_bucket_view=True, **options
        )

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
        """Whether many parameters' state lies in few memories."""
        states = [self.ours.optim.state[param] for param in self.model.scales if param in self.ours.optim.state]
        memories = {state["exp_avg"].untyped_storage().data_ptr() for state in states}
        return len(states) > 5 and len(memories) <= 2


def assert_equal(ours: Any, plain: Any) -> None:
    if isinstance(plain, dict):
        assert ours.keys() == plain.keys()
        for key, value in plain.items():
            assert_equal(ours[key], value)
    elif isinstance(plain, Tensor):
        assert torch.equal(ours, plain)
    else:
        assert ours == plain


IMPLEMENTATIONS = pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}], ids=["fused", "loop"])


@distributed(2, 3)
@IMPLEMENTATIONS
def test_training_and_state_are_those_of_the_plain_optimizer(world_size: int, options: dict[str, Any]) -> None:
    training = Training(lr=0.01, **options)
    schedulers = [StepLR(optimizer, 2, 0.5) for optimizer in (training.ours, training.plain)]
    for _ in range(3):
        training.train(2)
        for scheduler in schedulers:
            scheduler.step()
    assert training.is_flat()
    training.check_state()
    assert all(param.grad is not None for param in training.model.parameters())


@distributed(2)
def test_steps_with_a_closure_or_without_some_gradients_mix_in(world_size: int) -> None:
    training = Training(lr=0.01, fused=True)
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
def test_state_goes_through_files_and_state_dicts(world_size: int, tmp_path: Path) -> None:
    training = Training(lr=0.01, fused=True)
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
def test_moved_parameters_and_new_groups_are_followed(world_size: int) -> None:
    training = Training(lr=0.01, fused=True)
    training.train(3)
    for model in (training.model, training.plain_model):
        model.scales[5].data = torch.full((64,), 0.5)
    training.train(3)
    assert training.is_flat()
    for optimizer, model in ((training.ours, training.model), (training.plain, training.plain_model)):
        model.scales.append(nn.Parameter(torch.ones(64)))
        optimizer.add_param_group({"params": [("scales.80", model.scales[80])], "lr": 0.1})
    training.train(3)
    training.check_state()


@distributed(2)
def test_the_state_that_people_look_at_is_alive(world_size: int) -> None:
    training = Training(lr=0.01, fused=True)
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
