"""``ShardedDataParallel`` on the simulated accelerator: numbers, orders of streams, and costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from onecopy import MixedPrecision, PeerFailedError, RanksDisagreeError, ShardedDataParallel, ZeroRedundancyOptimizer
from onecopy.comm import collectives, limits
from onecopy.comm.buffers import BufferPool
from onecopy.data_parallel.bucket import GradientBucket, ReductionPolicy
from onecopy.layout import ParamSpec, plan_buckets
from onecopy.step.sharded_gradient import GradientGroup
from tests.accelerator import device
from tests.accelerator.counters import Step
from tests.accelerator.harness import HYBRID, SIMCCL, simulated

LAYERS = 6
SIZE = 40
BUCKET = 4 * (SIZE * SIZE + SIZE)
"""A size of buckets, in bytes, with which every layer has one."""

AHEAD = pytest.mark.parametrize(("seed", "host_ahead"), [(0, 0), (1, 5), (2, "far"), (3, "far")])
ROUNDING = 2e-6


class Model(nn.Module):
    """Some layers, a matrix in channels-last order, and a layer that only some ranks use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(LAYERS))
        self.turned = nn.Parameter(torch.randn(SIZE, SIZE).t() / SIZE)
        self.branch = nn.Linear(SIZE, SIZE)
        self.branches = False
        self.stream: Any = None

    def forward(self, inputs: Tensor, step: int) -> Tensor:
        outputs = inputs
        for number, layer in enumerate(self.layers):
            outputs = self.run_beside(layer, outputs) if self.stream is not None and number == 2 else layer(outputs)
            outputs = outputs.tanh()
        outputs = outputs @ self.turned
        if not self.branches or (step + dist.get_rank()) % 4 == 0:
            outputs = self.branch(outputs)
        return outputs.pow(2).sum()

    def run_beside(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """Run a layer on another stream."""
        current = torch.accelerator.current_stream()
        self.stream.wait_stream(current)
        with self.stream:
            outputs: Tensor = layer(inputs)
        current.wait_stream(self.stream)
        inputs.record_stream(self.stream)
        outputs.record_stream(current)
        return outputs


def inputs_for(where: str, step: int) -> Tensor:
    torch.manual_seed(10 * step + dist.get_rank())
    inputs = torch.randn(4, SIZE)
    return inputs if where == "cpu" else inputs.pin_memory().to(where, non_blocking=True)


def module_on(where: str, **settings: Any) -> Model:
    torch.manual_seed(1)
    module = Model().to(where)
    for name, value in settings.items():
        setattr(module, name, value)
    return module


def iterate(model: Any, optimizers: list[Any], where: str, step: int, passes: int = 1) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    for number in range(passes):
        with contextlib.nullcontext() if (passes - number) % 2 else model.no_sync():
            model(inputs_for(where, 7 * step + number), step).backward()
    for optimizer in optimizers:
        optimizer.step()


def plain(steps: int, passes: int = 1, **settings: Any) -> list[Tensor]:
    """The parameters after training with DDP on the CPU."""
    module = module_on("cpu", **settings)
    ddp = DistributedDataParallel(module, process_group=dist.new_group(backend="gloo"), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(steps):
        iterate(ddp, [optimizer], "cpu", step, passes)
    return [param.detach() for param in module.parameters()]


def make(
    count: int = 1, settings: dict[str, Any] | None = None, zero_options: dict[str, Any] | None = None, **options: Any
) -> tuple[ShardedDataParallel, list[ZeroRedundancyOptimizer]]:
    module = module_on("sim", **(settings or {}))
    params = list(module.parameters())
    zeros = [
        ZeroRedundancyOptimizer(params[part::count], torch.optim.AdamW, lr=0.01, **(zero_options or {}))
        for part in range(count)
    ]
    return ShardedDataParallel(module, zeros, **{"bucket_bytes": BUCKET, **options}), zeros


def compare(expected: list[Tensor], actual: list[Tensor], tolerance: float = ROUNDING) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap_forward": True},
    "one bucket": {"bucket_bytes": 1 << 20},
    "two optimizers": {"count": 2},
    "two optimizers, overlapped": {"count": 2, "overlap_forward": True},
    "whole parameters": {"zero_options": {"elementwise": False}},
    "whole parameters, overlapped": {"zero_options": {"elementwise": False}, "overlap_forward": True},
    "float64 on the wire": {"mixed_precision": MixedPrecision(reduce_dtype=torch.float64)},
}


@AHEAD
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("passes", [1, 2, 3])
@simulated(2, 3)
def test_training_equals_ddp(world_size: int, case: str, passes: int, seed: int, host_ahead: Any) -> None:
    with small_limits():
        expected = plain(4, passes)
        with device.simulate(seed=seed, host_ahead=host_ahead) as run:
            model, zeros = make(**CASES[case])
            for step in range(4):
                iterate(model, zeros, "sim", step, passes)
            actual = [param.detach().cpu() for param in model.parameters()]
    assert run.reports == []
    compare(expected, actual)


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """Few bytes may be in flight, as with a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "COLLECTIVE_BUCKET_BYTES", BUCKET)
        patch.setattr(limits, "COLLECTIVE_BUCKET_BYTES_PER_RANK", 1)
        yield


@AHEAD
@pytest.mark.parametrize("overlap_forward", [False, True])
@simulated(2, 3)
def test_a_layer_that_some_ranks_use(world_size: int, overlap_forward: bool, seed: int, host_ahead: Any) -> None:
    with small_limits():
        expected = plain(6, branches=True)
        with device.simulate(seed=seed, host_ahead=host_ahead) as run:
            model, zeros = make(settings={"branches": True}, overlap_forward=overlap_forward)
            for step in range(6):
                iterate(model, zeros, "sim", step)
            actual = [param.detach().cpu() for param in model.parameters()]
    assert run.reports == []
    compare(expected, actual)


@AHEAD
@pytest.mark.parametrize("bucket_bytes", [BUCKET, 1 << 20])
@simulated(2)
def test_a_layer_on_another_stream(world_size: int, bucket_bytes: int, seed: int, host_ahead: Any) -> None:
    """With one bucket, two streams read parameters of it, and each must wait."""
    # A hook keeps autograd's nodes alive, as in DDP, and torch warns that they run on the stream of their making.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    with small_limits():
        expected = plain(5)
        with device.simulate(seed=seed, host_ahead=host_ahead) as run:
            settings = {"stream": torch.Stream("sim")}
            model, zeros = make(settings=settings, overlap_forward=True, bucket_bytes=bucket_bytes)
            for step in range(5):
                iterate(model, zeros, "sim", step)
            actual = [param.detach().cpu() for param in model.parameters()]
    assert run.reports == []
    compare(expected, actual)


@AHEAD
@pytest.mark.parametrize("overlap_forward", [False, True])
@simulated(4)
def test_a_mesh(world_size: int, overlap_forward: bool, seed: int, host_ahead: Any) -> None:
    with small_limits():
        expected = plain(4, passes=2)
        mesh = init_device_mesh("sim", (2, 2))
        with device.simulate(seed=seed, host_ahead=host_ahead) as run:
            model, zeros = make(
                zero_options={"process_group": mesh.get_group(1)}, mesh=mesh, overlap_forward=overlap_forward
            )
            for step in range(4):
                iterate(model, zeros, "sim", step, passes=2)
            actual = [param.detach().cpu() for param in model.parameters()]
    assert run.reports == []
    compare(expected, actual)


MIXED = {
    "bfloat16": MixedPrecision(param_dtype=torch.bfloat16),
    "bfloat16, sent as float32": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "sent as float16": MixedPrecision(reduce_dtype=torch.float16),
}


@AHEAD
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("mixed", MIXED)
@simulated(2)
def test_mixed_precision_and_clipping_equal_gloo(
    world_size: int, mixed: str, averages: bool, seed: int, host_ahead: Any
) -> None:
    def train(where: str, group: Any) -> list[Tensor]:
        module = module_on(where)
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, process_group=group, lr=0.01)
        model = ShardedDataParallel(
            module, zero, bucket_bytes=BUCKET, overlap_forward=True, mixed_precision=MIXED[mixed]
        )
        for step in range(4):
            zero.zero_grad()
            with model.no_sync():
                model(inputs_for(where, 2 * step), step).backward()
            model(inputs_for(where, 2 * step + 1), step).backward()
            zero.clip_grad_norm_(0.5)
            zero.step()
        return [param.detach().cpu().float() for param in model.parameters()]

    expected = train("cpu", dist.new_group(backend="gloo"))
    with pytest.MonkeyPatch.context() as patch:
        if averages:
            patch.setattr(collectives, "AVERAGING_BACKENDS", {SIMCCL})
        with device.simulate(seed=seed, host_ahead=host_ahead) as run:
            actual = train("sim", None)
    assert run.reports == []
    # The backend adds up in float16; between pairs of ranks the sum is in float32.
    compare(expected, actual, 1e-3 if mixed == "sent as float16" else 1e-5)


class Normed(nn.Module):
    """A layer with buffers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(self.layer(inputs)).pow(2).sum()
        return outputs


@simulated(2)
def test_buffers_are_sent_by_one_broadcast(world_size: int) -> None:
    with device.simulate(seed=9) as run:
        torch.manual_seed(1)
        module = Normed().to("sim")
        zero = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        model = ShardedDataParallel(module, zero)
        for step in range(3):
            inputs = inputs_for("sim", step)
            with run.step() as forward:
                loss = model(inputs)
            loss.backward()
            zero.step()
        buffers = [buffer.cpu() for buffer in model.module.buffers()]
    assert run.reports == []
    assert [each.name for each in forward.collectives] == ["broadcast"]
    assert forward.synchronizations == []
    assert int(buffers[-1]) == 3


# Costs


def counted_step(overlap_forward: bool, averages: bool) -> tuple[Step, Step]:
    """The counts of a backward pass and of a step, long after the start."""
    with pytest.MonkeyPatch.context() as patch:
        if averages:
            patch.setattr(collectives, "AVERAGING_BACKENDS", {SIMCCL})
        with device.simulate(seed=4, host_ahead="far") as run:
            model, (zero,) = make(overlap_forward=overlap_forward)
            for step in range(4):
                zero.zero_grad()
                loss = model(inputs_for("sim", step), step)
                with run.step() as backward:
                    loss.backward()
                with run.step() as update:
                    zero.step()
        assert run.reports == []
    return backward, update


def sites(step: Step) -> set[str]:
    """The files of onecopy that launch kernels."""
    return {where.partition(":")[0] for _, where in step.kernels if where.startswith("onecopy/")}


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@simulated(2, 3)
def test_what_a_step_costs(world_size: int, backend: str, averages: bool, overlap_forward: bool) -> None:
    """One collective per bucket and direction, one exchange of flags each, and a host that waits for old flags only."""
    backward, update = counted_step(overlap_forward, averages)
    buckets = 8
    assert [each.name for each in backward.collectives] == ["reduce_scatter_tensor"] * buckets + ["all_reduce"]
    assert [each.name for each in update.collectives] == ["all_gather_into_tensor"] * buckets + ["all_reduce"]
    assert backward.synchronizations == []
    # Two phases are a step: these are the flags of the last backward pass and of the last step. Flags that have arrived
    # already are read without waiting.
    assert {(each.kind, each.age) for each in update.synchronizations} <= {("event", 3), ("event", 2)}, update.summary()
    assert len(update.synchronizations) <= 2
    ours = {name: count for (name, where), count in backward.kernels.items() if where.startswith("onecopy/")}
    assert ours == {"_foreach_copy_": buckets} | ({} if averages else {"mul_": buckets}), backward.summary()
    assert sites(update) == {"onecopy/common/torch_private.py"}  # the inner optimizer
    assert update.kernels["_foreach_sqrt", next(where for name, where in update.kernels if name == "_foreach_sqrt")] < 5
    assert sum(backward.copies.values()) == sum(update.copies.values()) == 2, "flags to the device and back"
    two_buckets = 2 * max(each.size for each in backward.collectives)
    gradients = 4 * (SIZE * SIZE + 64)  # of the layer that fills the next bucket
    assert backward.peak <= two_buckets + 3 * gradients, backward.summary()


# Waiting


@pytest.mark.parametrize("backend", [SIMCCL, HYBRID])
@pytest.mark.parametrize("count", [1, 2])
@simulated(2)
def test_after_an_overlapped_step_the_computation_waits_for_no_other_rank(
    world_size: int, backend: str, count: int
) -> None:
    """Rank 1 steps only when all work that rank 0 has enqueued for its computation is done."""
    meeting = dist.new_group(backend="gloo")
    with device.simulate(seed=5) as run:
        model, zeros = make(count=count, overlap_forward=True)
        for step in range(3):
            iterate(model, zeros, "sim", step)
        model(inputs_for("sim", 3), 3).backward()
        torch.accelerator.synchronize()
        if dist.get_rank() == 1:
            dist.barrier(meeting)
        for zero in zeros:
            zero.step()
        if dist.get_rank() == 0:
            torch.accelerator.current_stream().synchronize()
            dist.barrier(meeting)
        iterate(model, zeros, "sim", 4)
    assert run.reports == []


@simulated(2)
def test_a_submodule_waits_for_its_own_segment(world_size: int) -> None:
    waited: list[int] = []
    with device.simulate(seed=6):
        model, zeros = make(overlap_forward=True)
        (pipeline,) = (each for _, each in model._pipelines)
        module = model.module
        assert isinstance(module, Model)
        module.layers[1].register_forward_pre_hook(
            lambda *_: waited.append(sum(bool(each.waiting) for each in pipeline._transfers.values()))
        )
        for step in range(4):
            iterate(model, zeros, "sim", step)
        assert len(pipeline._segments) == 3
        assert waited == [0, 2, 2, 2], "only the segments of submodules that have run"


class FailsOnce(torch.optim.AdamW):
    """An optimizer whose update raises on rank 0 when told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if FailsOnce.fails and dist.get_rank() == 0:
            raise LookupError("no update today")
        return super().step(closure)


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("failing", ["step", "backward"])
@simulated(2, 3)
def test_a_failure_is_told_without_a_host_that_hangs(world_size: int, failing: str, overlap_forward: bool) -> None:
    """The other ranks go on, with collectives in which the failed rank takes no part, until the next step reads."""
    meeting = dist.new_group(backend="gloo")
    here = dist.get_rank()

    def forward_backward(step: int) -> None:
        model(inputs_for("sim", step), step).backward()

    with device.simulate(seed=7, idle=3600.0), pytest.MonkeyPatch.context() as patch:
        module = module_on("sim")
        zero = ZeroRedundancyOptimizer(module.parameters(), FailsOnce, elementwise=True, lr=0.01)
        model = ShardedDataParallel(module, zero, bucket_bytes=BUCKET, overlap_forward=overlap_forward)
        for step in range(3):
            iterate(model, [zero], "sim", step)
        zero.zero_grad()
        calls = [forward_backward, lambda _: zero.step(), forward_backward, lambda _: zero.step()]
        patch.setattr(FailsOnce, "fails", failing == "step")
        if failing == "backward" and here == 0:
            patch.setattr(GradientBucket, "put", mock.Mock(side_effect=LookupError("no update today")))
        done = 0
        error: Exception | None = None
        while error is None:
            try:
                calls[done](done)
            except (LookupError, PeerFailedError) as caught:
                error = caught
            done += 1
        if here == 0:
            assert isinstance(error, LookupError)
            assert done == (1 if failing == "backward" else 2)
            torch.accelerator.synchronize()
        else:
            assert isinstance(error, PeerFailedError)
            assert done == 4
            assert str(error).startswith(f"rank {here}: the previous {failing}() failed on global rank 0")
        dist.barrier(meeting)  # no host hangs
        patch.undo()
        if here == 0:  # so that the simulation can end: the collectives that the others have enqueued
            zero.zero_grad()
            for call in calls[done:3]:
                call(9)


@pytest.mark.parametrize(("options", "text"), [({"lr": 0.5}, "different options")])
@simulated(2)
def test_different_options_are_told_in_the_next_step(world_size: int, options: dict[str, Any], text: str) -> None:
    with device.simulate(seed=8):
        model, (zero,) = make()
        iterate(model, [zero], "sim", 0)
        if dist.get_rank() == 0:
            zero.param_groups[0].update(options)
        iterate(model, [zero], "sim", 1)
        with pytest.raises(RanksDisagreeError, match=text):
            iterate(model, [zero], "sim", 2)


@AHEAD
@pytest.mark.parametrize("equal", [True, False])
@simulated(2, 3)
def test_gradients_from_several_streams_are_packed_and_released_in_order(
    world_size: int, equal: bool, seed: int, host_ahead: Any
) -> None:
    specs = [ParamSpec(number, str(number), (SIZE, SIZE), (SIZE, 1), torch.float32) for number in range(4)]
    _, (plan,) = plan_buckets(specs, range(4), world_size, splittable=equal, bucket_bytes=1 << 20)
    with device.simulate(seed=seed, host_ahead=host_ahead) as run:
        ranks = collectives.Collectives(None, torch.device("sim", dist.get_rank()))
        params = [torch.zeros(SIZE, SIZE, device="sim") for _ in specs]
        streams = [torch.accelerator.current_stream(), torch.Stream("sim"), torch.Stream("sim")]
        policy, names = ReductionPolicy(GradientGroup(ranks, params), None, None), [str(number) for number in range(4)]
        bucket, pool = GradientBucket(plan, params, names, policy), BufferPool()
        start, stop = plan.range_of(dist.get_rank())
        for number in range(4):
            bucket.begin_pass()
            for position in range(3):  # the last gradient is missing
                with streams[(number + position) % 3]:
                    gradient = torch.full((SIZE, SIZE), float(number + position), device="sim")
                    bucket.put(position, gradient * (1 + dist.get_rank()))
            with streams[number % 3]:
                bucket.add_up(bucket.launch(pool, 0), pool)
            streams[0].wait_stream(streams[number % 3])
            mean = (1 + world_size) / 2
            expected = torch.zeros(plan.numel)
            for position in range(3):
                offset = plan.offsets[position]
                expected[offset : offset + SIZE * SIZE] = mean * (number + position)
            torch.testing.assert_close(bucket.shard.cpu(), expected[start:stop])
    assert run.reports == []
