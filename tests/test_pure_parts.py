"""The engine's parts that need no process group: flat memory, the codec, message plans, known classes, ``params``."""

from __future__ import annotations

import collections
import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import pytorch_optimizer
import schedulefree  # type: ignore[import-untyped]
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from harness import distributed
from onecopy import ZeroRedundancyOptimizer
from onecopy.comm.limits import (
    DIRECT_BYTES,
    LONGEST_BYTES,
    MESSAGE_BYTES,
    PACK_BYTES,
    PACKS_IN_FLIGHT,
    SHORTEST_BYTES,
    STAGED_BYTES,
)
from onecopy.comm.packing import (
    InFlight,
    plan_messages,
    receive_ranges,
    send_ranges,
)
from onecopy.comm.pairwise_exchange import (
    message_length,
    message_lengths,
    staging_slots,
)
from onecopy.common import tagged_json
from onecopy.common.flat_views import as_bytes, dense_copy, flat_like, flat_view, is_dense, to_bytes
from onecopy.common.torch_private import buffers_of
from onecopy.step.optimizer_classes import check_class, check_options, is_elementwise
from onecopy.step.parameter_groups import normalise, normalise_group, plan_params
from onecopy.step.rank_comparison import options_text

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------- flat memory


def addresses(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Where each element lies, in index order, by going through all of them."""
    return [
        sum(place * step for place, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Permuted, sliced, strided and expanded tensors whose values say where in memory they lie."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    for change in draw(st.lists(st.sampled_from(["permute", "slice", "expand", "offset"]), max_size=3)):
        if change == "permute":
            tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        elif change == "slice" and tensor.dim():
            axis = draw(st.integers(0, tensor.dim() - 1))
            begin, step = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            tensor = tensor[(slice(None),) * axis + (slice(begin, None, step),)]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif change == "offset":
            tensor = torch.arange(tensor.numel() + 3)[3:].reshape(tensor.shape)
    return tensor


@settings(max_examples=500)
@given(tensors())
@example(torch.zeros(4, 6)[:0, ::2])
def test_a_tensor_is_dense_exactly_if_its_addresses_are_a_run_without_repeats(tensor: Tensor) -> None:
    dense = sorted(addresses(tensor.shape, tensor.stride())) == list(range(tensor.numel()))
    assert is_dense(tuple(tensor.shape), tensor.stride()) == dense


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), max_size=4))
def test_any_shape_with_any_strides_is_judged_by_its_addresses(axes: list[tuple[int, int]]) -> None:
    shape, stride = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    assert is_dense(shape, stride) == (sorted(addresses(shape, stride)) == list(range(math.prod(shape))))


@settings(max_examples=300)
@given(tensors())
def test_a_flat_view_shows_dense_memory_in_its_own_order(tensor: Tensor) -> None:
    dense = dense_copy(tensor)
    assert dense.equal(tensor)
    if is_dense(tuple(tensor.shape), tensor.stride()):
        assert dense is tensor
    by_address = dict(
        zip(addresses(dense.shape, dense.stride()), map(int, dense.flatten().tolist()), strict=True),
    )
    flat = flat_view(dense)
    assert flat.tolist() == [by_address[place] for place in range(dense.numel())]
    if dense.numel():
        assert flat.data_ptr() == dense.data_ptr()
        flat[0] = -1
        assert (dense == -1).sum() == 1


@settings(max_examples=300)
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_flat_like_gives_one_tensors_elements_in_the_memory_order_of_another(
    shape: list[int], data: st.DataObject
) -> None:
    order, other_order = (data.draw(st.permutations(range(len(shape)))) for _ in range(2))
    like = permuted(shape, order)
    tensor = permuted(shape, other_order)
    expected = [0] * like.numel()
    for place, value in zip(addresses(like.shape, like.stride()), tensor.flatten().tolist(), strict=True):
        expected[place] = value
    flat = flat_like(tensor, like)
    assert flat.tolist() == expected
    if tensor.numel() and tensor.stride() == like.stride():
        assert flat.data_ptr() == tensor.data_ptr(), "no copy where none is needed"


def permuted(shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """A dense tensor of this shape whose axes lie in memory in this order."""
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return torch.arange(math.prod(shape)).reshape([shape[axis] for axis in order]).permute(inverse)


def test_an_expanded_gradient_is_laid_out_like_its_parameter() -> None:
    param = torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last)
    gradient = torch.tensor(2.0).expand_as(param)
    assert flat_like(gradient, param).tolist() == [2.0] * 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
def test_bytes_are_the_memory_itself(dtype: torch.dtype) -> None:
    flat = torch.tensor([0, 1, 1], dtype=dtype)
    view = as_bytes(flat)
    assert view.numel() == 3 * dtype.itemsize
    assert to_bytes(view) == bytes(view.tolist())
    view.zero_()
    assert not flat.any()
    assert to_bytes(as_bytes(flat[:0])) == b""


# ---------------------------------------------------------------------------------------------------------- codec

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.sampled_from([-0.0, 5e-324, 2**70, "tensor", "dict"]),
)
PLAIN_KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
KEYS = st.one_of(PLAIN_KEYS, st.tuples(PLAIN_KEYS, PLAIN_KEYS))
TREES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value all the way down, with nan equal to nan and zeros told apart by their sign."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return repr(one) == repr(other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


def round_trip(value: object) -> Any:
    found: list[Tensor] = []
    return tagged_json.decode(tagged_json.loads(tagged_json.dumps(tagged_json.encode(value, found, "it"))), found)


@settings(max_examples=500)
@given(TREES)
@example({1: "int", "1": "text", None: (), (1, "a"): [math.nan, math.inf, -math.inf]})
@example([["tensor", 0], ["float", "nan"], ("tuple", [])])
@example({"empty": [{}, [], ()], "nested": ((((1,),),),)})
def test_plain_data_comes_back_with_the_same_types_and_values(value: Any) -> None:
    assert same(round_trip(value), value)


def test_tensors_travel_beside_the_tree_and_return_to_their_places() -> None:
    first, second = torch.ones(2, requires_grad=True), torch.tensor(3)
    found: list[Tensor] = []
    data = tagged_json.encode({"a": first, "b": [1, (second, None)], "c": first}, found, "state")
    assert [tensor.tolist() for tensor in found] == [[1.0, 1.0], 3, [1.0, 1.0]]
    assert not any(tensor.requires_grad for tensor in found)
    back = tagged_json.decode(tagged_json.loads(tagged_json.dumps(data)), ["x", "y", "z"])
    assert back == {"a": "x", "b": [1, ("y", None)], "c": "z"}


class Colour(enum.IntEnum):
    RED = 1


class Pair(NamedTuple):
    left: int


REFUSED: dict[str, tuple[object, str]] = {
    "a set": ({1}, r"state of 'w' is of type builtins\.set"),
    "bytes": (b"raw", r"state of 'w' is of type builtins\.bytes"),
    "a complex number": (1j, r"state of 'w' is of type builtins\.complex"),
    "an enum inside a list": ([0, Colour.RED], r"state of 'w'\[1\] is of type .*Colour"),
    "a named tuple inside a dict": ({"a": {2: Pair(1)}}, r"state of 'w'\['a'\]\[2\] is of type .*Pair"),
    "a default dict": ((collections.defaultdict(int),), r"state of 'w'\[0\] is of type collections\.defaultdict"),
    "a generator": ({"g": torch.Generator()}, r"state of 'w'\['g'\] is of type torch.*Generator"),
    "a dtype": ({"d": torch.float32}, r"state of 'w'\['d'\] is of type torch\.dtype"),
    "a function": ([len], r"state of 'w'\[0\] is of type builtins\.builtin_function_or_method"),
    "a key": ({frozenset(): 1}, r"a key of state of 'w' is of type builtins\.frozenset"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_any_other_type_is_refused_with_its_place_and_type(kind: str) -> None:
    value, message = REFUSED[kind]
    with pytest.raises(TypeError, match=message):
        tagged_json.encode(value, [], "state of 'w'")


def test_only_the_tensors_of_a_tree_are_mapped() -> None:
    tree = {"a": torch.ones(1), "b": [2, (torch.zeros(1), "x")], 3: None}
    mapped = tagged_json.map_tensors(tree, lambda tensor: tensor.tolist())
    assert mapped == {"a": [1.0], "b": [2, ([0.0], "x")], 3: None}
    assert isinstance(mapped["b"][1], tuple)
    assert isinstance(tree["a"], Tensor), "the original is left alone"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0, 3, dtype=torch.float64),
        torch.zeros(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
        torch.zeros(3, 2, dtype=torch.complex64).t(),
        torch.zeros(2, dtype=torch.bool),
        torch.zeros(2, dtype=torch.float8_e4m3fn),
        torch.zeros(2, dtype=torch.uint8),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_a_receiver_can_allocate_a_tensor_from_its_description(tensor: Tensor) -> None:
    made = tagged_json.empty_from(tagged_json.loads(tagged_json.dumps(tagged_json.describe_tensor(tensor))))
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


# ------------------------------------------------------------------------------------------------------- messages

SIZES = st.one_of(
    st.sampled_from(
        [0, 1, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, PACK_BYTES, MESSAGE_BYTES, MESSAGE_BYTES + 1]
    ),
    st.integers(0, 3 * MESSAGE_BYTES),
    st.integers(0, DIRECT_BYTES),
)


@settings(max_examples=500)
@given(st.lists(SIZES, max_size=40), st.sampled_from([1, 64, DIRECT_BYTES]))
@example([DIRECT_BYTES - 1] * 20, DIRECT_BYTES)
@example([5, DIRECT_BYTES, 6], DIRECT_BYTES)
def test_messages_carry_every_byte_once_in_order_and_within_bounds(sizes: list[int], direct_bytes: int) -> None:
    messages = plan_messages(sizes, direct_bytes)
    sent: list[int] = [0] * len(sizes)
    for message in messages:
        if message.packed:
            assert message.ranges == tuple(sorted(message.ranges))
            assert (message.start, message.stop) == (0, sum(sizes[position] for position in message.ranges))
            assert 0 < message.stop <= PACK_BYTES
            for position in message.ranges:
                assert sent[position] == 0
                assert sizes[position] < direct_bytes
                sent[position] = sizes[position]
        else:
            (position,) = message.ranges
            assert sizes[position] >= direct_bytes
            assert message.start == sent[position], "parts follow each other"
            assert 0 < message.stop - message.start <= MESSAGE_BYTES
            sent[position] = message.stop
    assert sent == sizes
    for packed in (True, False):
        first = [message.ranges[0] for message in messages if message.packed is packed]
        assert first == sorted(first)


@settings(max_examples=200)
@given(st.lists(st.integers(0, DIRECT_BYTES - 1), max_size=60))
def test_a_pack_is_closed_only_when_the_next_piece_does_not_fit(sizes: list[int]) -> None:
    packs = plan_messages(sizes)
    for full, following in itertools.pairwise(packs):
        assert full.stop + sizes[following.ranges[0]] > PACK_BYTES


class Transfer:
    """Work that notes when it is waited for."""

    def __init__(self, waited: list[int], number: int) -> None:
        self.waited, self.number = waited, number

    def wait(self) -> None:
        self.waited.append(self.number)


def test_staged_buffers_under_way_are_bounded_and_finish_in_order() -> None:
    waited: list[int] = []
    finished: list[int] = []
    flying = InFlight()
    for number in range(10):
        flying.add(Transfer(waited, number), torch.empty(0), True, functools.partial(finished.append, number))
        assert number + 1 - len(waited) <= PACKS_IN_FLIGHT
    flying.drain()
    assert waited == finished == list(range(10))


def test_transfers_in_place_are_not_bounded_but_all_waited_for() -> None:
    waited: list[int] = []
    flying = InFlight()
    for number in range(10):
        flying.add(Transfer(waited, number), torch.empty(0), staged=False)
    assert waited == []
    flying.drain()
    assert waited == list(range(10))


class Wire:
    """A channel within one process: what is sent can be received, in order and message by message."""

    def __init__(self) -> None:
        self.messages: collections.deque[Tensor] = collections.deque()

    def send(self, buffer: Tensor) -> Transfer:
        self.messages.append(buffer.clone())
        return Transfer([], 0)

    def receive(self, buffer: Tensor) -> Transfer:
        buffer.copy_(self.messages.popleft())
        return Transfer([], 0)


def test_a_stream_arrives_as_it_was_sent() -> None:
    sizes = [0, 7, DIRECT_BYTES, 1, *[DIRECT_BYTES - 1] * 9, 3, 2 * DIRECT_BYTES + 5, 0]
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    wire = Wire()
    send_ranges(pieces, wire.send, CPU)
    assert len(wire.messages) == len(plan_messages(sizes)) < len(sizes)
    received = [torch.zeros_like(piece) for piece in pieces]
    receive_ranges(received, wire.receive, CPU)
    assert not wire.messages
    assert all(map(torch.equal, received, pieces))


# -------------------------------------------------------------------------------------------------------- classes

KNOWN_ELEMENTWISE = [
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
]
NEVER_CUT = [
    torch.optim.Adafactor,
    torch.optim.Muon,
    torch.optim.SparseAdam,
    schedulefree.AdamWScheduleFree,
    pytorch_optimizer.Lamb,
    pytorch_optimizer.LARS,
    pytorch_optimizer.Lion,
]


@pytest.mark.parametrize("optimizer_class", KNOWN_ELEMENTWISE)
def test_torchs_elementwise_classes_are_known(optimizer_class: type[Optimizer]) -> None:
    check_class(optimizer_class, ZeroRedundancyOptimizer)
    assert is_elementwise(optimizer_class, None)
    assert not is_elementwise(optimizer_class, False)


@pytest.mark.parametrize("optimizer_class", NEVER_CUT)
def test_any_other_class_is_not_assumed_to_be_elementwise(optimizer_class: type[Optimizer]) -> None:
    check_class(optimizer_class, ZeroRedundancyOptimizer)
    assert not is_elementwise(optimizer_class, None)
    assert is_elementwise(optimizer_class, True)


@pytest.mark.parametrize("optimizer_class", KNOWN_ELEMENTWISE)
def test_a_known_class_updates_a_cut_tensor_bitwise_as_the_whole_one(optimizer_class: type[Optimizer]) -> None:
    torch.manual_seed(0)
    whole = torch.randn(1_000)
    cut = [whole[:128].clone(), whole[128:].clone()]
    plain, sharded = optimizer_class([whole], lr=0.1), optimizer_class(cut, lr=0.1)  # type: ignore[call-arg]
    for _ in range(3):
        whole.grad = torch.randn(1_000)
        cut[0].grad, cut[1].grad = whole.grad[:128].clone(), whole.grad[128:].clone()
        plain.step()
        sharded.step()
        assert whole.equal(torch.cat(cut))


def test_a_subclass_of_a_known_class_is_another_class() -> None:
    class Mine(torch.optim.AdamW):
        pass

    check_class(Mine, ZeroRedundancyOptimizer)
    assert not is_elementwise(Mine, None)


COMBINING = [
    torch.optim.LBFGS,
    pytorch_optimizer.Prodigy,
    pytorch_optimizer.DAdaptAdam,
    pytorch_optimizer.DAdaptAdaGrad,
    pytorch_optimizer.DAdaptAdan,
    pytorch_optimizer.DAdaptLion,
    pytorch_optimizer.DAdaptSGD,
    pytorch_optimizer.SAM,
]


@pytest.mark.parametrize("optimizer_class", COMBINING)
def test_a_class_that_combines_parameters_is_refused_with_the_reason(optimizer_class: type[Optimizer]) -> None:
    with pytest.raises(ValueError, match=rf"{optimizer_class.__name__} cannot be sharded exactly: it .*all "):
        check_class(optimizer_class, ZeroRedundancyOptimizer)


def test_a_subclass_of_a_class_that_combines_parameters_is_refused_too() -> None:
    class Mine(torch.optim.LBFGS):
        pass

    with pytest.raises(ValueError, match=r"Mine cannot be sharded exactly"):
        check_class(Mine, ZeroRedundancyOptimizer)


@pytest.mark.parametrize("value", [None, 3, "AdamW", torch.nn.Linear, torch.optim.AdamW([torch.ones(1)]), Optimizer])
def test_what_is_not_an_optimizer_class_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"optimizer_class must be .* such as torch\.optim\.AdamW, got "):
        check_class(value, ZeroRedundancyOptimizer)


def test_the_wrapper_cannot_wrap_itself() -> None:
    with pytest.raises(TypeError, match=r"optimizer_class must be the class to shard.*ZeroRedundancyOptimizer"):
        check_class(ZeroRedundancyOptimizer, ZeroRedundancyOptimizer)


class MyLamb(pytorch_optimizer.Lamb):
    """A user's variation."""


GLOBALLY_CLIPPING: dict[str, Callable[[], Optimizer]] = {
    "as a default": lambda: pytorch_optimizer.Lamb([torch.ones(1)], pre_norm=True, max_grad_norm=1.0),
    "unless told otherwise": lambda: pytorch_optimizer.Lamb([torch.ones(1)], pre_norm=True),
    "as a default that a group cannot change": lambda: pytorch_optimizer.Lamb(
        [{"params": [torch.ones(1)], "max_grad_norm": 0.0}], pre_norm=True, max_grad_norm=1.0
    ),
    "in a subclass": lambda: MyLamb([torch.ones(1)], pre_norm=True, max_grad_norm=1.0),
}


@pytest.mark.parametrize("kind", GLOBALLY_CLIPPING)
def test_lamb_is_refused_while_it_clips_by_the_norm_of_all_gradients(kind: str) -> None:
    with pytest.raises(ValueError, match=r"Lamb with max_grad_norm.*clip_grad_norm_"):
        check_options(GLOBALLY_CLIPPING[kind]())


def test_lamb_without_global_clipping_is_accepted() -> None:
    check_class(pytorch_optimizer.Lamb, ZeroRedundancyOptimizer)
    check_options(pytorch_optimizer.Lamb([torch.ones(1)], max_grad_norm=0.0))


def test_a_differentiable_optimizer_is_refused_with_its_group() -> None:
    groups: list[dict[str, Any]] = [{"params": [torch.ones(1)]}, {"params": [torch.ones(1)], "differentiable": True}]
    with pytest.raises(ValueError, match=r"differentiable=True \(parameter group 1\) is not supported"):
        check_options(torch.optim.AdamW(groups))
    check_options(torch.optim.AdamW(groups[:1], maximize=True))


# --------------------------------------------------------------------------------------------------------- params


def param(*shape: int) -> Parameter:
    return Parameter(torch.zeros(shape))


def same_objects(found: Sequence[object], expected: Sequence[object]) -> bool:
    return len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


W, B = param(2, 3), param(3)

ACCEPTED: dict[str, Callable[[], object]] = {
    "a list": lambda: [W, B],
    "a tuple": lambda: (W, B),
    "a generator": lambda: (item for item in (W, B)),
    "an iterator": lambda: iter([W, B]),
    "a dict's values": lambda: {"w": W, "b": B}.values(),
    "one group": lambda: [{"params": [W, B]}],
    "a group with a generator": lambda: [{"params": (item for item in (W, B))}],
    "a generator of groups": lambda: ({"params": [W, B]} for _ in range(1)),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_params_may_be_anything_that_gives_tensors_in_order(kind: str) -> None:
    (group,) = normalise(ACCEPTED[kind]())
    assert same_objects(group["params"], [W, B])
    assert isinstance(group["params"], list)
    assert "param_names" not in group


def test_groups_keep_their_options_and_one_tensor_stands_for_a_list() -> None:
    given_groups: list[dict[str, Any]] = [
        {"params": W, "lr": 0.1},
        {"params": iter([B]), "lr": 0.2, "mine": "kept"},
        {"params": []},
    ]
    before = [dict(group) for group in given_groups]
    first, second, empty = normalise(given_groups)
    assert same_objects(first["params"], [W])
    assert same_objects(second["params"], [B])
    assert (first["lr"], second["lr"], second["mine"], empty["params"]) == (0.1, 0.2, "kept", [])
    assert all(one is not other for one, other in zip((first, second, empty), given_groups, strict=True))
    assert [set(group) for group in given_groups] == [set(group) for group in before], "the caller's dicts are his"
    assert given_groups[0]["params"] is W


def test_named_parameters_keep_their_names() -> None:
    model = torch.nn.Linear(3, 2)
    (group,) = normalise(model.named_parameters())
    assert same_objects(group["params"], list(model.parameters()))
    assert group["param_names"] == ["weight", "bias"]
    (group,) = normalise([{"params": model.named_parameters(), "lr": 1.0}])
    assert group["param_names"] == ["weight", "bias"]
    tensors, specs = plan_params([group])
    assert [item.name for item in specs] == ["weight", "bias"]
    assert same_objects(tensors, list(model.parameters()))


def test_a_parameter_tied_by_its_module_appears_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    for params in (model.parameters(), model.named_parameters()):
        tensors, _ = plan_params(normalise(params))
        assert same_objects(tensors, [model[0].weight])


WRONG_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "a bare tensor": (lambda: W, r"params must be an iterable.*got torch\.FloatTensor"),
    "a number": (lambda: 3, r"params must be an iterable.*got .*int"),
    "None": (lambda: None, r"params must be an iterable.*got .*NoneType"),
    "text": (lambda: "weights", r"params must be an iterable.*got .*str"),
    "a bare dict": (lambda: {"params": [W]}, r"params must be an iterable.*got .*dict"),
    "a module": (lambda: torch.nn.Linear(1, 1), r"params must be an iterable.*Linear.*model\.parameters\(\)"),
    "a set": (lambda: {W, B}, r"params must be ordered, got a set"),
    "a number among tensors": (lambda: [W, 1.5], r"parameter 1 of group 0 is not a tensor but .*float"),
    "None among tensors": (lambda: [None, W], r"parameter 0 of group 0 is not a tensor but .*NoneType"),
    "a tensor after a dict": (lambda: [{"params": [W]}, B], r"mixes dicts and tensors: entry 1 is torch\.FloatTensor"),
    "a dict after a tensor": (lambda: [W, {"params": [B]}], r"mixes dicts and tensors: entry 0 is torch\.FloatTensor"),
    "a named number": (lambda: [("w", W), ("b", 3)], r"parameter 'b' is not a tensor but .*int"),
    "a list of lists": (lambda: [[W, B]], r"parameter 0 of group 0 is not a tensor but .*list"),
    "a group with a set": (lambda: [{"params": {W, B}}], r"params of parameter group 0 must be ordered, got a set"),
    "a group with a number": (lambda: [{"params": [W]}, {"params": 3}], r"parameter group 1 must be tensors.*int"),
    "a group with text": (lambda: [{"params": "w"}], r"parameter 0 of group 0 is not a tensor but .*str"),
}


@pytest.mark.parametrize("kind", WRONG_TYPES)
def test_params_of_the_wrong_type_are_refused_with_the_offender(kind: str) -> None:
    make, message = WRONG_TYPES[kind]
    with pytest.raises(TypeError, match=message):
        normalise(make())


def test_a_group_that_is_not_a_dict_is_refused() -> None:
    with pytest.raises(TypeError, match=r"parameter group 2 must be a dict, got list"):
        normalise_group([W], 2)


def shared_memory() -> list[Tensor]:
    memory = torch.zeros(10)
    return [Parameter(memory[:6]), Parameter(memory[4:])]


def conjugate() -> Tensor:
    return torch.zeros(2, dtype=torch.complex64).conj()


def managed_by_fsdp() -> Parameter:
    managed = param(2)
    managed._fsdp_flattened = True  # type: ignore[attr-defined]  # what FSDP puts on the parameters it manages
    return managed


def computed() -> Tensor:
    return param(2) * 2


def not_given() -> Iterator[Tensor]:
    return iter(())


WRONG_VALUES: dict[str, tuple[Callable[[], object], str]] = {
    "nothing": (list, r"params is empty"),
    "an empty generator": (not_given, r"params is empty"),
    "only empty groups": (lambda: [{"params": []}, {"params": ()}], r"groups but no parameter"),
    "a group without params": (lambda: [{"params": [W]}, {"lr": 1}], r"parameter group 1 has no 'params'.*'lr'"),
    "some names only": (lambda: [("w", W), B], r"parameter group 0 mixes named and unnamed"),
    "one object in two groups": (
        lambda: [{"params": [W]}, {"params": [B, W]}],
        r"'group1\[1\]' is in two groups \(also as 'group0\[0\]'\)",
    ),
    "two over one memory": (lambda: [("a", W), ("b", Parameter(W.detach()))], r"'a' and 'b' share memory"),
    "two that overlap": (shared_memory, r"'group0\[0\]' and 'group0\[1\]' share memory"),
    "expanded": (lambda: [W, torch.zeros(1).expand(5)], r"'group0\[1\]' does not fill its memory.*expanded"),
    "sliced": (lambda: [("w", torch.zeros(4, 4)[:, :2])], r"'w' does not fill its memory \(shape \(4, 2\)"),
    "sparse": (lambda: [("w", torch.zeros(3, 3).to_sparse())], r"'w' is not a dense tensor.*sparse"),
    "meta": (lambda: [("w", torch.zeros(3, device="meta"))], r"'w' is on the meta device"),
    "lazy": (lambda: torch.nn.LazyLinear(2).named_parameters(), r"'weight' is not materialised yet"),
    "conjugate": (lambda: [("w", conjugate())], r"'w' is a lazy conjugate"),
    "negative": (lambda: [("w", conjugate().imag)], r"'w' is a lazy conjugate or negative view"),
    "not a leaf": (lambda: [("w", computed())], r"'w' is not a leaf"),
    "managed by FSDP": (lambda: [("w", managed_by_fsdp())], r"'w' is managed by FSDP"),
}


@pytest.mark.parametrize("kind", WRONG_VALUES)
def test_parameters_that_cannot_be_sharded_are_refused_by_name(kind: str) -> None:
    make, message = WRONG_VALUES[kind]
    with pytest.raises(ValueError, match=message):
        plan_params(normalise(make()))


@distributed(1)
def test_parameters_that_are_sharded_already_are_refused_by_name(world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match=r"'w' is a DTensor"):
        plan_params(normalise([("v", param(2)), ("w", distribute_tensor(torch.zeros(4), mesh))]))
    model = torch.nn.Linear(3, 2)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"'weight' is a DTensor \(FSDP2"):
        plan_params(normalise(model.named_parameters()))


