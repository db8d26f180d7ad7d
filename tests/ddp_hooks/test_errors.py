"""Hooks with wrong arguments, or with different ones on different ranks: an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from onecopy import (
    PeerFailedError,
    RanksDisagreeError,
    ReduceScatter,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    reduce_scatter_hook,
)
from tests.support.failures import check_pool, expect, expect_disagreement, expect_failure_of, failure_of
from tests.support.harness import distributed
from tests.support.models import small_loss, small_model
from tests.support.overlapped_step import HOOKS, MakeHook


class Layers(nn.Module):
    """Two layers alike and, if asked for, a complex parameter."""

    def __init__(self, with_wave: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        if with_wave:
            self.wave = nn.Parameter(torch.ones(8, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(inputs))
        return outputs


class Twins:
    """The layers in DDP, each with an optimizer of its own. Every rank makes all of it, in the same order."""

    def __init__(self, overlap: bool = False, with_wave: bool = False, **ddp_options: Any) -> None:
        torch.manual_seed(3)
        self.overlap = overlap
        self.module = Layers(with_wave)
        self.ddp = DistributedDataParallel(self.module, **ddp_options)
        self.zeros = [self.zero(part.named_parameters()) for part in (self.module.first, self.module.second)]
        self.plain = SGD(self.module.parameters(), lr=0.1)
        self.groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self.alone = self.groups[dist.get_rank()]
        self.everyone = dist.new_group()
        self.of_torch = torch_zero(self.module.first.parameters())
        self.other_ddp = DistributedDataParallel(self.module, process_group=self.alone)

    def zero(self, params: Any, **options: Any) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(params, SGD, **{"lr": 0.1, "overlap_with_ddp": self.overlap, **options})

    def backward(self) -> None:
        self.ddp(torch.full((4, 8), 1.0 + dist.get_rank())).square().mean().backward()

    def register(self, state: Any) -> None:
        """Register the reduce-scatter hook and run a backward pass, which makes the state if there is none yet."""
        self.ddp.register_comm_hook(state, reduce_scatter_hook)
        self.backward()


def torch_zero(params: Any) -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    return TorchZero(params, SGD, lr=0.1)


OURS = r"takes a onecopy\.ZeroRedundancyOptimizer"
CULPRITS = pytest.mark.parametrize("culprits", ["first", "last", "all"])


def ranks_of(culprits: str) -> list[int]:
    count = dist.get_world_size()
    return {"first": [0], "last": [count - 1], "all": list(range(count))}[culprits]


def check_refused(
    culprits: str, call: Callable[[Twins, bool], object], kind: type[Exception], text: str, **options: Any
) -> None:
    """``call(twins, is_wrong)`` is wrong on the culprits, who raise their error; the others name them and it."""
    twins, ranks = Twins(**options), ranks_of(culprits)
    is_wrong = dist.get_rank() in ranks
    expect_failure_of(ranks, lambda: call(twins, is_wrong), kind, text)
    check_pool()


# The reduce-scatter hook


WRONG_STATES: dict[str, tuple[Callable[[Twins], Any], type[Exception], str]] = {
    "nothing": (lambda _: None, TypeError, OURS),
    "a number": (lambda _: 3, TypeError, OURS),
    "a plain optimizer": (lambda twins: twins.plain, TypeError, OURS + r", got torch\.optim\.sgd\.SGD"),
    "a list of it": (lambda twins: [twins.plain], TypeError, OURS),
    "torch's optimizer": (lambda twins: twins.of_torch, TypeError, OURS),
    "no optimizer": (lambda _: [], ValueError, "at least one optimizer"),
    "the same twice": (lambda twins: [twins.zeros[0]] * 2, ValueError, "more than one of the hook's optimizers"),
}


@CULPRITS
@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@pytest.mark.parametrize("name", WRONG_STATES)
@distributed(2, 3)
def test_a_wrong_state_is_refused_on_all_ranks(world_size: int, name: str, eagerly: bool, culprits: str) -> None:
    state_of, kind, text = WRONG_STATES[name]

    def register(twins: Twins, is_wrong: bool) -> None:
        state = state_of(twins) if is_wrong else twins.zeros
        twins.register(ReduceScatter(state) if eagerly else state)

    check_refused(culprits, register, kind, text)


WRONG_ARGUMENTS: dict[str, tuple[Callable[[Twins], dict[str, Any]], str]] = {
    "integers": (lambda _: {"reduce_dtype": torch.int32}, "must be a floating-point type, got torch.int32"),
    "bits": (lambda _: {"reduce_dtype": torch.bool}, "must be a floating-point type, got torch.bool"),
    "the name of a type": (lambda _: {"reduce_dtype": "bf16"}, "must be a floating-point type, got bf16"),
    "DDP on other ranks": (lambda twins: {"ddp": twins.other_ddp}, "the optimizer is on ranks .*, but DDP is on ranks"),
}


@CULPRITS
@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
@distributed(2, 3)
def test_a_wrong_argument_is_refused_on_all_ranks(world_size: int, name: str, culprits: str) -> None:
    arguments_of, text = WRONG_ARGUMENTS[name]
    check_refused(
        culprits,
        lambda twins, is_wrong: ReduceScatter(twins.zeros, **(arguments_of(twins) if is_wrong else {})),
        ValueError,
        text,
    )


REFUSED: dict[str, tuple[Callable[[Twins], Any], str]] = {
    "one parameter twice": (
        lambda twins: [twins.zero(twins.ddp.named_parameters()) for _ in range(2)],
        r"module\.first\.weight",
    ),
    "steps inside backward": (
        lambda twins: twins.zero(twins.module.parameters(), overlap_with_ddp=True),
        "overlap_with_ddp=True",
    ),
    "different process groups": (
        lambda twins: [twins.zeros[0], twins.zero(twins.module.second.parameters(), process_group=twins.everyone)],
        "same process group",
    ),
    "ranks that cannot be compared with DDP's": (
        lambda twins: twins.zero(twins.module.parameters(), process_group=twins.alone),
        r"register ReduceScatter\(optimizer, ddp=ddp\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@distributed(2)
def test_optimizers_that_the_reduce_scatter_hook_cannot_use_are_refused(world_size: int, name: str) -> None:
    state_of, text = REFUSED[name]
    twins = Twins()
    state = state_of(twins)
    expect(failure_of(lambda: ReduceScatter(state)), ValueError, text)
    check_pool()


@pytest.mark.parametrize(
    ("dtype", "odd_dtype"), [(None, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, None)]
)
@distributed(2, 3)
def test_gradients_in_different_types_are_an_error(
    world_size: int, dtype: torch.dtype | None, odd_dtype: torch.dtype | None
) -> None:
    odd, twins = world_size - 1, Twins()
    mine = odd_dtype if dist.get_rank() == odd else dtype

    def register() -> None:  # without a type, the optimizers themselves are the hook's state
        twins.register(twins.zeros if mine is None else ReduceScatter(twins.zeros, mine))

    expect_disagreement(odd, register, f"reduce_dtype: {dtype}", f"reduce_dtype: {odd_dtype}")
    check_pool()


@distributed(2, 3)
def test_an_optimizer_on_one_rank_and_the_same_state_elsewhere_are_no_error(world_size: int) -> None:
    twins, reference = Twins(), Twins()
    reference.backward()
    twins.register(twins.zeros if dist.get_rank() == 0 else ReduceScatter(twins.zeros, ddp=twins.ddp))
    for zero in twins.zeros + reference.zeros:
        zero.step()
    for ours, other in zip(twins.module.parameters(), reference.module.parameters(), strict=True):
        torch.testing.assert_close(ours, other)


@pytest.mark.parametrize("eagerly", [True, False], ids=["ReduceScatter", "optimizers"])
@distributed(2, 3)
def test_other_optimizers_or_another_order_are_an_error(world_size: int, eagerly: bool) -> None:
    odd = world_size - 1
    for part, text, odd_text in (
        (slice(1), "number of optimizers: 2", "number of optimizers: 1"),
        (slice(None, None, -1), "optimizer 0: SGD of 2 param", "optimizer 0: SGD of 2 param"),
    ):
        twins = Twins()
        state = twins.zeros[part] if dist.get_rank() == odd else twins.zeros

        def register(twins: Twins = twins, state: Any = state) -> None:
            twins.register(ReduceScatter(state) if eagerly else state)

        expect_disagreement(odd, register, text, odd_text)
    check_pool()


@distributed(2)
def test_a_backward_pass_that_only_one_rank_makes(world_size: int) -> None:
    """The other rank never comes, as in ``if rank == 0:``: only the group's timeout ends it."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    ddp = DistributedDataParallel(small_model())
    dist.barrier()  # the ranks begin together: three seconds may be short for one that is late
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, process_group=group, lr=0.1)
    ddp.register_comm_hook(ReduceScatter(zero, ddp=ddp), reduce_scatter_hook)
    loss = small_loss(ddp, 0)
    if dist.get_rank() == 0:
        text = r"rank 0: backward\(\) has waited for the other ranks in vain.*one of them does not make this call"
        with pytest.raises(PeerFailedError, match=text):
            loss.backward()
    dist.barrier()


