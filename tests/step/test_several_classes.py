"""One optimizer with several classes trains as DDP with a plain optimizer of each class, and its state is theirs."""

from __future__ import annotations

import contextlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import onecopy
from onecopy import (
    CheckpointMismatchError,
    ShardedDataParallel,
    ZeroRedundancyOptimizer,
    checkpoint,
    join_state_dicts,
    split_state_dict,
)
from onecopy.checkpoint import manifest
from onecopy.checkpoint.convert import to_torch
from tests.support.data_parallel import TINY, Counting, as_if_large
from tests.support.failures import expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed, pools
from tests.support.models import assert_equal, assert_replicas_equal, assert_same_tree, values

STEPS = 7

# A model whose gradients are exact with any number of ranks, so that every order of summation gives the same.


class Model(nn.Module):
    """Matrices for Muon in two groups, others for AdamW, and parameters that are unused on all ranks or on one.

    Gradients are small integers times 12, also after the division by 2, 3 or 4 ranks. With ``bent``, they depend on the
    parameters, too: then they are equal with two ranks only.
    """

    def __init__(self, bent: bool) -> None:
        super().__init__()
        self.bent = bent
        values = torch.Generator().manual_seed(3)
        shapes = {
            "wide": (8, 160),  # element-wise, and cut
            "first": (160, 16),
            "second": (16, 16),
            "tall": (24, 16),
            "bias": (16,),
            "sometimes": (16, 4),
            "gain": (7,),
            "never": (5, 6),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(0.3 * torch.randn(shape, generator=values)))
            self.register_buffer(
                f"{name}_table", torch.randint(-4, 5, shape, generator=values).float(), persistent=False
            )

    def forward(self, scale: Tensor, branch: bool) -> Tensor:
        used = ["wide", "first", "second", "tall", "bias", "gain", *["sometimes"] * branch]
        parts = [(getattr(self, name) * getattr(self, f"{name}_table")).sum() for name in used]
        loss = scale * torch.stack(parts).sum()
        if self.bent:
            wide, first, second, bias = map(self.get_parameter, ("wide", "first", "second", "bias"))
            loss = loss + torch.tanh(wide @ first @ second + bias).square().mean()
        return loss


def loss_of(model: nn.Module, number: int) -> Tensor:
    rank, dtype = dist.get_rank(), next(model.parameters()).dtype
    loss: Tensor = model(torch.tensor(12.0 * (rank + number % 3 + 1), dtype=dtype), rank == 0 and number % 2 == 0)
    return loss


# The table, and one runner


@dataclass(frozen=True)
class Case:
    """How to train."""

    level: str = "level 1"  # or a hook, or level 3
    passes: int = 1  # backward passes in each step, all but the last under no_sync()
    max_norm: float = 0.0  # to which all gradients are clipped together
    masters: bool = False  # whether the model is in bf16, with master weights
    freezes: bool = False  # whether a matrix of Muon's is frozen half way
    joins: bool = False  # whether ranks have different numbers of inputs
    third: bool = False  # whether a third class, unknown to onecopy, has a group
    loop: str = ""  # with a closure, or a scaler
    options: tuple[tuple[str, Any], ...] = ()
    muon: type[Optimizer] = Muon
    tolerance: float = 0.0

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case(), name)]
        return ", ".join(changed) or "level 1"


LEVELS = ("level 1", "scatter", "hook_with_zero_step", "hook_with_zero_step_interleaved", "sharded", "overlap forward")
STACKED = 3e-3
"""Stacks of other matrices are rounded otherwise, in bf16: by 2^-8 of updates that are 0.02 times about 1, 7 times."""