def test_dense_parameters_of_any_kind_are_described_in_order() -> None:
    params = [
        torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.zeros(3, 2, dtype=torch.complex64).t(),
        torch.zeros((), dtype=torch.bfloat16),
        torch.zeros(0, 4),
        torch.zeros(0, 4),
    ]
    tensors, specs = plan_params(normalise([{"params": params[:2]}, {"params": params[2:]}]))
    assert same_objects(tensors, params)
    assert [item.index for item in specs] == list(range(5))
    assert [item.group for item in specs] == [0, 0, 1, 1, 1]
    assert [item.shape for item in specs] == [tuple(tensor.shape) for tensor in params]
    assert [item.stride for item in specs] == [tensor.stride() for tensor in params]
    assert [item.dtype for item in specs] == [tensor.dtype for tensor in params]
    assert [item.name for item in specs] == ["group0[0]", "group0[1]", "group1[0]", "group1[1]", "group1[2]"]
    assert {item.device_ordinal for item in specs} == {0}


def test_neighbours_in_one_buffer_are_accepted() -> None:
    """Flat buckets (ours, or those of recurrent layers) hold several parameters side by side."""
    memory = torch.zeros(10)
    tensors, _ = plan_params(normalise([memory[5:], memory[:5]]))
    assert [tensor.storage_offset() for tensor in tensors] == [5, 0]


