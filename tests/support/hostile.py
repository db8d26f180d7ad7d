"""Checkpoints that an attacker has written: every checksum is right, and anything else may be wrong."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nested._internal.nested_tensor import NestedTensor
from torch.optim import AdamW

from onecopy.checkpoint import load, save
from onecopy.errors import CheckpointError

NAME = "rank-00000.safetensors"
LONGEST = 20.0
"""Seconds after which a load counts as one that hangs."""


class Pair:
    """A small model and its optimizer, whose state is loaded."""

    def __init__(self, seed: int = 0, width: int = 32) -> None:
        torch.manual_seed(seed)
        self.linear, norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.model = nn.Sequential(self.linear, norm)
        self.model.register_buffer("seen", torch.arange(6.0).view(2, 3))
        self.optimizer = AdamW([{"params": self.linear.parameters()}, {"params": norm.parameters()}], lr=0.1)

    def step(self) -> None:
        self.model(torch.ones(1, self.linear.in_features)).square().sum().backward()
        self.optimizer.step()

    def save(self, root: Path | str, step: int = 1, **options: Any) -> Path:
        extra = {"list": [1, 2.5, None, ("a", torch.arange(5))], "nan": float("nan"), "deep": {3: [[[torch.ones(2)]]]}}
        return save(root, step, model=self.model, optimizer=self.optimizer, extra=extra, **options)

    def load(self, source: Path | str, **options: Any) -> Any:
        return load(source, model=self.model, optimizer=self.optimizer, **options)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a load changes, by the key that it has in a checkpoint."""
        found = {f"model/{name}": value for name, value in self.model.state_dict().items()}
        names = {id(param): name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    found[f"optimizer.0/{names[id(param)]}/{key}"] = value
        return found


def trained() -> Pair:
    pair = Pair()
    pair.step()
    return pair


FRONT = b'{"crc32":"00000000",'


def seal(text: bytes) -> bytes:
    """Return the text of a manifest with the checksum that fits, in the place of the one that it begins with."""
    blank = FRONT + text[len(FRONT) :]
    return blank.replace(b"00000000", b"%08x" % zlib.crc32(blank), 1)


def content_of(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint as JSON data, without its checksum."""
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    del content["crc32"]
    return content


def put_content(folder: Path, content: Any) -> None:
    """Write the manifest of a checkpoint from JSON data, with the checksum that fits."""
    (folder / "manifest.json").write_bytes(seal(FRONT + json.dumps(content, separators=(",", ":")).encode()[1:]))


def reseal(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a checkpoint as JSON data, and give it the right checksum."""
    content = content_of(folder)
    change(content)
    put_content(folder, content)


def reseal_text(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the text of a manifest, and give it the right checksum."""
    path = folder / "manifest.json"
    path.write_bytes(seal(change(path.read_bytes())))


def rename_file(name: str) -> Callable[[dict[str, Any]], object]:
    """Let the manifest call a file otherwise."""

    def change(content: dict[str, Any]) -> None:
        (described,) = content["files"].values()
        content["files"] = {name: described}
        for entry in content["tensors"].values():
            for piece in entry["pieces"]:
                piece["file"] = name

    return change


def everything_in_one_place(content: dict[str, Any]) -> None:
    """Many tensors of the same bytes, so that a small file needs much memory."""
    for number in range(1000):
        content["tensors"][f"rank0/{number}"] = content["tensors"]["model/0.weight"]
    content["per_rank"][0] = ["dict", [["all", ["list", [["tensor", f"rank0/{n}"] for n in range(1000)]]]]]


def share_state(content: dict[str, Any]) -> None:
    """Two entries of the state in the same memory."""
    tree = content["optimizers"][0]["state"]["0.weight"]
    tree[1][1][1] = tree[1][2][1]


def nested(depth: int) -> Any:
    return ["list", [nested(depth - 1)]] if depth else None


def update(*path: Any, value: Any) -> Callable[[dict[str, Any]], object]:
    """Set one value of a manifest."""

    def change(content: Any) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


WEIGHT = ("tensors", "model/0.weight")
PIECE = (*WEIGHT, "pieces", 0)
OPTIMIZER = ("optimizers", 0)

ATTACKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a name that leaves the directory": rename_file(f"../secret/{NAME}"),
    "a device": rename_file("/dev/zero"),
    "a name with a null byte": rename_file("rank-00000\0.safetensors"),
    "digits of another alphabet": rename_file("rank-" + chr(0x660) * 5 + ".safetensors"),
    "a file that is longer than said": update("files", NAME, "size", value=1000),
    "a header of a terabyte": update("files", NAME, "header", value=1 << 40),
    "a piece beyond the file": update(*PIECE, "offset", value=1 << 40),
    "a piece before the file": update(*PIECE, "offset", value=-8),
    "a piece that begins later": update(*PIECE, "start", value=64),
    "a piece in the header": update(*PIECE, "offset", value=0),
    "a tensor of a terabyte": update(*WEIGHT, "shape", value=[1 << 20, 1 << 18]),
    "a tensor of too many elements": update(*WEIGHT, "shape", value=[1 << 62] * 9),
    "a negative shape": update(*WEIGHT, "shape", value=[-32, -32]),
    "strides with gaps": update(*WEIGHT, "stride", value=[64, 2]),
    "strides that overlap": update(*WEIGHT, "stride", value=[0, 0]),
    "negative strides": update(*WEIGHT, "stride", value=[-32, -1]),
    "too few strides": update(*WEIGHT, "stride", value=[1]),
    "a dtype that is a function": update(*WEIGHT, "dtype", value="load"),
    "a dtype that is not stored": update(*WEIGHT, "dtype", value="complex128"),
    "too few checksums": update(*PIECE, "crc32", value=[]),
    "a checksum that is no number": update(*PIECE, "crc32", value=["0"]),
    "the same bytes a thousand times": everything_in_one_place,
    "state that shares memory": share_state,
    "a negative step": update("step", value=-1),
    "a step of many digits": update("step", value=10**400),
    "no ranks": update("world_size", value=0),
    "extra that is a list": update("extra", value=["list", []]),
    "a value of an unknown type": update("extra", value=["dict", [["a", ["eval", []]]]]),
    "a key that is a list": update("extra", value=["dict", [[["list", []], 1]]]),
    "a key twice": update("extra", value=["dict", [["a", 1], ["a", 2]]]),
    "a dtype that torch does not have": update("extra", value=["dict", [["a", ["dtype", ["load"]]]]]),
    "a class that is not safe": update(
        "extra", value=["dict", [["a", ["subclass", ["os.system", 0, ["dict", []], 0, 0]]]]]
    ),
    "too deep": update("extra", value=["dict", [["deep", nested(200)]]]),
    "a tensor that is not there": update("extra", value=["dict", [["a", ["tensor", "extra/9"]]]]),
    "a tensor of another tree": update("extra", value=["dict", [["a", ["tensor", "model/0.weight"]]]]),
    "options with parameters": update(*OPTIMIZER, "groups", 0, "options", value=["dict", [["params", ["list", []]]]]),
    "a parameter in two groups": update(*OPTIMIZER, "groups", 0, "params", value=["0.weight", "0.weight"]),
    "state of no parameter": update(*OPTIMIZER, "state", "other", value=["dict", []]),
    "a weight that is no tensor": update("model", "0.weight", value=3),
    "a frozen parameter with its value": update(
        "base", value={"0.weight": {"dtype": "float32", "shape": [32, 32], "digest": ""}}
    ),
    "a frozen parameter of no shape": update("base", value={"x": {"dtype": "float32", "shape": [-1], "digest": ""}}),
    "no optimizers": update("optimizers", value=None),
    "blocks of another size": update("block_bytes", value=1),
}
"""Changes of a manifest, each of which must be refused."""

TEXTS: dict[str, Callable[[bytes], bytes]] = {
    "a name twice": lambda text: text[:-1] + b',"step":7}',
    "NaN": lambda text: text.replace(b'"step":1', b'"step":NaN', 1),
    "a float beyond all": lambda text: text.replace(b'"step":1', b'"step":1e999', 1),
    "lists in lists": lambda text: text[:-1] + b',"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of many digits": lambda text: text[:-1] + b',"more":' + b"7" * 100_000 + b"}",
    "bytes that are no text": lambda text: text[:-1] + b',"more":"\xff\xfe"}',
    "two bytes for each character": lambda text: text[:20] + text[20:].decode().encode("utf-16"),
    "a list": lambda text: text[:20] + b'"a":1}' + b"[]",
}
"""Changes of a manifest's text, each of which must be refused."""


def terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


SUBSTITUTES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to it": lambda path: path.symlink_to(path.parent.parent / "away"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a directory": lambda path: path.mkdir(),
    "a terabyte of zeros": terabyte,
}


def substitute(folder: Path, what: str, name: str) -> None:
    """Put something else in the place of a file of the checkpoint."""
    shutil.move(folder / name, folder.parent / "away")
    SUBSTITUTES[what](folder / name)


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 32, 64, 1024, 1 << 20, 1 << 31, 1 << 32, 1 << 62, 1 << 63, -(1 << 63), 10**30),
    *(0.5, -2.5, 1e308, "", "a", "0.weight", "model/0.weight", "model/0.bias", "extra/0", "\0", "\ud800"),
    *(NAME, "../" + NAME, "/dev/zero", "rank-00001.safetensors", "float32", "int64", "uint8", "float64", "load"),
    *([], {}, [[]], [None, None], [32, 32], [1, 32], [64, 2], [32, 1]),
    *(["tensor", "model/0.weight"], ["tensor", "extra/0"], ["tensor", 0], ["float", "nan"], ["float", "1"]),
    *(["dict", []], ["list", []], ["tuple", [1]], ["Size", [-1]], ["dtype", ["float32"]], ["Counter", [["a", 1]]]),
    ["subclass", [f"{NestedTensor.__module__}.NestedTensor", ["dict", []], ["dict", []], ["list", []], ["list", []]]],
)
"""Values that a random attack puts somewhere."""


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON data."""
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


def mutate(content: Any, generator: random.Random) -> Any:
    """Change one to three random values of a manifest."""
    made = copy.deepcopy(content)
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        everywhere = list(places(made))
        chosen, other = generator.choice(everywhere), generator.choice(everywhere)
        parent = made
        for name in chosen[:-1]:
            parent = parent[name]
        name, action = chosen[-1], generator.randrange(6)
        if action == 0:
            del parent[name]
        elif action == 1 and type(parent[name]) is int:
            parent[name] += generator.choice((-64, -8, -4, -1, 1, 4, 8, 64, 4096))
        elif action == 2:
            value = made
            for step in other:
                value = value[step]
            parent[name] = copy.deepcopy(value)
        elif action == 3 and isinstance(parent, list):
            parent.insert(name, copy.deepcopy(generator.choice(VALUES)))
        elif action == 4 and isinstance(parent, dict):
            parent[generator.choice(("", "a", "step", NAME, "0.weight", "model/0.weight"))] = parent.pop(name)
        else:
            parent[name] = copy.deepcopy(generator.choice(VALUES))
    return made


@dataclass
class Seen:
    """What came of attacks; ``peak`` is the most memory in bytes that a load took beyond the memory before it."""

    tried: int = 0
    refused: int = 0
    loaded: int = 0
    slowest: float = 0.0
    peak: int = 0
    problems: list[str] = field(default_factory=list)


_opened: list[list[str]] = []


@functools.cache  # once, because it cannot be removed
def _add_hook() -> None:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if _opened and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            _opened[-1].append(os.fsdecode(arguments[0]))

    sys.addaudithook(audit)


@contextlib.contextmanager
def opened_files() -> Iterator[list[str]]:
    """The paths of all files that this process opens in the meantime."""
    _add_hook()
    _opened.append([])
    try:
        yield _opened[-1]
    finally:
        _opened.pop()


@contextlib.contextmanager
def time_limit(seconds: float = LONGEST) -> Iterator[None]:
    """Raise in the main thread if something takes longer, such as waiting for a FIFO."""

    def stop(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def little_memory(nbytes: int = 256 << 20) -> Iterator[None]:
    """Let this process use only so much more memory than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memory(name: str) -> int:
    """A value of ``/proc/self/status`` in bytes: VmRSS is the memory now, VmHWM its peak since the last reset."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def attempt(folder: Path, pair: Pair, seen: Seen, what: str) -> CheckpointError | None:
    """Load a checkpoint of an attacker; note whether it was refused, and what must not happen. Return the refusal."""
    seen.tried += 1
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, begun = memory("VmRSS"), time.monotonic()
    problem, refusal = "", None
    with opened_files() as opened:
        try:
            with time_limit():
                pair.load(folder)
            seen.loaded += 1
            problem = difference(folder, pair)
        except CheckpointError as error:
            seen.refused += 1
            refusal = error
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    seen.slowest = max(seen.slowest, time.monotonic() - begun)
    seen.peak = max(seen.peak, memory("VmHWM") - before)
    outside = [
        path
        for path in opened
        if not os.path.abspath(path).startswith(f"{folder}{os.sep}")
        and not path.endswith((".py", ".pyc"))
        and Path(path) not in (folder, folder.parent)
    ]
    if outside:
        problem += f" opened {outside[:3]}"
    if problem:
        seen.problems.append(f"{what}: {problem}")
    return refusal


def difference(folder: Path, pair: Pair) -> str:
    """Say which tensor is not as the files hold it, or nothing. The files are read in the plainest way, unchecked."""
    content = content_of(folder)
    for key, value in pair.tensors().items():
        source = content["model"][key.removeprefix("model/")][1] if key.startswith("model/") else key
        if source not in content["tensors"]:
            continue  # the state of a parameter may have fewer entries, and then there are none of these
        entry, data = content["tensors"][source], b""
        dtype = getattr(torch, entry["dtype"])
        for piece in entry["pieces"]:
            stop = piece["offset"] + dtype.itemsize * (piece["stop"] - piece["start"])
            data += (folder / piece["file"]).read_bytes()[piece["offset"] : stop]
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0)
        expected = flat.as_strided(entry["shape"], entry["stride"]).to(value.dtype)
        if value.shape != expected.shape or not torch.equal(value.nan_to_num(), expected.nan_to_num()):
            return f" {key} is not what the files hold"
    return ""


def attack_at_random(folder: Path, count: int, seed: int, seen: Seen) -> None:
    """Load a checkpoint with this many random changes of its manifest, each with the right checksum."""
    content, generator = content_of(folder), random.Random(seed)
    try:
        for number in range(count):
            pair = Pair(1, width=content["tensors"]["model/0.weight"]["shape"][0])
            put_content(folder, mutate(content, generator))
            attempt(folder, pair, seen, f"seed {seed}, number {number}")
    finally:
        put_content(folder, content)