CASES = (
    *(Case(level) for level in LEVELS),
    *(Case(level, passes=2, freezes=True) for level in LEVELS),
    *(Case(level, third=True) for level in LEVELS),
    *(Case(level, max_norm=5.0) for level in ("level 1", "scatter", "sharded")),
    *(Case(level, masters=True) for level in ("level 1", "scatter", "sharded")),
    *(Case(level, joins=True) for level in ("level 1", "scatter")),
    *(Case(level, muon=onecopy.optim.Muon, tolerance=STACKED) for level in ("level 1", "sharded")),
    *(Case(level, loop=loop) for level in ("level 1", "sharded") for loop in ("closure", "scaler")),
    Case(options=(("parameters_as_bucket_view", True),)),
    Case(options=(("shard_by", "parameter"), ("nonfinite", "raise"))),
)


class Side:
    """A model and its optimizers: ours, or plain ones, of which those in bf16 have fp32 copies of the parameters."""

    def __init__(self, case: Case, ours: bool, norms: list[Tensor]) -> None:
        self.case, self.ours, self.norms = case, ours, norms
        self.module = Model(bent=dist.get_world_size() == 2 and not case.joins)
        if case.masters:
            self.module.bfloat16()
        params = dict(self.module.named_parameters())
        self.copies = {name: param.detach().float() for name, param in params.items()} if case.masters else {}
        stepped = self.copies if case.masters and not ours else params
        classes: list[tuple[type[Optimizer], list[str], dict[str, Any]]] = [
            (case.muon, ["first", "second"], {"lr": 0.02, "momentum": 0.9}),
            (AdamW, ["wide", "gain"] if case.third else ["wide", "gain", "bias"], {}),
            (case.muon, ["tall", "sometimes"], {"lr": 0.01}),
            (AdamW, ["never"], {"weight_decay": 0.3}),
            *([(Counting, ["bias"], {"lr": 0.2})] if case.third else []),
        ]
        self.groups = [
            (each, {"params": [(name, stepped[name]) for name in names], **options}) for each, names, options in classes
        ]
        self.optimizers, self.model = self._ours() if ours else self._plain()
        self.schedulers = [StepLR(each, 2, 0.5) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=case.loop == "scaler")

    def _ours(self) -> tuple[list[Any], Any]:
        level, options = self.case.level, dict(self.case.options)
        given = [{**group, **({} if each is AdamW else {"optimizer_class": each})} for each, group in self.groups]
        overlaps = level.startswith("hook")
        zero = ZeroRedundancyOptimizer(
            given, AdamW, lr=1e-2, master_weights=self.case.masters, overlap_with_ddp=overlaps, **options
        )
        assert [group["optimizer_class"].rpartition(".")[2] for group in zero.param_groups][:2] == ["Muon", "AdamW"]
        if level in ("sharded", "overlap forward"):
            overlaps = level == "overlap forward"
            return [zero], ShardedDataParallel(self.module, zero, overlap_forward=overlaps, bucket_bytes=2000)
        ddp = DistributedDataParallel(self.module, find_unused_parameters=True, bucket_cap_mb=TINY)
        if level == "scatter":
            ddp.register_comm_hook(zero, onecopy.reduce_scatter_hook)
        elif overlaps:
            ddp.register_comm_hook(None, getattr(onecopy, level)(allreduce_hook, ddp, zero))
        return [zero], ddp

    def _plain(self) -> tuple[list[Any], Any]:
        members: dict[type[Optimizer], list[Any]] = {}
        for each, group in self.groups:
            members.setdefault(each, []).append(group)
        options: dict[type[Optimizer], dict[str, Any]] = {AdamW: {"lr": 1e-2}}
        made = [each(groups, **options.get(each, {})) for each, groups in members.items()]
        return made, DistributedDataParallel(self.module, find_unused_parameters=True, bucket_cap_mb=TINY)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def iterate(self, number: int) -> None:
        if number == 4 and self.case.freezes:
            self.module.get_parameter("second").requires_grad_(False)
        for optimizer in [*self.optimizers, self.module]:
            optimizer.zero_grad()
        if self.case.loop == "closure" and self.ours:
            evaluated = self.optimizers[0].step(lambda: self.backward(number))
            assert isinstance(evaluated, Tensor)
        else:
            self.backward(number)
            self.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def backward(self, number: int) -> Tensor:
        *accumulated, last = range(number * self.case.passes, (number + 1) * self.case.passes)
        with self.model.no_sync():
            for each in accumulated:
                loss_of(self.model, each).backward()
        loss = loss_of(self.model, last)
        self.scaler.scale(loss).backward()
        return loss

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        if self.case.max_norm:
            self.clip()
        for name, copy in self.copies.items() if not self.ours else ():
            gradient = self.module.get_parameter(name).grad
            copy.grad = None if gradient is None else gradient.float()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        for name, copy in self.copies.items() if not self.ours else ():
            self.module.get_parameter(name).data.copy_(copy)

    def clip(self) -> None:
        """Clip the gradients of all classes together; a norm that was added up in another order is the same norm."""
        if self.ours:
            self.norms.append(nn.utils.clip_grad_norm_(self.params, self.case.max_norm))
            return
        norm = nn.utils.get_total_norm([param.grad for param in self.params if param.grad is not None])
        assert norm > self.case.max_norm
        torch.testing.assert_close(self.norms[0], norm)
        nn.utils.clip_grads_with_norm_(self.params, self.case.max_norm, self.norms.pop(0))

    def train(self) -> list[list[Tensor]]:
        """Train; return the parameters after each step, or after the last one if ranks have different numbers."""
        seen = []
        steps = STEPS - 2 * dist.get_rank() if self.case.joins else STEPS
        members = [self.model, *self.optimizers] if self.ours else [self.model]
        with Join(members, model=self.model) if self.case.joins else contextlib.nullcontext():
            for number in range(steps):
                self.iterate(number)
                if self.ours:
                    self.optimizers[0].wait()
                seen.append(values(self.params))
        return [values(self.params)] if self.case.joins else seen


