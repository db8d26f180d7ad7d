"""Errors of checkpoints on ranks: every rank raises soon and names the cause and its place, and nothing has changed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import SGD, AdamW

from onecopy import NonfiniteError, RanksDisagreeError, ZeroRedundancyOptimizer, hook_with_zero_step
from onecopy.checkpoint import PerRank, latest, load, save, storage, wait
from onecopy.errors import CorruptCheckpointError
from tests.support.checkpoints import Side, make
from tests.support.failures import expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed
from tests.support.logs import logged
from tests.support.models import assert_equal, assert_same_tree, small_ddp, small_loss, values

SOON = 10.0


def refused(call: Callable[[], object], *texts: object, side: Side | None = None) -> None:
    """All ranks raise soon, with these texts; a side has not changed, and can train on."""
    before = None if side is None else side.contents()
    message = str(failure_of(call))
    for text in texts:
        assert str(text) in message, f"{text} is not in: {message}"
    if side is not None:
        assert_same_tree(side.contents(), before, "after the error")
        side.push([7])


def saved(root: Path, step: int = 1) -> tuple[Side, Path]:
    side = make("element")
    side.push(range(2))
    return side, side.save(root, step)


def on_rank_0(change: Callable[[], object]) -> None:
    """Change files on rank 0 while the others wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


MISFITS: list[tuple[Callable[[nn.Module], object], Sequence[str]]] = [
    (lambda module: setattr(module, "extra", nn.Linear(2, 2)), ["extra.weight", "extra.bias", "strict=False"]),
    (lambda module: delattr(module, "frozen"), ["frozen.weight"]),
    (lambda module: setattr(module, "norm", nn.BatchNorm2d(9)), ["norm.weight", "(8,)", "(9,)"]),
    (lambda module: setattr(module, "norm", nn.BatchNorm2d(8).double()), ["norm.weight", "float32", "float64"]),
]


@distributed(2, 3)
def test_other_models_and_optimizers_are_refused_and_named(world_size: int, tmp_path: Path) -> None:
    _, path = saved(tmp_path)
    for kind, (change, texts) in itertools.product(("plain", "element"), MISFITS):
        side = make(kind, 9, wrap=False)
        change(side.module)
        refused(lambda module=side.module: load(path, model=module), *texts, side=side)  # type: ignore[misc]
    other, stranger = make("plain", 9, wrap=False), AdamW(make("plain", 9, wrap=False).module.parameters())
    module, grouped = other.module, AdamW(other.module.parameters())
    optimizers: list[tuple[Any, Sequence[str]]] = [
        (SGD(module.parameters()), ["SGD", "AdamW"]),
        (grouped, ["grouped otherwise", "body.bias"]),
        ([*other.optimizers, grouped], ["1 optimizers", "2 were"]),
        (stranger, ["not a parameter of the model"]),
        (AdamW([module.body.weight]), ["other parameters", "conv.weight"]),
    ]
    for optimizer, texts in optimizers:
        call = lambda optimizer=optimizer: load(path, model=module, optimizer=optimizer)  # noqa: E731
        refused(call, *texts, side=other)
    refused(lambda: load(path, optimizer=other.optimizers), "pass model=")
    refused(lambda: save(tmp_path, 2, model=module, optimizer=stranger), "not a parameter of the model")
    assert latest(tmp_path) == path


@distributed(2)
def test_a_part_can_be_loaded(world_size: int, tmp_path: Path) -> None:
    side, path = saved(tmp_path)
    other = make("plain", 9, wrap=False)
    del other.module.frozen
    other.module.more = nn.Linear(2, 2)
    loaded = load(path, model=other.module, strict=False)
    assert loaded.missing == ["more.weight", "more.bias"]
    assert loaded.unexpected == ["frozen.weight", "frozen.bias"]
    assert torch.equal(other.module.embedding.weight, side.module.embedding.weight)
    assert not other.optimizers[0].state
    only = make("element", 9)
    save(tmp_path, 2, optimizer=side.optimizers)
    before = only.weights()
    load(tmp_path, optimizer=only.optimizers)
    assert_same_tree(only.weights(), before, "model")
    assert_same_tree(only.contents()[1], side.contents()[1], "state")
    refused(lambda: load(tmp_path, model=only.module), "without a model")


