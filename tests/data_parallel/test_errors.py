"""Wrong use of ``ShardedDataParallel`` is an error on every rank, soon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from onecopy import MixedPrecision, PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.data_parallel import bucket
from tests.support.data_parallel import SMALL, Layers, Side, as_if_large, inputs_of, one_step
from tests.support.data_parallel import Checkpointed, loss_of
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


def zero(module: nn.Module, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=1e-2, **options)


def good() -> Arguments:
    module = Layers()
    return {"module": module, "optimizer": zero(module), "bucket_bytes": SMALL}


def changed(**values: Any) -> Callable[[], Arguments]:
    return lambda: {**good(), **values}


def stepped() -> Arguments:
    arguments = good()
    arguments["module"](inputs_of(0, 0)).sum().backward()
    arguments["optimizer"].step()
    return arguments


def wrapped() -> Arguments:
    arguments = good()
    ShardedDataParallel(**arguments)
    return arguments


def overlapping() -> Arguments:
    module = Layers()
    return {"module": module, "optimizer": zero(module, overlap_with_ddp=True)}


def foreign() -> Arguments:
    return {**good(), "module": Layers()}


def twice() -> Arguments:
    module = Layers()
    return {"module": module, "optimizer": [zero(module), zero(module)]}


def missing() -> Arguments:
    module = Layers()
    return {"module": module, "optimizer": zero(module.first)}


def plain() -> Arguments:
    module = Layers()
    return {"module": module, "optimizer": AdamW(module.parameters())}


def other_group() -> Arguments:
    module = Layers()
    groups = [dist.new_group(list(range(dist.get_world_size()))) for _ in range(2)]
    parts = (module.first, nn.ModuleList([module.middle, module.last]))
    optimizers = [zero(part, process_group=group) for part, group in zip(parts, groups, strict=True)]
    return {"module": module, "optimizer": optimizers}


def in_ddp() -> Arguments:
    module = Layers()
    return {"module": DistributedDataParallel(module), "optimizer": zero(module)}


def one_dimension() -> Arguments:
    return {**good(), "mesh": init_device_mesh("cpu", (dist.get_world_size(),))}


def other_mesh() -> Arguments:
    return {**good(), "mesh": init_device_mesh("cpu", (dist.get_world_size(), 1))}


@dataclass(frozen=True)
class Bad:
    make: Callable[[], Arguments]
    error: type[Exception]
    text: str


OVERLAP = {"overlap_forward": True}

BAD = {
    "no module": Bad(changed(module=3), TypeError, "module must be a torch.nn.Module, got int"),
    "in DDP": Bad(in_ddp, TypeError, "wrapped in DistributedDataParallel already"),
    "stepped": Bad(stepped, ValueError, "optimizer 0 has state already"),
    "wrapped": Bad(wrapped, ValueError, "optimizer 0 already belongs"),
    "overlap_with_ddp": Bad(overlapping, ValueError, "overlap_with_ddp=True is for DDP"),
    "foreign": Bad(foreign, ValueError, "of optimizer 0 is not a parameter of the module"),
    "in two": Bad(twice, ValueError, "'first.weight' is in optimizers 0 and 1"),
    "in none": Bad(missing, ValueError, "'middle.weight' of the module needs a gradient but is in no optimizer"),
    "bucket_bytes": Bad(changed(bucket_bytes=0), ValueError, "bucket_bytes must be a positive"),
    "bucket_bytes type": Bad(changed(bucket_bytes="8"), ValueError, "bucket_bytes must be a positive"),
    "mixed_precision type": Bad(
        changed(mixed_precision=torch.bfloat16), TypeError, r"MixedPrecision\(param_dtype=torch.bfloat16\)"
    ),
    "uses module": Bad(changed(**OVERLAP, uses={"nope": []}), ValueError, "'nope' that the module does not have"),
    "uses name": Bad(changed(**OVERLAP, uses={"last": ["nope"]}), ValueError, "neither a parameter nor a submodule"),
    "no optimizer": Bad(changed(optimizer=[]), ValueError, "needs at least one optimizer"),
    "plain optimizer": Bad(plain, TypeError, "must be a onecopy.ZeroRedundancyOptimizer.*AdamW"),
    "other group": Bad(other_group, ValueError, "must be on one process group"),
    "mesh of one dimension": Bad(one_dimension, ValueError, "two dimensions"),
    "mesh of others": Bad(other_mesh, ValueError, "must be on the mesh's second dimension"),
}


@distributed(2)
def test_ddp_around_it_is_refused(world_size: int) -> None:
    sharded = ShardedDataParallel(**good())
    with pytest.raises(TypeError, match="takes the place of DDP"):
        DistributedDataParallel(sharded)


# A rank whose optimizers are on another group than everyone else's agrees with that group; no other rank hears of it.
WHO = [(case, who) for case in BAD for who in ("all", "last") if (case, who) != ("other group", "last")]


@pytest.mark.parametrize(("case", "who"), WHO)
@distributed(2)
def test_a_bad_argument_is_an_error_on_every_rank(world_size: int, case: str, who: str) -> None:
    arguments, fine = BAD[case].make(), good()  # both on all ranks: optimizers are constructed together
    culprits = list(range(world_size)) if who == "all" else [world_size - 1]
    if dist.get_rank() not in culprits:
        arguments = fine
    expect_failure_of(culprits, lambda: ShardedDataParallel(**arguments), BAD[case].error, BAD[case].text)
    one_step(Side(True, Layers), 0)


DIFFERENT: dict[str, tuple[Arguments, Arguments, str, str]] = {
    "broadcast_buffers": ({}, {"broadcast_buffers": False}, "broadcast_buffers: True", "broadcast_buffers: False"),
    "bucket_bytes": ({}, {"bucket_bytes": SMALL + 1}, f"bucket_bytes: {SMALL}", f"bucket_bytes: {SMALL + 1}"),
    "overlap_forward": ({}, OVERLAP, "overlap_forward: False", "overlap_forward: True"),
    "uses": (
        {**OVERLAP, "uses": {"last": ["first.weight"]}},
        {"uses": {"last": ["first"]}},
        r"uses: .*'first\.weight'",
        r"uses: .*'first'",
    ),
    "reduce_dtype": (
        {},
        {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
        "mixed_precision: .*reduce_dtype=None",
        "mixed_precision: .*reduce_dtype=torch.bfloat16",
    ),
    "cast_inputs": (
        {},
        {"mixed_precision": MixedPrecision(cast_inputs=False)},
        "mixed_precision: .*cast_inputs=True",
        "mixed_precision: .*cast_inputs=False",
    ),
}
"""Arguments of all ranks, other ones of one rank, and what the error says of both."""


@pytest.mark.parametrize("case", DIFFERENT)
@distributed(2, 3)
def test_different_arguments_are_an_error_on_every_rank(world_size: int, case: str) -> None:
    common, odd_arguments, text, odd_text = DIFFERENT[case]
    odd = world_size - 1
    arguments = {**good(), **common, **(odd_arguments if dist.get_rank() == odd else {})}
    expect_disagreement(odd, lambda: ShardedDataParallel(**arguments), text, odd_text)
    check_pool()


@distributed(2)
def test_a_mesh_on_one_rank_only_is_an_error(world_size: int) -> None:
    module, mesh = Layers(), init_device_mesh("cpu", (1, world_size))
    optimizer = zero(module, process_group=mesh.get_group(1))
    mine = mesh if dist.get_rank() == 1 else None
    expect_disagreement(1, lambda: ShardedDataParallel(module, optimizer, mesh=mine), "mesh: None", r"mesh: \(1, 2\)")


def on_mesh() -> tuple[DeviceMesh, Arguments]:
    module, mesh = Layers(), init_device_mesh("cpu", (2, 2))
    return mesh, {"module": module, "optimizer": zero(module, process_group=mesh.get_group(1)), "mesh": mesh}


def train_once(arguments: Arguments) -> None:
    ShardedDataParallel(**arguments)(inputs_of(dist.get_rank(), 0)).square().mean().backward()
    arguments["optimizer"].step()
    assert_replicas_equal(list(arguments["module"].parameters()))


@distributed(4)
def test_a_mistake_on_one_rank_is_told_to_all_replicas(world_size: int) -> None:
    _, arguments = on_mesh()
    for bad, own, text in (
        ({"mixed_precision": 3}, TypeError, "mixed_precision must be"),
        ({"optimizer": [arguments["optimizer"], 3]}, TypeError, "optimizer must"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes must be a positive"),
        ({"bucket_bytes": SMALL}, RanksDisagreeError, f"bucket_bytes: {SMALL}"),
    ):
        mine = {**arguments, **(bad if dist.get_rank() == 3 else {})}
        error = failure_of(lambda mine=mine: ShardedDataParallel(**mine))  # type: ignore[misc]
        assert type(error) in ((own,) if dist.get_rank() == 3 else (own, PeerFailedError)), repr(error)
        assert text in str(error)
    train_once(arguments)


@distributed(4)
def test_a_rank_without_memory_is_told_to_all_replicas(world_size: int) -> None:
    _, arguments = on_mesh()
    with failing(bucket, "_flat_bucket", 2):
        error = failure_of(lambda: ShardedDataParallel(**arguments))
    expect(error, MemoryError if dist.get_rank() == 2 else PeerFailedError, NO_MEMORY)
    train_once(arguments)


class Made:
    """A module with a frozen parameter, and two optimizers over the rest."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.module = Layers()
        self.module.first.bias.requires_grad_(False)
        self.params = list(self.module.parameters())
        parts = [[each for each in self.params if each.requires_grad][part::2] for part in range(2)]
        self.zeros = [ZeroRedundancyOptimizer(part, torch.optim.Adam, lr=0.1) for part in parts]

    def wrap(self, mixed: MixedPrecision | None) -> ShardedDataParallel:
        return ShardedDataParallel(self.module, self.zeros, bucket_bytes=1, mixed_precision=mixed)

    def train(self, mixed: MixedPrecision | None, wrapped: bool) -> None:
        """Steps with equal gradients on all ranks, or one with the wrapper."""
        if wrapped:
            self.wrap(mixed)(inputs_of(dist.get_rank(), 0)).square().mean().backward()
        for zero in self.zeros:
            for param in [] if wrapped else zero.param_groups[0]["params"]:
                param.grad = torch.ones_like(param)
            zero.step()


