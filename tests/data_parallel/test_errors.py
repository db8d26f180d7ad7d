"""Wrong use of ``ShardedDataParallel`` is an error on every rank, soon."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from onecopy import MixedPrecision, PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.data_parallel import bucket
from tests.support.data_parallel import (
    SMALL,
    Case,
    Checkpointed,
    Layers,
    as_if_large,
    inputs_of,
    layers_loss,
    scattered_run,
    side_of,
)
from tests.support.failures import (
    NO_MEMORY,
    check_pool,
    expect,
    expect_disagreement,
    expect_failure_of,
    expect_no_memory,
    failing,
    failure_of,
)
from tests.support.harness import distributed
from tests.support.models import assert_equal, assert_replicas_equal, values

Arguments = dict[str, Any]
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


# Construction


def zero(module: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=1e-2, **options)


def given(make: Callable[[Any], object] = zero, **changed: Any) -> Arguments:
    """Arguments with which construction works, but for the optimizer that ``make`` makes and what is changed."""
    module = Layers()
    return {"module": module, "optimizer": make(module), "bucket_bytes": SMALL, **changed}


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def stepped(module: nn.Module) -> object:
    optimizer = zero(module)
    module(inputs_of(0, 0)).sum().backward()
    optimizer.step()
    return optimizer


def wrapped(module: nn.Module) -> object:
    optimizer = zero(module)
    ShardedDataParallel(module, optimizer)
    return optimizer


def overlapping(module: nn.Module) -> object:
    return zero(module, overlap_with_ddp=True)


def in_two_groups(module: Any) -> object:
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    parts = (module.first, nn.ModuleList([module.middle, module.last]))
    return [zero(part, process_group=group) for part, group in zip(parts, groups, strict=True)]


def in_ddp() -> Arguments:
    arguments = given()
    return {**arguments, "module": DistributedDataParallel(arguments["module"])}


def using(uses: dict[str, list[str]]) -> Arguments:
    return given(overlap_forward=True, uses=uses)


BAD: dict[str, tuple[Callable[[], Arguments], type[Exception], str]] = {
    "no module": (lambda: given(module=3), TypeError, "module must be a torch.nn.Module, got int"),
    "in DDP": (in_ddp, TypeError, "wrapped in DistributedDataParallel already"),
    "stepped": (lambda: given(stepped), ValueError, "optimizer 0 has state already"),
    "wrapped": (lambda: given(wrapped), ValueError, "optimizer 0 already belongs"),
    "overlap_with_ddp": (lambda: given(overlapping), ValueError, "is for DDP"),
    "foreign": (lambda: given(lambda _: zero(Layers())), ValueError, "of optimizer 0 is not a parameter of the module"),
    "in two": (lambda: given(lambda it: [zero(it), zero(it)]), ValueError, "'first.weight' is in optimizers 0 and 1"),
    "in none": (lambda: given(lambda it: zero(it.first)), ValueError, "'middle.weight' .*is in no optimizer"),
    "no optimizer": (lambda: given(lambda _: []), ValueError, "needs at least one optimizer"),
    "plain": (lambda: given(lambda it: AdamW(it.parameters())), TypeError, "onecopy.ZeroRedundancyOptimizer.*AdamW"),
    "two groups": (lambda: given(in_two_groups), ValueError, "must be on one process group"),
    "bucket_bytes": (lambda: given(bucket_bytes=0), ValueError, "bucket_bytes must be a positive"),
    "bucket_bytes type": (lambda: given(bucket_bytes="8"), ValueError, "bucket_bytes must be a positive"),
    "type": (lambda: given(mixed_precision=BF16.param_dtype), TypeError, r"MixedPrecision\(param_dtype=torch.bfloat16"),
    "uses module": (lambda: using({"nope": []}), ValueError, "'nope' that the module does not have"),
    "uses name": (lambda: using({"last": ["nope"]}), ValueError, "neither a parameter nor a submodule"),
    "uses alone": (lambda: given(uses={"last": []}), ValueError, "means nothing without it"),
    "flat mesh": (lambda: given(mesh=mesh_of(dist.get_world_size())), ValueError, "two dimensions"),
    "mesh": (lambda: given(mesh=mesh_of(dist.get_world_size(), 1)), ValueError, "on the mesh's second dimension"),
}

# A rank whose optimizers are on another group than everyone else's agrees with that group; no other rank hears of it.
WHO = [(case, who) for case in BAD for who in ("all", "last") if (case, who) != ("two groups", "last")]


@pytest.mark.parametrize(("case", "who"), WHO)
@distributed(2)
def test_a_bad_argument_is_an_error_on_every_rank(world_size: int, case: str, who: str) -> None:
    make, error, text = BAD[case]
    arguments, fine = make(), given()  # both on all ranks: optimizers are constructed together
    culprits = list(range(world_size)) if who == "all" else [world_size - 1]
    if dist.get_rank() not in culprits:
        arguments = fine
    expect_failure_of(culprits, lambda: ShardedDataParallel(**arguments), error, text)
    side_of(True, Layers).iterate(0)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
def test_types_of_mixed_precision(name: str) -> None:
    for bad in (torch.int32, "bf16"):
        with pytest.raises(ValueError, match=f"{name} must be a floating-point type"):
            MixedPrecision(**{name: bad})  # type: ignore[arg-type]


DIFFERENT: dict[str, tuple[Arguments, Arguments, str, str]] = {
    "broadcast_buffers": ({}, {"broadcast_buffers": False}, "broadcast_buffers: True", "broadcast_buffers: False"),
    "bucket_bytes": ({}, {"bucket_bytes": SMALL + 1}, f"bucket_bytes: {SMALL}", f"bucket_bytes: {SMALL + 1}"),
    "overlap_forward": ({}, {"overlap_forward": True}, "overlap_forward: False", "overlap_forward: True"),
    "uses": (
        {"overlap_forward": True, "uses": {"last": ["first.weight"]}},
        {"uses": {"last": ["first"]}},
        r"uses: .*'first\.weight'",
        r"uses: .*'first'",
    ),
    "mixed_precision": (
        {},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16, cast_inputs=False)},
        "mixed_precision: .*reduce_dtype=None.*cast_inputs=True",
        "mixed_precision: .*reduce_dtype=torch.bfloat16.*cast_inputs=False",
    ),
}
"""Arguments of all ranks, other ones of one rank, and what the error says of both."""


@pytest.mark.parametrize("case", DIFFERENT)
@distributed(2, 3)
def test_different_arguments_are_an_error_on_every_rank(world_size: int, case: str) -> None:
    common, odd_arguments, text, odd_text = DIFFERENT[case]
    odd = world_size - 1
    arguments = {**given(), **common, **(odd_arguments if dist.get_rank() == odd else {})}
    expect_disagreement(odd, lambda: ShardedDataParallel(**arguments), text, odd_text)
    check_pool()


@distributed(2)
def test_a_mesh_on_one_rank_only_is_an_error(world_size: int) -> None:
    mesh = mesh_of(1, world_size)
    mine = {"mesh": mesh if dist.get_rank() == 1 else None}
    arguments = {**given(lambda module: zero(module, process_group=mesh.get_group(1))), **mine}
    expect_disagreement(1, lambda: ShardedDataParallel(**arguments), "mesh: None", r"mesh: \(1, 2\)")


@distributed(4)
def test_a_mistake_on_one_rank_is_told_to_all_replicas(world_size: int) -> None:
    mesh = mesh_of(2, 2)
    good = given(lambda module: zero(module, process_group=mesh.get_group(1)), mesh=mesh)
    mistakes: list[tuple[Arguments, type[Exception], str]] = [
        ({"mixed_precision": 3}, TypeError, "mixed_precision must be"),
        ({"optimizer": [good["optimizer"], 3]}, TypeError, "optimizer must"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be a positive"),
        ({"bucket_bytes": SMALL + 1}, RanksDisagreeError, f"bucket_bytes: {SMALL + 1}"),
        ({}, MemoryError, NO_MEMORY),
    ]
    for bad, own, text in mistakes:
        arguments = {**good, **(bad if dist.get_rank() == 3 else {})}
        with failing(bucket, "_flat_bucket", 3, calls=0 if own is MemoryError else 100):
            error = failure_of(lambda arguments=arguments: ShardedDataParallel(**arguments))  # type: ignore[misc]
        assert type(error) in ((own,) if dist.get_rank() == 3 else (own, PeerFailedError)), repr(error)
        assert text in str(error)
    ShardedDataParallel(**good)(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    good["optimizer"].step()
    assert_replicas_equal(good["module"].parameters())


@pytest.mark.parametrize("mixed", [None, BF16], ids=["float32", "mixed"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("wrapped", [False, True])
@distributed(2, 3)
def test_a_rank_without_memory_for_buckets_changes_nothing(
    world_size: int, mixed: MixedPrecision | None, calls: int, wrapped: bool
) -> None:
    """Two optimizers go on as if nothing had happened, or the module is wrapped after all."""
    made = []
    for fails in (True, False):
        torch.manual_seed(5)
        module = Layers()
        module.first.bias.requires_grad_(False)
        zeros = [zero(module.first), zero(nn.ModuleList([module.middle, module.last]))]
        arguments: Arguments = {"bucket_bytes": 1, "mixed_precision": mixed}
        before = values(module.parameters())
        if fails:
            with failing(bucket, "_flat_bucket", world_size - 1, calls):
                expect_no_memory(world_size - 1, lambda: ShardedDataParallel(module, zeros, **arguments))  # noqa: B023
        assert_equal(module.parameters(), before, "values")
        model = ShardedDataParallel(module, zeros, **arguments) if wrapped else module
        model(inputs_of(dist.get_rank() if wrapped else 0, 0)).square().mean().backward()
        for each in zeros:
            each.step()
        made.append(list(module.parameters()))
    assert_equal(made[0], made[1], "after a step")
    assert_replicas_equal(made[0])


@distributed(2, 3)
def test_a_parameter_that_is_frozen_on_one_rank_when_it_is_wrapped(world_size: int) -> None:
    """DDP refuses it too."""
    odd, arguments = world_size - 1, given()
    weight = arguments["module"].last.weight.requires_grad_(dist.get_rank() != odd)
    wrap = lambda: ShardedDataParallel(**arguments)  # noqa: E731
    text = "parameter 'last.weight'.*requires_grad="
    expect_disagreement(odd, wrap, text + "True", text + "False")
    weight.requires_grad_(False)
    wrap()


# After wrapping


@distributed(2)
def test_calls_that_are_refused_after_wrapping(world_size: int) -> None:
    ours = side_of(True, Layers)
    with pytest.raises(TypeError, match="takes the place of DDP"):
        DistributedDataParallel(ours.model)
    with pytest.raises(ValueError, match="assign=True"):
        ours.sharded.load_state_dict(ours.model.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="taken over"):
        ours.zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    ours.iterate(0)
    ours.optimizer.zero_grad()
    ours.model.double()
    expect(failure_of(ours.optimizer.step), RuntimeError, "was moved or converted")
    module = Checkpointed()
    module.reentrant = True
    ours = side_of(True, lambda: module)
    expect(failure_of(ours.loss(0).backward), RuntimeError, "use_reentrant=False")


class Words(nn.Module):
    """Sparse gradients on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.layers = Layers()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs + self.words(torch.arange(5)))
        return outputs