# The overlap hooks


WRONG_HOOKS: dict[str, tuple[Callable[[Twins], tuple[Any, Any]], type[Exception], str]] = {
    "does not overlap": (
        lambda twins: (twins.ddp, twins.zero(twins.module.parameters(), overlap_with_ddp=False)),
        ValueError,
        "overlap_with_ddp=True",
    ),
    "a plain optimizer": (lambda twins: (twins.ddp, twins.plain), TypeError, OURS),
    "torch's optimizer": (
        lambda twins: (twins.ddp, twins.of_torch),
        TypeError,
        OURS + r", got torch\.distributed\.optim",
    ),
    "a model without DDP": (
        lambda twins: (twins.module, twins.zeros[0]),
        TypeError,
        "DistributedDataParallel, got Layers",
    ),
    "parameters of another model": (
        lambda twins: (DistributedDataParallel(nn.Linear(2, 2)), twins.zeros[0]),
        ValueError,
        "'weight'.*not a parameter of the model",
    ),
}


@CULPRITS
@HOOKS
@pytest.mark.parametrize("name", WRONG_HOOKS)
@distributed(2)
def test_a_wrong_argument_of_an_overlap_hook_is_refused_on_all_ranks(
    world_size: int, name: str, make_hook: MakeHook, culprits: str
) -> None:
    arguments_of, kind, text = WRONG_HOOKS[name]

    def make(twins: Twins, is_wrong: bool) -> None:
        wrong = arguments_of(twins)  # on all ranks, as some of it takes all of them
        make_hook(allreduce_hook, *(wrong if is_wrong else (twins.ddp, twins.zeros[0])))

    check_refused(culprits, make, kind, text, overlap=True)