def test_options_are_told_in_words_that_equal_options_share() -> None:
    group = {"params": [W], "lr": torch.tensor(0.1), "betas": (0.9, [1]), "extra": {"a": None}, "mine": object()}
    again = {"mine": object(), "lr": torch.tensor(0.1), "betas": (0.9, [1]), "extra": {"a": None}, "params": [B]}
    assert options_text(group) == options_text(again)
    assert set(options_text(group)) == {"lr", "betas", "extra", "mine"}
    for key, value in {"lr": 0.1, "betas": [0.9, [1]], "extra": {"a": 0}}.items():
        assert options_text({**group, key: value}) != options_text(group)


# The room in which messages are received


@given(st.lists(st.integers(0, 300), max_size=60).map(tuple), st.integers(1, 2000))
def test_messages_that_are_not_used_yet_never_overlap(sizes: tuple[int, ...], room: int) -> None:
    found = staging_slots(sizes, room)
    assert len(found) == len(sizes)
    for number, (place, size) in enumerate(zip(found, sizes, strict=True)):
        assert place.offset + size <= max(room, 2 * max(sizes)), "it stays in the room"
        assert place.after < number, "nothing waits for itself or for what comes later"
        for earlier in range(place.after + 1, number):
            start = found[earlier].offset
            assert start + sizes[earlier] <= place.offset or place.offset + size <= start or size * sizes[earlier] == 0
    if sum(sizes) <= room:
        assert all(place.after == -1 for place in found), "everything has room at once"