MISTAKES: dict[str, tuple[type[Exception], str]] = {
    "sparse": (ValueError, "'words.weight' has a sparse gradient"),
    "no gradient": (RuntimeError, "was not reduced: the last backward pass ran under"),
    "no_sync": (RuntimeError, "was not reduced: the last backward pass ran under"),
    "frozen": (RanksDisagreeError, "'layers.middle.weight' is frozen on some .*on this rank requires_grad="),
    "unfrozen": (RanksDisagreeError, "'layers.middle.weight' is frozen on some .*on this rank requires_grad="),
    "options": (RanksDisagreeError, "the ranks disagree in step.*(lr=0.001|different options)"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap_forward"])
@pytest.mark.parametrize("all_ranks", [True, False])
@distributed(2, 3, 4)
def test_a_mistake_in_training_is_told_to_all(world_size: int, mistake: str, overlap: bool, all_ranks: bool) -> None:
    """Four ranks are a mesh, and each half of it a replica. DDP trains what one rank has frozen, raises or hangs."""
    error, text = MISTAKES[mistake]
    mesh = mesh_of(2, 2) if world_size == 4 else None
    frozen = ("layers.middle.weight",) if mistake == "unfrozen" else ()
    ours = side_of(True, Words, group=mesh and mesh.get_group(1), frozen=frozen, mesh=mesh, overlap_forward=overlap)
    ours.iterate(0)
    ours.sharded.wait()
    assert isinstance(ours.module, Words)
    weight = ours.module.layers.middle.weight
    before = values([weight])
    everyone = mistake == "no_sync" or (all_ranks and error is not RanksDisagreeError)
    culprits = list(range(world_size)) if everyone else [world_size - 1]
    here = dist.get_rank() in culprits
    ours.optimizer.zero_grad()
    ours.module.words.sparse = mistake == "sparse" and here
    weight.requires_grad_(here if mistake == "unfrozen" else not (here and mistake == "frozen"))
    with ours.model.no_sync() if mistake == "no_sync" else contextlib.nullcontext():
        call: Callable[[], object] = ours.loss(1).backward
    if mistake in ("no gradient", "no_sync", "options"):
        call()
        call = ours.optimizer.step
    if here and mistake == "no gradient":
        ours.params[0].grad = torch.zeros_like(ours.params[0])
    if here and mistake == "options":
        ours.optimizer.param_groups[0]["lr"] = 1e-3
    if error is RanksDisagreeError:
        expect(failure_of(call), error, text + str(weight.requires_grad) * ("frozen" in mistake))
    elif mesh is not None:
        assert type(failure_of(call)) is (error if here else PeerFailedError)
    else:
        expect_failure_of(culprits, call, error, text)
        if call == ours.optimizer.step:
            expect_failure_of(culprits, lambda: ours.sharded.clip_grad_norm_(1.0), RuntimeError, "was not reduced")
    assert_equal([weight], before, "after the error")
    if mesh is None:
        ours.module.words.sparse = False
        weight.requires_grad_(not frozen)
        ours.optimizer.param_groups[0]["lr"] = 0.1
        ours.iterate(2)
        assert_replicas_equal(ours.params)


@pytest.mark.parametrize("level", [2, 3])
@distributed(2)
def test_a_backward_pass_that_only_one_rank_makes(world_size: int, level: int) -> None:
    """The others never come, so only the group's timeout ends it; the error says what may be the cause."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3))
    ours = side_of(True, Layers, group=group) if level == 3 else scattered_run(Case(), process_group=group)
    loss = ours.loss(0)
    dist.barrier()  # the ranks begin together: three seconds may be short for one that is late
    if dist.get_rank() == 0:
        text = r"rank 0: backward\(\) has waited for the other ranks in vain.*one of them does not make this call"
        with pytest.raises(PeerFailedError, match=text):
            loss.backward()
    dist.barrier()


def fail(*_: Any) -> None:
    raise LookupError("a step of the user's")


@pytest.mark.parametrize("parts", [1, 2], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@distributed(2, 3)
def test_an_inner_step_that_fails_on_one_rank(world_size: int, overlap: bool, parts: int) -> None:
    """With ``overlap_forward`` the others learn of it in their next forward pass."""
    module = Layers()
    held = [module] if parts == 1 else [module.first, nn.ModuleList([module.middle, module.last])]
    optimizers = [zero(part) for part in held]
    with as_if_large():
        model = ShardedDataParallel(module, optimizers, bucket_bytes=SMALL, overlap_forward=overlap)

    def until_it_fails() -> None:
        for step in range(3):
            if step == 1 and dist.get_rank() == 0:
                optimizers[0].optim.register_step_pre_hook(fail)
            layers_loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()

    if not overlap or parts == 2:
        expect_failure_of([0], until_it_fails, LookupError, "a step of the user's")
        return
    error = failure_of(until_it_fails)
    if dist.get_rank() == 0:
        expect(error, LookupError, "a step of the user's")
    else:
        expect(error, PeerFailedError, rf"rank {dist.get_rank()}: the previous step\(\) failed on global rank 0")