@distributed(2)
def test_bad_arguments_are_refused_on_all_ranks(world_size: int, tmp_path: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchClass  # warns before onecopy is imported

    side, path = saved(tmp_path)
    rank, of_torch = dist.get_rank(), TorchClass(side.module.parameters(), AdamW, lr=0.1)
    bad: dict[str, Any] = {"a": [object() if rank == 1 else 1]}
    calls: list[tuple[Callable[[], object], Sequence[object]]] = [
        (lambda: side.save(tmp_path, 1), [path, "exists already"]),
        *((lambda step=step: side.save(tmp_path, step), ["step must", step]) for step in (-1, True, 1.5, "x")),
        *((lambda keep=keep: side.save(tmp_path, 2, keep=keep), ["keep must", keep]) for keep in (0, -1, 2.5)),
        (lambda: side.save(tmp_path, 2 if rank else -1), ["step must be"]),
        (lambda: side.save(tmp_path, 2, extra=bad), ["extra['a'][0]", "builtins.object"]),
        (lambda: save(tmp_path, 2, optimizer="Adam"), ["optimizer must be"]),  # type: ignore[arg-type]
        # Its state would be found nowhere, and nothing saved.
        (lambda: save(tmp_path, 2, optimizer=of_torch), ["use onecopy.ZeroRedundancyOptimizer"]),
        (lambda: side.load(tmp_path / "nothing"), [tmp_path / "nothing"]),
        (lambda: side.load(tmp_path / "step-00000009"), ["step-00000009", "missing"]),
    ]
    for call, texts in calls:
        refused(call, *texts, side=side)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def flip(path: Path, position: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))


@distributed(2)
def test_the_newest_that_is_not_damaged_is_loaded(world_size: int, tmp_path: Path) -> None:
    side, first = saved(tmp_path, 1)
    before = side.weights()
    side.push([2])
    second = side.save(tmp_path, 2)
    on_rank_0(lambda: flip(second / "rank-00001.safetensors", 3000, 1))
    other = make("element", 9)
    refused(lambda: other.load(second), "rank-00001.safetensors", side=other)
    with logged(logging.WARNING) as lines:
        loaded = other.load(tmp_path)
    assert (loaded.step, loaded.path) == (1, first)
    assert_same_tree(other.weights(), before, "model")
    assert len(lines) == 1
    assert "rank-00001.safetensors is damaged" in lines[0]
    on_rank_0(lambda: flip(first / "manifest.json", 300, 1))
    error = failure_of(lambda: other.load(tmp_path))
    expect(
        error,
        CorruptCheckpointError,
        "step-00000002/rank-00001.* is damaged.*; .*step-00000001/manifest.json is damaged",
    )


def fail_half_way(culprits: Sequence[int], call: Callable[[], object], *texts: object) -> None:
    """Let one of the last reads of a load fail on some ranks, when some has been loaded; all ranks raise."""
    real, count, fails_at = storage.read_into, 0, 0

    def counted(*arguments: Any) -> int:
        nonlocal count
        count += 1
        if count == fails_at:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "read_into", counted)
        call()
        if dist.get_rank() in culprits:
            fails_at = 2 * count - 3
        refused(call, "Input/output error", "refuse to step", *texts)


@pytest.mark.parametrize("kind", ["plain", "element", "overlapped"])
@distributed(2)
def test_a_read_that_fails_half_way_stops_the_optimizer(world_size: int, kind: str, tmp_path: Path) -> None:
    source, path = saved(tmp_path)
    side = make(kind, 9)
    fail_half_way([1], lambda: side.load(path), "rank 1", path)
    for optimizer in side.optimizers:
        refused(optimizer.step, path, "load a checkpoint before the next step")
    side.load(path)
    assert_same_tree(side.weights(), source.weights(), "model")
    for optimizer in side.optimizers:
        optimizer.step()


@distributed(2)
def test_a_read_that_fails_half_way_stops_updates_in_the_backward_pass(world_size: int, tmp_path: Path) -> None:
    ddp = small_ddp()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, optimizer))
    for step in range(4):
        small_loss(ddp, step).backward()
        optimizer.step()
        ddp.zero_grad()
    path = save(tmp_path, 4, model=ddp, optimizer=optimizer)
    fail_half_way([1], lambda: load(path, model=ddp, optimizer=optimizer), "rank 1", path)
    before = values(ddp.parameters())
    with contextlib.suppress(Exception):
        small_loss(ddp, 5).backward()
    assert_equal(values(ddp.parameters()), before, "updated in the backward pass")