@pytest.mark.parametrize("mixed", [None, MixedPrecision(param_dtype=torch.bfloat16)], ids=["float32", "mixed"])
@pytest.mark.parametrize("calls", [0, 1, 3])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("wrapped", [False, True])
@distributed(2, 3)
def test_a_rank_without_memory_for_buckets_changes_nothing(
    world_size: int, mixed: MixedPrecision | None, calls: int, culprit: int, wrapped: bool
) -> None:
    """The optimizers go on as if nothing had happened, or the module is wrapped after all."""
    made, reference = Made(), Made()
    before = values(made.params)
    with failing(bucket, "_flat_bucket", culprit, calls):
        expect_no_memory(culprit, lambda: made.wrap(mixed))
    assert_equal(made.params, before, "values")
    assert {param.dtype for param in made.params} == {torch.float32}
    assert all(zero.wait_for_transfers is None for zero in made.zeros)
    for each in (made, reference):
        each.train(mixed, wrapped)
    assert_equal(made.params, reference.params, "after a step")
    assert_replicas_equal(made.params)


# After wrapping


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
def test_types_of_mixed_precision(name: str) -> None:
    for bad in (torch.int32, "bf16"):
        with pytest.raises(ValueError, match=f"{name} must be a floating-point type"):
            MixedPrecision(**{name: bad})  # type: ignore[arg-type]