@HOOKS
@distributed(2)
def test_optimizers_that_the_overlap_hooks_cannot_use_are_refused(world_size: int, make_hook: MakeHook) -> None:
    twins = Twins(overlap=True)
    alone = twins.zero(twins.module.parameters(), process_group=twins.alone)
    error = failure_of(lambda: make_hook(allreduce_hook, twins.ddp, alone))
    expect(error, ValueError, r"optimizer is on ranks \[.\], but DDP is on ranks \[0, 1\]")
    make_hook(allreduce_hook, twins.ddp, twins.zeros[0])
    expect(failure_of(lambda: make_hook(allreduce_hook, twins.ddp, twins.zeros[0])), ValueError, "already")


@HOOKS
@distributed(2, 3)
def test_overlap_hooks_with_different_arguments_are_an_error(world_size: int, make_hook: MakeHook) -> None:
    odd = world_size - 1
    here = dist.get_rank() == odd
    twins = Twins(overlap=True)
    other_hook = ({*(hook_with_zero_step, hook_with_zero_step_interleaved)} - {make_hook}).pop()
    zero, hook = twins.zeros[0], allreduce_hook
    for make, mine, optimizer, text in (
        (make_hook, fp16_compress_hook if here else hook, zero, "hook: .*"),
        (make_hook, hook, twins.zeros[here], "optimizer 0: SGD"),
        (other_hook if here else make_hook, hook, zero, "interleaved: (True|False)"),
    ):
        call = lambda make=make, mine=mine, optimizer=optimizer: make(mine, twins.ddp, optimizer)  # noqa: E731
        expect_disagreement(odd, call, text, text)
    for option in ("static_graph", "find_unused_parameters"):
        other = Twins(overlap=True, **{option: here})
        call = lambda other=other: make_hook(hook, other.ddp, other.zeros[0])  # noqa: E731
        expect_disagreement(odd, call, f"{option} of DDP: False", f"{option} of DDP: True")
    check_pool()


@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
@distributed(2)
def test_torchs_hooks_refuse_our_optimizer(world_size: int, name: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    twins = Twins(overlap=True)
    with pytest.raises(ValueError, match=r"onecopy\.hook_with_zero_step"):
        getattr(ddp_zero_hook, name)(allreduce_hook, twins.ddp, twins.zeros[0])


# Both


@distributed(2)
def test_a_complex_parameter_is_refused_by_name(world_size: int) -> None:
    for overlap in (False, True):
        twins = Twins(overlap, with_wave=True)
        zero = twins.zero(twins.ddp.named_parameters())
        make = lambda: hook_with_zero_step(allreduce_hook, twins.ddp, zero) if overlap else ReduceScatter(zero)  # noqa: B023, E731
        expect(failure_of(make), ValueError, r"parameter 'module\.wave' is complex")


@distributed(2, 3)
def test_an_overlap_hook_on_one_rank_and_the_reduce_scatter_hook_elsewhere_are_an_error(world_size: int) -> None:
    twins = Twins(overlap=True)

    def register() -> None:
        if dist.get_rank() == 0:
            hook_with_zero_step(allreduce_hook, twins.ddp, twins.zeros[0])
        else:
            twins.register(twins.zeros[0])

    error = failure_of(register)
    expect(error, RanksDisagreeError, "rank 0: making an overlap hook; rank 1: constructing ReduceScatter")
    check_pool()