@pytest.mark.parametrize("case", CASES, ids=str)
@distributed(2, 3)
def test_training_equals_ddp_with_plain_optimizers(world_size: int, case: Case) -> None:
    norms: list[Tensor] = []
    with as_if_large() if case.level in ("sharded", "overlap forward") else contextlib.nullcontext():
        ours = Side(case, True, norms)
        found = ours.train()
    plain = Side(case, False, norms)
    expected = plain.train()
    for step, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert_equal(mine, theirs, f"step {step}", case.tolerance)
    assert not torch.equal(expected[-1][1], values(Model(False).parameters())[1]), "the reference does not train"
    assert_replicas_equal(ours.params)
    zero = ours.optimizers[0]
    owners = {spec.name: {shard.owner for shard in zero.layout.shards_of(spec.index)} for spec in zero.layout.params}
    assert all(len(owners[name]) == 1 for name in ("first", "second", "tall", "sometimes"))
    assert len(owners["wide"]) == (1 if ("shard_by", "parameter") in case.options else world_size)
    zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        state_dict = zero.state_dict()
        parts = split_state_dict(state_dict)
        assert_same_tree(join_state_dicts(parts, state_dict["param_groups"]), state_dict, "joined")
        for optimizer, part in zip(plain.optimizers, parts.values(), strict=True):
            masters = part.pop("master_weights", {})
            copies = [param for group in optimizer.param_groups for param in group["params"]] if plain.copies else []
            assert_equal(masters.values(), copies, "masters")
            if not case.joins:
                assert_same_tree(part, optimizer.state_dict(), "state dict", case.tolerance)


# Calls

OTHERS = {"wide": (40, 60), "bias": (9,)}