@distributed(2)
def test_calls_that_are_refused_after_wrapping(world_size: int) -> None:
    ours = Side(True, Layers)
    with pytest.raises(ValueError, match="assign=True"):
        ours.sharded.load_state_dict(ours.model.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="taken over"):
        ours.zero.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    one_step(ours, 0)
    ours.optimizer.zero_grad()
    ours.model.double()
    expect(failure_of(ours.optimizer.step), RuntimeError, "was moved or converted")


@pytest.mark.parametrize("all_ranks", [True, False])
@distributed(2, 3)
def test_a_step_on_gradients_that_were_not_reduced(world_size: int, all_ranks: bool) -> None:
    ours = Side(True, Layers)
    if all_ranks:
        with ours.model.no_sync():
            loss_of(ours, 0).backward()
    else:
        loss_of(ours, 0).backward()
        if dist.get_rank() == 0:
            ours.params[0].grad = torch.zeros_like(ours.params[0])
    culprits = list(range(world_size)) if all_ranks else [0]
    expect_failure_of(culprits, ours.optimizer.step, RuntimeError, "was not reduced: the last backward pass ran under")
    expect_failure_of(culprits, lambda: ours.sharded.clip_grad_norm_(1.0), RuntimeError, "was not reduced")
    one_step_after_zero(ours)