@given(st.integers(1, 300), st.integers(1, 60))
def test_while_one_message_is_used_the_next_of_its_size_can_arrive(size: int, count: int) -> None:
    assert all(place.after < number - 1 for number, place in enumerate(staging_slots((size,) * count, 1)) if number)


@given(st.integers(1, 3000), st.sampled_from([1, 2, 4, 8, 16]))
def test_messages_of_all_ranks_fit_twice_into_the_room_but_are_never_too_short(ranks: int, itemsize: int) -> None:
    nbytes = message_length(ranks, itemsize) * itemsize
    assert SHORTEST_BYTES <= nbytes <= LONGEST_BYTES
    assert 2 * (ranks - 1) * nbytes <= STAGED_BYTES or nbytes == SHORTEST_BYTES


@given(st.lists(st.integers(0, 5_000_000), max_size=5), st.integers(1, 20))
def test_stretches_are_cut_into_messages_in_order(sizes: list[int], ranks: int) -> None:
    lengths = message_lengths(sizes, ranks, 4)
    assert sum(lengths) == sum(sizes)
    assert all(0 < length <= message_length(ranks, 4) for length in lengths)
    for size in sizes:
        taken = 0
        while taken < size:
            taken += lengths.pop(0)
        assert taken == size


# ---------------------------------------------------------------------------------------------------- buffers


def test_the_buffers_of_a_module_are_those_that_torch_finds() -> None:
    """In its order, each once, also those of shared submodules, added later, or registered as nothing."""
    shared, own = nn.BatchNorm2d(2), torch.zeros(1)
    inner = nn.Sequential(shared, nn.Linear(2, 2), shared)
    module = nn.Sequential(nn.BatchNorm1d(3), inner, nn.BatchNorm1d(4))
    module.register_buffer("own", own)
    module.register_buffer("nothing", None)
    module[2].register_buffer("again", own)
    module.register_module("no module", None)
    for _ in range(2):
        assert [id(buffer) for buffer in buffers_of(module)] == [id(buffer) for buffer in module.buffers()]
        inner.append(nn.BatchNorm1d(5))