class Matrices(nn.Module):
    """Three matrices, and two other parameters."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {**{f"matrix{number}": (12, 8 + number) for number in range(3)}, **OTHERS}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def named(self, *names: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, self.get_parameter(name)) for name in names]


def two_classes(muon: Any = Muon, module: Matrices | None = None, **options: Any) -> ZeroRedundancyOptimizer:
    module = Matrices() if module is None else module
    name = muon if isinstance(muon, str) else {Muon: "Muon"}.get(muon, f"onecopy.optim.{muon.__name__}")
    groups: list[dict[str, Any]] = [
        {"params": module.named("matrix0", "matrix1"), "optimizer_class": muon, "lr": 0.02},
        {"params": module.named(*OTHERS)},
        {"params": module.named("matrix2"), "optimizer_class": name, "momentum": 0.5},
    ]
    return ZeroRedundancyOptimizer(groups, AdamW, lr=1e-2, **options)


def two_plain(module: Matrices) -> list[Optimizer]:
    first, last = ({"params": module.named("matrix0", "matrix1"), "lr": 0.02}, {"params": module.named("matrix2")})
    return [Muon([first, {**last, "momentum": 0.5}]), AdamW(module.named(*OTHERS), lr=1e-2)]


def step(module: Matrices, *optimizers: Optimizer, seed: int = 0) -> None:
    for place, param in enumerate(module.parameters()):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * seed + place))
    for optimizer in optimizers:
        optimizer.step()


@distributed(2)
def test_calls_with_several_classes(world_size: int) -> None:
    module = Matrices()
    optimizer = two_classes(module=module)
    calls: list[Optimizer] = []
    handle = register_optimizer_step_pre_hook(lambda each, *_: calls.append(each))
    step(module, optimizer)
    handle.remove()
    assert calls == [optimizer], "torch's global hooks run once, for the sharded optimizer"
    before = values(module.parameters())
    with pytest.raises(TypeError, match=r"step\(\) takes no grad_scaler with several optimizer classes"):
        optimizer.step(grad_scaler=1)
    with pytest.raises(ValueError, match="`cycle_momentum` option enabled"):
        OneCycleLR(optimizer, 0.1, 10)
    OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False)
    report = optimizer.memory_report()
    assert report.ddp["state"] == 4 * (12 * (8 + 9 + 10) + 2 * (40 * 60 + 9))
    with pytest.raises(TypeError, match="state under 'count', which is no parameter"):
        optimizer.state["count"] = 1
    optimizer.param_groups[1]["optimizer_class"] = "torch.optim.Muon"
    with pytest.raises(RuntimeError, match=r"of parameter group 1 \(with 'wide'\) was changed by hand"):
        optimizer.step()
    assert_equal(module.parameters(), before, "after refusals")


@distributed(2)
def test_groups_that_are_added_and_modes(world_size: int) -> None:
    module, plain_module = Matrices(), Matrices()
    alone = ZeroRedundancyOptimizer(module.named("wide"), AdamW, lr=1e-2)
    assert "optimizer_class" not in alone.param_groups[0]
    plain: list[Optimizer] = [AdamW(plain_module.named("wide"), lr=1e-2)]
    assert type(alone.optim) is AdamW
    added: list[tuple[Any, str, dict[str, Any]]] = [
        (Muon, "matrix0", {"momentum": 0.5}),
        (SGD, "bias", {"momentum": 0.9}),
        (AdamW, "matrix1", {"weight_decay": 0.3}),
    ]
    for each, name, options in added:
        step(module, alone, seed=len(plain))
        step(plain_module, *plain, seed=len(plain))
        group = {"params": module.named(name), **options}
        alone.add_param_group({**group, **({} if each is AdamW else {"optimizer_class": each})})
        if each is AdamW:
            plain[0].add_param_group({"params": plain_module.named(name), "lr": 1e-2, **options})
        else:
            plain.append(each(plain_module.named(name), **options))
    step(module, alone)
    step(plain_module, *plain)
    assert_equal(module.parameters(), plain_module.parameters(), "after groups were added")
    state_dict = state_on_rank_0(alone)
    for part, optimizer in zip(split_state_dict(state_dict).values() if state_dict else (), plain, strict=False):
        assert_same_tree(part, optimizer.state_dict(), "after groups were added")
    same = ZeroRedundancyOptimizer(module.named("wide"), AdamW)
    same.add_param_group({"params": module.named("bias"), "optimizer_class": AdamW})
    same.load_state_dict(same.state_dict())
    assert [group["optimizer_class"] for group in same.param_groups] == 2 * ["torch.optim.AdamW"]
    named = ZeroRedundancyOptimizer([{"params": module.named("matrix2"), "optimizer_class": "Muon"}], AdamW, lr=0.5)
    assert type(named.optim) is Muon
    assert named.param_groups[0]["lr"] == named.optim.defaults["lr"] != 0.5
    muon = {"params": module.named("matrix1"), "optimizer_class": Muon}
    modes = ZeroRedundancyOptimizer([muon, {"params": module.named("bias")}], AdamWScheduleFree)
    assert [hasattr(each, "eval") for each in (alone, named, modes)] == [False, False, True]
    modes.eval()
    with pytest.raises(Exception, match="train mode"):
        modes.step()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a vector for Muon": ({"names": ["bias"]}, ValueError, r"parameter 'bias' of group \d has shape \(9,\), and Muon"),
    "an option of another class": ({"betas": (0.8, 0.9)}, ValueError, "has betas=.*torch.optim.Muon, has no option"),
    "an instance": ({"optimizer_class": "instance"}, TypeError, "must be a class, got an instance of Muon"),
    "None": (
        {"optimizer_class": None},
        TypeError,
        "must be a subclass of torch.optim.Optimizer, got an instance of No",
    ),
    "an unknown name": ({"optimizer_class": "Moun"}, ValueError, "'Moun' is not known"),
    "a name elsewhere": ({"optimizer_class": "os.path.Muon"}, ValueError, "'os.path.Muon' is not known"),
    "the base class": ({"optimizer_class": "torch.optim.Optimizer"}, TypeError, "must be the class to shard"),
    "a class that is refused": ({"optimizer_class": torch.optim.LBFGS}, ValueError, "cannot be sharded exactly"),
    "our class": ({"optimizer_class": ZeroRedundancyOptimizer}, TypeError, "must be the class to shard"),
}


@pytest.mark.parametrize("kind", BAD)
@distributed(2)
def test_bad_groups_are_refused_on_every_rank(world_size: int, kind: str) -> None:
    """In the constructor and in ``add_param_group``, on all ranks or on one; an optimizer goes on as it was."""
    changes, error, text = BAD[kind]
    module = Matrices()

    def group(good: bool = False) -> dict[str, Any]:
        changed = {} if good else dict(changes)
        given = {"params": module.named(*changed.pop("names", ["matrix2"])), "optimizer_class": Muon, **changed}
        if given["optimizer_class"] == "instance":
            given["optimizer_class"] = Muon([torch.ones(2, 2)])
        return given

    if "of group" not in text:
        text = rf"parameter group 1 \(with 'matrix2'\).*{text}"
    first = {"params": module.named("wide")}
    expect(failure_of(lambda: ZeroRedundancyOptimizer([first, group()], AdamW)), error, text)
    good = dist.get_rank() == 0
    expect_failure_of([1], lambda: ZeroRedundancyOptimizer([first, group(good)], AdamW), error, text)
    optimizer = ZeroRedundancyOptimizer([first], AdamW)
    step(module, optimizer)
    before, inner = repr(optimizer), optimizer.optim
    expect_failure_of([1], lambda: optimizer.add_param_group(group(good)), error, text)
    assert repr(optimizer) == before
    assert optimizer.optim is inner
    step(module, optimizer)
    optimizer.add_param_group(group(good=True))
    step(module, optimizer)
    optimizer.add_param_group({"params": module.named("bias")})
    assert optimizer.param_groups[2]["optimizer_class"] == "torch.optim.AdamW"


@distributed(2, 3)
def test_what_else_is_refused(world_size: int) -> None:
    odd = world_size - 1
    with pytest.raises(ValueError, match=r"group 0 \(with 'matrix0'\) is not known to work element by element"):
        two_classes(shard_by="element")
    groups: list[dict[str, Any]] = [{"params": Matrices().named("matrix0"), "optimizer_class": "Muon"}]
    with pytest.raises(ValueError, match=r"'Muon' may be onecopy.optim.Muon or torch.optim.Muon"):
        ZeroRedundancyOptimizer(groups, onecopy.optim.Muon)
    groups[0]["optimizer_class"] = Muon if dist.get_rank() < odd else Adam
    expect_disagreement(
        odd,
        lambda: ZeroRedundancyOptimizer([*groups, {"params": Matrices().named("wide")}], AdamW),
        r"optimizer_class of parameter group 0 \(with 'matrix0'\): torch.optim.Muon",
        r"optimizer_class of parameter group 0 \(with 'matrix0'\): torch.optim.Adam",
    )
    with pytest.raises(ValueError, match="parameter group 0 has no 'optimizer_class'"):
        split_state_dict(AdamW([torch.ones(2)]).state_dict())
    with pytest.raises(ValueError, match="groups of classes"):
        join_state_dicts({Muon: {"state": {}, "param_groups": [{"params": [0]}]}}, [{"optimizer_class": "AdamW"}])


# State dicts and checkpoints


@distributed(2)
def test_state_dicts_of_plain_optimizers_and_back(world_size: int) -> None:
    module, other = Matrices(), Matrices()
    optimizer, plain = two_classes(module=module), two_plain(other)
    step(other, *plain, seed=5)
    joined = join_state_dicts({Muon: plain[0].state_dict(), "AdamW": plain[1].state_dict()}, optimizer.param_groups)
    json.dumps(joined["param_groups"])
    file = io.BytesIO()
    torch.save(joined, file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    batched = two_classes(onecopy.optim.Muon)
    batched.load_state_dict(joined)
    assert batched.param_groups[0]["optimizer_class"] == "onecopy.optim.Muon"
    optimizer.consolidate_state_dict()
    batched.consolidate_state_dict()
    if dist.get_rank() == 0:
        state_dict = optimizer.state_dict()
        assert_same_tree(state_dict, joined, "loaded")
        assert_same_tree(join_state_dicts(split_state_dict(state_dict), joined["param_groups"]), joined, "inverse")
        for part, each in zip(split_state_dict(state_dict).values(), plain, strict=True):
            assert_same_tree(part, each.state_dict(), "part")
        plain[0].load_state_dict(split_state_dict(batched.state_dict())["onecopy.optim.Muon"])
    unordered = join_state_dicts({Muon: plain[0].state_dict(), AdamW: plain[1].state_dict()})
    for groups, text in (
        (unordered["param_groups"], "parameter group 1 (with 'wide') is of class 'torch.optim.Muon'"),
        ([{**group, "optimizer_class": "os.Evil"} for group in joined["param_groups"]], "of class 'os.Evil'"),
        ([{**group, "optimizer_class": 7} for group in joined["param_groups"]], "of class 7"),
        ([{"params": group["params"]} for group in joined["param_groups"]], "it has no 'optimizer_class'"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            optimizer.load_state_dict({**joined, "param_groups": groups})


def state_on_rank_0(optimizer: ZeroRedundancyOptimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict()
    return optimizer.state_dict() if dist.get_rank() == 0 else {}


def save_in_a_pool(root: Path) -> None:
    module = Matrices()
    optimizer = two_classes(module=module)
    for seed in range(2):
        step(module, optimizer, seed=seed)
    checkpoint.save(root, model=module, optimizer=optimizer, step=2)


def load_in_a_pool(root: Path, way: str) -> None:
    """Load into other parameters, and go on as plain optimizers that never stopped."""
    plain_module, module = Matrices(), Matrices()
    plain = two_plain(plain_module)
    for seed in range(2):
        step(plain_module, *plain, seed=seed)
    for param in module.parameters():
        nn.init.zeros_(param)
    optimizer = two_classes(module=module)
    if way == "wrapped":
        ShardedDataParallel(module, optimizer, bucket_bytes=1000)
    if way == "dcp":
        step(module, optimizer, seed=7)
        source = two_classes(module=plain_module)
        checkpoint.load(root, optimizer=source, model=plain_module)
        dcp_save({"optimizer": checkpoint.get_optimizer_state_dict(plain_module, source)}, checkpoint_id=root / "dcp")
        target = {"optimizer": checkpoint.get_optimizer_state_dict(module, optimizer)}
        dcp_load(target, checkpoint_id=root / "dcp")
        checkpoint.set_optimizer_state_dict(module, optimizer, target["optimizer"])
        module.load_state_dict(plain_module.state_dict())
    else:
        checkpoint.load(root, model=module, optimizer=optimizer)
    state_dict = state_on_rank_0(optimizer)
    if state_dict:
        for part, each in zip(split_state_dict(state_dict).values(), plain, strict=True):
            assert_same_tree(part, each.state_dict(), way)
    if way == "plain":  # one rank: into plain optimizers, a step there, and back
        for part, each in zip(split_state_dict(state_dict).values(), plain, strict=True):
            each.load_state_dict(part)
        plain_module.load_state_dict(module.state_dict())
        step(plain_module, *plain, seed=2)
        parts = {Muon: plain[0].state_dict(), AdamW: plain[1].state_dict()}
        optimizer.load_state_dict(join_state_dicts(parts, optimizer.param_groups))
        module.load_state_dict(plain_module.state_dict())
        checkpoint.save(root / "back", model=module, optimizer=optimizer, step=3)
        return
    if way != "wrapped":
        step(module, optimizer, seed=2)
        step(plain_module, *plain, seed=2)
    assert_equal(module.parameters(), plain_module.parameters(), way)


def load_what_came_back(root: Path) -> None:
    module, plain_module = Matrices(), Matrices()
    optimizer, plain = two_classes(module=module), two_plain(plain_module)
    for seed in range(3):
        step(plain_module, *plain, seed=seed)
    checkpoint.load(root / "back", model=module, optimizer=optimizer)
    assert_equal(module.parameters(), plain_module.parameters(), "back")
    state_dict = state_on_rank_0(optimizer)
    if state_dict:
        for part, each in zip(split_state_dict(state_dict).values(), plain, strict=True):
            assert_same_tree(part, each.state_dict(), "back")
    swapped = [
        {"params": module.named("matrix0", "matrix1")},
        {"params": module.named(*OTHERS)},
        {"params": module.named("matrix2"), "optimizer_class": Muon},
    ]
    with pytest.raises(CheckpointMismatchError, match=r"group 0 \(with 'matrix0'\) is of class 'torch.optim.Muon'"):
        checkpoint.load(root / "back", model=module, optimizer=ZeroRedundancyOptimizer(swapped, AdamW))
    with pytest.raises(CheckpointMismatchError, match=r"but the checkpoint has a AdamW \+ Muon"):
        checkpoint.load(root / "back", model=module, optimizer=ZeroRedundancyOptimizer(module.parameters(), AdamW))
    dist.barrier()
    newest = checkpoint.latest(root / "back")
    assert newest is not None
    file = newest / manifest.NAME
    if dist.get_rank() == 0:
        found = manifest.parse(file.read_bytes(), "the manifest")
        for pair in found.optimizers[0].groups[0].options[1]:
            pair[1] = "os.Evil" if pair[0] == "optimizer_class" else pair[1]
        file.write_bytes(manifest.dump(found))
    dist.barrier()
    with pytest.raises(CheckpointMismatchError, match=r"group 0 \(with 'matrix0'\) is of class 'os.Evil'"):
        checkpoint.load(root / "back", model=module, optimizer=optimizer)


def test_saved_by_3_ranks_loaded_by_2_and_by_plain_optimizers_and_back(tmp_path: Path) -> None:
    root = tmp_path / "run"
    pools.run(3, __name__, "save_in_a_pool", {"root": root})
    for ranks, way in ((2, "as it was"), (3, "wrapped"), (2, "dcp"), (1, "plain")):
        pools.run(ranks, __name__, "load_in_a_pool", {"root": root, "way": way})
    pools.run(2, __name__, "load_what_came_back", {"root": root})
    to_torch(root, tmp_path / "file.pt")
    content = torch.load(tmp_path / "file.pt", weights_only=True)
    for part, each in zip(split_state_dict(content["optimizer"]).values(), two_plain(Matrices()), strict=True):
        each.load_state_dict(part)
        assert each.state_dict()["state"].keys() == part["state"].keys()