def one_step_after_zero(ours: Side) -> None:
    ours.optimizer.zero_grad()
    one_step(ours, 1)
    assert_replicas_equal(ours.params)


class Words(nn.Module):
    """Sparse gradients on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.layers = Layers()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs + self.words(torch.arange(5)))
        return outputs


@pytest.mark.parametrize("all_ranks", [True, False])
@distributed(2, 3)
def test_sparse_gradients(world_size: int, all_ranks: bool) -> None:
    ours = Side(True, Words)
    culprits = list(range(world_size)) if all_ranks else [world_size - 1]
    assert isinstance(ours.module, Words)
    ours.module.words.sparse = dist.get_rank() in culprits
    loss = loss_of(ours, 0)
    expect_failure_of(culprits, loss.backward, ValueError, "'words.weight' has a sparse gradient")
    ours.module.words.sparse = False
    one_step_after_zero(ours)


@distributed(2, 3)
def test_a_parameter_that_is_frozen_on_one_rank_when_it_is_wrapped(world_size: int) -> None:
    """DDP refuses it too."""
    odd = world_size - 1
    module = nn.Sequential(Layers(), nn.Embedding(4096, 64))
    optimizer = zero(module)
    module[1].weight.requires_grad_(dist.get_rank() != odd)
    wrap = lambda: ShardedDataParallel(module, optimizer)  # noqa: E731
    expect_disagreement(odd, wrap, "parameter '1.weight'.*requires_grad=True", "parameter '1.weight'.*grad=False")
    module[1].weight.requires_grad_(False)
    wrap()


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "unfrozen"])
@pytest.mark.parametrize("when_wrapped", [(), ("middle.weight",)], ids=["", "frozen when it was wrapped"])
@distributed(2, 3)
def test_a_parameter_that_one_rank_freezes_later(world_size: int, freeze: bool, when_wrapped: Sequence[str]) -> None:
    """DDP raises or hangs, and with ``find_unused_parameters=True`` trains it from the other ranks' gradients."""
    ours = Side(True, Layers, frozen=when_wrapped)
    weight = ours.module.get_parameter("middle.weight")
    weight.requires_grad_(freeze)
    one_step(ours, 0)
    if dist.get_rank() == world_size - 1:
        weight.requires_grad_(not freeze)
    before = values([weight])
    loss = loss_of(ours, 1)
    here = weight.requires_grad
    text = (
        rf"rank {dist.get_rank()}: parameter 'middle.weight' is frozen on some.*\(on this rank requires_grad={here}\)"
    )
    expect(failure_of(loss.backward), RanksDisagreeError, text)
    assert_equal([weight], before, "the parameter")
    weight.requires_grad_(False)
    one_step_after_zero(ours)
    assert_equal([weight], before, "the parameter")