@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2)
def test_a_save_in_the_background_holds_the_values_at_its_call(world_size: int, kind: str, tmp_path: Path) -> None:
    side, flush = make(kind), storage.flush
    side.train(range(2))
    before, go_on = side.contents(), threading.Event()

    def slow(descriptor: int) -> None:
        assert go_on.wait(SOON)
        flush(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "flush", slow)
        path = side.save(tmp_path, 2, blocking=False)
        side.train([2, 3])
        assert not path.exists()
        go_on.set()
        wait()
    assert latest(tmp_path) == path
    other = make(kind, 9)
    other.load(path)
    if dist.get_rank() == 0:
        assert_same_tree(other.contents(), before, "saved")
    other.train([2, 3])
    assert_same_tree(other.weights(), side.weights(), "continued")


@pytest.mark.parametrize("next_call", ["wait", "save", "load"])
@distributed(2)
def test_a_failure_in_the_background_is_raised_by_the_next_call(
    world_size: int, next_call: str, tmp_path: Path
) -> None:
    side, path = saved(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    calls: dict[str, Callable[[], object]] = {
        "wait": wait,
        "save": lambda: side.save(tmp_path, 3),
        "load": lambda: side.load(tmp_path),
    }
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(storage, "flush", full)
        side.save(tmp_path, 2, blocking=False)
        refused(calls[next_call], "No space left", "rank-00001.safetensors", side=side)
    wait()
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    assert side.save(tmp_path, 3).exists()


@distributed(2, 3)
def test_a_rank_that_can_start_no_thread_saves_at_once(world_size: int, tmp_path: Path) -> None:
    side, start = make("element"), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if dist.get_rank() == 1 and thread.name == "onecopy checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        side.save(tmp_path, 3, blocking=False)
    wait()
    side.train([2])
    assert side.load(tmp_path).step == 3


@pytest.mark.parametrize("call", ["step", "consolidate_state_dict"])
@distributed(2, 3)
def test_a_save_while_another_rank_is_in_another_call(world_size: int, call: str, tmp_path: Path) -> None:
    side = make("element")
    side.push(range(2))
    side.save(tmp_path, 1)  # makes the group of saves
    expect_failure_of(
        range(world_size),
        lambda: side.save(tmp_path, 2) if dist.get_rank() == 0 else getattr(side.optimizers[0], call)(),
        RanksDisagreeError,
        "; ".join(["rank 0: saving a checkpoint", *(f"rank {rank}: {call}.." for rank in range(1, world_size))]),
    )
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000001"]


@pytest.mark.parametrize("blocking", [True, False], ids=["", "in the background"])
@pytest.mark.parametrize("culprits", [[1], [0, 1]])
@pytest.mark.parametrize("kind", ["plain", "element", "sharded"])
@distributed(2)
def test_parameters_that_are_not_finite_are_not_saved_and_the_last_good_checkpoint_stays(
    world_size: int, kind: str, culprits: list[int], blocking: bool, tmp_path: Path
) -> None:
    side = make(kind)
    side.train(range(2))
    side.module.norm.get_buffer("running_mean")[0] = math.inf  # buffers may be
    options: dict[str, Any] = {"keep": 1, "blocking": blocking, "refuse_nonfinite": True}
    side.save(tmp_path, 1, **options)
    wait()
    weight = side.module.get_parameter("body.weight")
    if dist.get_rank() in culprits:
        weight.detach().view(-1)[-1] = -math.inf
    text = "parameter 'body.weight' has an infinity or a NaN. .*nothing was saved"
    expect_failure_of(culprits, lambda: side.save(tmp_path, 2, **options), NonfiniteError, text)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    side.load(tmp_path)
    assert weight.isfinite().all()
    side.save(tmp_path, 2, **options)
    wait()


def test_without_a_model_the_parameters_of_the_optimizers_must_be_finite(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    optimizer = SGD(layer.parameters(), lr=0.1)
    save(tmp_path, 1, optimizer=optimizer, refuse_nonfinite=True)
    torch.view_as_real(layer.bias.detach())[1, 1] = math.nan
    save(tmp_path, 2, optimizer=optimizer)
    with pytest.raises(NonfiniteError, match=r"rank 0: parameter 'group0\[1\]' has an infinity or a NaN"):
        save(tmp_path, 3, optimizer=optimizer, refuse_nonfinite=True)
    integers = nn.ParameterList([nn.Parameter(torch.arange(3), requires_grad=False)])
    save(tmp_path, 3, model=integers, refuse_nonfinite=True)


Change = Callable[[Side], dict[str, Any]]

# What the last rank gives beside the side's model and optimizers, and what all ranks are told of the others and of it.
EITHER: dict[str, tuple[Change, str, str]] = {
    "no model": (lambda _: {"model": None}, "model: given", "model: None"),
    "no optimizer": (lambda _: {"optimizer": None}, "optimizer: 1 of them", "optimizer: None"),
    "more optimizers": (
        lambda side: {"optimizer": [*side.optimizers, AdamW(side.module.parameters())]},
        "optimizer: 1 of them",
        "optimizer: 2 of them",
    ),
    "another class": (
        lambda side: {"optimizer": SGD(side.module.parameters())},
        "optimizer: .*AdamW",
        "optimizer: .*SGD",
    ),
}
LOADS: dict[str, tuple[Change, str, str]] = {
    **EITHER,
    "strict": (lambda _: {"strict": False}, "strict: True", "strict: False"),
    "missing_ok": (lambda _: {"missing_ok": True}, "missing_ok: False", "missing_ok: True"),
    "check_base": (lambda _: {"check_base": False}, "check_base: True", "check_base: False"),
}
SAVES: dict[str, tuple[Change, str, str]] = {
    **EITHER,
    "root": (lambda _: {"root": "elsewhere"}, "root: /", "root: elsewhere"),
    "step": (lambda _: {"step": 3}, "step: 2", "step: 3"),
    "keep": (lambda _: {"keep": 3}, "keep: None", "keep: 3"),
    "overwrite": (lambda _: {"overwrite": True}, "overwrite: False", "overwrite: True"),
    "blocking": (lambda _: {"blocking": False}, "blocking: True", "blocking: False"),
    "trainable_only": (lambda _: {"trainable_only": True}, "trainable_only: False", "trainable_only: True"),
    "refuse_nonfinite": (lambda _: {"refuse_nonfinite": True}, "refuse_nonfinite: False", "refuse_nonfinite: True"),
    "PerRank": (
        lambda _: {"extra": {"own": PerRank(1), "shared": 2}},
        "PerRank values of extra: none",
        "PerRank values of extra: 'own'",
    ),
}


@pytest.mark.parametrize("kind", ["plain", "element"])
@pytest.mark.parametrize(("call", "case"), [*(("load", case) for case in LOADS), *(("save", case) for case in SAVES)])
@distributed(2, 3)
def test_different_arguments_change_nothing(world_size: int, call: str, case: str, kind: str, tmp_path: Path) -> None:
    side, odd, new = make(kind), world_size - 1, tmp_path / "new"
    side.push(range(2))
    path = side.save(tmp_path, 1)
    side.push([2])
    change, text, odd_text = (LOADS if call == "load" else SAVES)[case]
    arguments: dict[str, Any] = {"model": side.model, "optimizer": side.optimizers}
    arguments |= {"source": path} if call == "load" else {"root": new, "step": 2}
    arguments |= change(side) if dist.get_rank() == odd else {}
    before = side.contents()
    expect_disagreement(odd, lambda: (load if call == "load" else save)(**arguments), text, odd_text)
    assert_same_tree(side.contents(), before, "after the error")
    assert not new.exists()
    side.push([3])
    side.load(path)


@distributed(2, 3)
def test_loading_into_different_models_or_parameters_changes_nothing(world_size: int, tmp_path: Path) -> None:
    side, other, odd = make("plain"), make("plain", 9, wrap=False), world_size - 1
    side.push(range(2))
    path, params = side.save(tmp_path, 1), list(side.module.parameters())
    if dist.get_rank() == odd:
        other.module.norm = nn.BatchNorm2d(9)
        params.reverse()
    before, turned = other.contents(), AdamW(params)
    for call, *texts in (
        (
            lambda: load(path, model=other.module, strict=False),
            r"'norm\.weight' of .*\(8,\)",
            r"'norm\.weight' of .*\(9,\)",
        ),
        (
            lambda: load(path, model=side.model, optimizer=turned),
            "parameter 0 of group 0 .*'emb",
            "parameter 0 of group 0 .*'body",
        ),
    ):
        expect_disagreement(odd, call, *texts)
    assert_same_tree(other.contents(), before, "after the errors")


@distributed(2)
def test_values_that_rank_zero_gives_need_not_be_given_elsewhere(world_size: int, tmp_path: Path) -> None:
    side = make("element")
    side.save(tmp_path, 1, extra={"shared": 4} if dist.get_rank() == 0 else None)
    assert side.load(tmp_path).extra == {"shared": 4}