@pytest.mark.parametrize("mistake", ["frozen", "sparse", "not reduced", "not reduced, overlap_forward"])
@distributed(4)
def test_a_mistake_in_one_part_of_a_mesh_is_told_to_all(world_size: int, mistake: str) -> None:
    mesh, rank = init_device_mesh("cpu", (2, 2)), dist.get_rank()
    ours = Side(True, Words, group=mesh.get_group(1), mesh=mesh, overlap_forward="overlap" in mistake)
    assert isinstance(ours.module, Words)
    ours.module.layers.middle.weight.requires_grad_(mistake != "frozen" or rank >= 2)
    ours.module.words.sparse = mistake == "sparse" and rank == 3
    call: Callable[[], object] = loss_of(ours, 0).backward
    if mistake.startswith("not reduced"):
        call()
        call = ours.optimizer.step
        if rank == 3:
            ours.params[0].grad = torch.zeros_like(ours.params[0])
    error = failure_of(call)
    if mistake == "frozen":
        expect(error, RanksDisagreeError, "'layers.middle.weight' is frozen on some ranks")
    else:
        own = ValueError if mistake == "sparse" else RuntimeError
        assert type(error) is (own if rank == 3 else PeerFailedError), repr(error)


@distributed(2, 3)
def test_a_backward_pass_that_only_one_rank_makes(world_size: int) -> None:
    """The others never come, so only the group's timeout ends it; the error says what may be the cause."""
    group = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=3))
    ours = Side(True, Layers, group=group)
    loss = loss_of(ours, 0)
    if dist.get_rank() == 0:
        text = r"rank 0: backward\(\) has waited for the other ranks in vain.*one of them does not make this call"
        with pytest.raises(PeerFailedError, match=text):
            loss.backward()
    dist.barrier()


class Failing(AdamW):
    """Fails on one rank in its second step."""

    culprit = 0
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 2 and dist.get_rank() == self.culprit:
            raise LookupError("a step of the user's")
        return super().step(closure)


def failing_side(parts: int, overlap: bool) -> tuple[ShardedDataParallel, list[Optimizer]]:
    torch.manual_seed(3)
    module = Layers()
    rest = nn.ModuleList([module.middle, module.last])
    held = [module] if parts == 1 else [module.first, rest]
    optimizers = [
        ZeroRedundancyOptimizer(part.parameters(), AdamW if number else Failing, elementwise=True, lr=1e-2)
        for number, part in enumerate(held)
    ]
    model = ShardedDataParallel(module, optimizers, bucket_bytes=SMALL, overlap_forward=overlap)
    return model, [*optimizers]


@pytest.mark.parametrize("parts", [1, 2], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlapped"])
@distributed(2, 3)
def test_an_inner_step_that_fails_on_one_rank(world_size: int, overlap: bool, parts: int) -> None:
    """With ``overlap_forward`` the others learn of it in their next forward pass."""
    with as_if_large():
        model, optimizers = failing_side(parts, overlap)

    def iterate() -> None:
        model(inputs_of(dist.get_rank(), 0)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def until_it_fails() -> None:
        for _ in range(3):
            iterate()

    if not overlap or parts == 2:
        expect_failure_of([0], until_it_fails, LookupError, "a step of the user's")
        return
    error = failure_of(until_it_fails)
    if dist.get_rank() == 0:
        expect(error, LookupError, "a step of the user's")
    else:
        expect(error, PeerFailedError, rf"rank {dist.get_rank()}: the previous step\(\) failed on global rank 0")


class Reentrant(Checkpointed):
    """Runs a backward pass inside the backward pass."""

    reentrant = True


@distributed(2)
def test_reentrant_checkpointing_is_refused(world_size: int) -> None:
    ours = Side(True, Reentrant)
    loss = loss_of(ours, 0)
    expect(failure_of(loss.backward), RuntimeError, "use_reentrant=False")


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap_forward"])
@distributed(2, 4)
def test_replicas_of_a_mesh_with_different_options_raise_in_step(world_size: int, overlap: bool) -> None:
    mesh = init_device_mesh("cpu", (2, world_size // 2))
    ours = Side(True, Layers, group=mesh.get_group(1), mesh=mesh, overlap_forward=overlap)
    one_step(ours, 0)

    ours.optimizer.param_groups[0]["lr"] = 1e-3 * (1 + mesh.get_local_rank(0))
    error = failure_of(lambda: one_step(ours, 1))
    expect(error, RanksDisagreeError, "the ranks disagree in step.*different options")
