"""Writes and reads one rank's safetensors file, block by block.

The safetensors library can read these files. Its own writer copies all tensors into one more buffer and does not flush
the file, so the (simple) format is written here: the length of a JSON header, the header, the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint import storage
from onecopy.checkpoint.manifest import BLOCK_BYTES, SAFETENSORS_NAMES, Entry, File, Manifest, Piece
from onecopy.checkpoint.storage import Location, ReadInto
from onecopy.errors import CheckpointError, CorruptCheckpointError


@dataclass(frozen=True, slots=True)
class LivePiece:
    """Elements ``[start, stop)`` of a tensor that this rank writes, with ``flat``, the memory that holds them."""

    key: str
    entry: Entry
    start: int
    stop: int
    flat: Tensor

    @property
    def name(self) -> str:
        """The name of the piece in the file."""
        whole = self.stop - self.start == self.entry.numel
        return self.key if whole else f"{self.key}[{self.start}:{self.stop}]"


def write_file(path: Location, pieces: Sequence[LivePiece]) -> tuple[File, list[Piece]]:
    """Write a file and store it durably; return the descriptions of the file and, in order, of the pieces."""
    # Larger elements first: then every piece is aligned.
    order = sorted(range(len(pieces)), key=lambda number: -pieces[number].flat.element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for number in order:
        flat = pieces[number].flat
        nbytes = flat.numel() * flat.element_size()
        header[pieces[number].name] = {
            "dtype": SAFETENSORS_NAMES[flat.dtype],
            "shape": [flat.numel()],
            "data_offsets": [end, end + nbytes],
        }
        offsets[number] = end
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    checksums: dict[int, list[int]] = {number: [] for number in order}
    with storage.create(path) as write:
        write(front)
        for number in order:
            flat = pieces[number].flat
            for block in flat.view(torch.uint8).split(BLOCK_BYTES) if flat.numel() else ():
                host = block.cpu()
                memory = _memory_of(host)
                write(memory)
                checksums[number].append(zlib.crc32(memory))
    described = [
        Piece(path.name, len(front) + offsets[number], piece.start, piece.stop, tuple(checksums[number]))
        for number, piece in enumerate(pieces)
    ]
    return File(len(front) + end, len(front), zlib.crc32(front)), described


def _memory_of(flat: Tensor) -> memoryview:
    """Return contiguous CPU memory as bytes; the tensor must outlive the result."""
    nbytes = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())).cast("B")


@contextlib.contextmanager
def _reading(path: Location) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptCheckpointError(f"{path} is missing") from None
    except OSError as error:
        if error.errno not in storage.DAMAGE:
            raise
        raise CorruptCheckpointError(f"{path} cannot be read: {error}") from error


def _checked_size(path: Location, written: int | None = None) -> int:
    """Return the size of a file; raise if it is missing, not a regular file, or not as long as it was written."""
    with _reading(path):
        size = storage.size_of(path)
    if size is None:
        raise CorruptCheckpointError(f"{path} is not a regular file")
    if written not in (None, size):
        raise CorruptCheckpointError(f"{path} has {size} bytes, but {written} were written")
    return size


def read_whole(path: Location, limit: int) -> bytes:
    """Return the content of a small regular file; raise :class:`CorruptCheckpointError` if it cannot be read."""
    storage.check_supported(path)
    size = _checked_size(path)
    if size > limit:
        raise CorruptCheckpointError(f"{path} has {size} bytes, and at most {limit} are read")
    with _reading(path), storage.open_to_read(path) as read_into:
        content = bytearray(size)
        return bytes(content[: read_into(memoryview(content), 0)])


class Reader:
    """Reads the files of a checkpoint; each file is opened once and stays open until the end of the ``with`` block."""

    def __init__(self, folder: Location, files: Mapping[str, File]) -> None:
        self._folder = folder
        self._files = files
        self._open: dict[str, ReadInto] = {}
        self._block = bytearray(BLOCK_BYTES)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def check_sizes(self) -> None:
        """Raise if a file is missing, not a regular file, or not as long as it was written; no file is opened."""
        for name, file in self._files.items():
            _checked_size(self._folder / name, file.size)

    def opened(self, name: str) -> ReadInto:
        """Open a file, or return it if it is open; raise if its size or header is not as it was written.

        A local file that is open can be read even if another process removes it.
        """
        if name in self._open:
            return self._open[name]
        path, expected = self._folder / name, self._files[name]
        _checked_size(path, expected.size)
        with _reading(path):
            read_into = self._stack.enter_context(storage.open_to_read(path))
            checksum = 0
            for offset in range(0, expected.header, BLOCK_BYTES):
                part = memoryview(self._block)[: min(BLOCK_BYTES, expected.header - offset)]
                read_into(part, offset)
                checksum = zlib.crc32(part, checksum)
        if checksum != expected.crc32:
            raise CorruptCheckpointError(f"{path} is damaged: the checksum of its header does not match")
        self._open[name] = read_into
        return read_into

    def read(self, key: str, entry: Entry, start: int, stop: int, flat: Tensor | None = None) -> None:
        """Read elements ``[start, stop)`` of a tensor, check them, and write them into flat memory if it is given.

        Whole blocks are read straight into CPU memory of the same dtype. If this raises, the memory is partly written.
        """
        dtype = entry.torch_dtype
        direct = (
            flat is not None
            and flat.device.type == "cpu"
            and flat.dtype == dtype
            and not (flat.is_conj() or flat.is_neg())
        )
        for piece, number, low, high in _blocks_between(entry, start, stop):
            first, last = max(low, start), min(high, stop)
            target = None if flat is None else flat[first - start : last - start]
            if target is not None and direct and (first, last) == (low, high):
                self._read(piece, number, key, low, high, _memory_of(target))
                continue
            content = memoryview(self._block)[: (high - low) * dtype.itemsize]
            self._read(piece, number, key, low, high, content)
            if target is not None:
                target.copy_(torch.frombuffer(content, dtype=dtype)[first - low : last - low])

    def _read(self, piece: Piece, number: int, key: str, low: int, high: int, content: memoryview) -> None:
        """Read one block, elements ``[low, high)`` of a tensor, into memory, and compare it with its checksum there."""
        path = self._folder / piece.file
        read_into = self.opened(piece.file)
        with _reading(path):
            count = read_into(content, piece.offset + number * BLOCK_BYTES)
        if count != len(content) or zlib.crc32(content) != piece.crc32[number]:
            raise CorruptCheckpointError(
                f"{path} is damaged: elements {low} to {high} of {key!r} do not match their checksum"
            )


def _blocks_between(entry: Entry, start: int, stop: int) -> Iterator[tuple[Piece, int, int, int]]:
    """Yield the blocks that have elements of ``[start, stop)``: the piece, the number in it, and the block's range."""
    per_block = BLOCK_BYTES // entry.torch_dtype.itemsize
    for piece in entry.pieces:
        first, last = max(start, piece.start), min(stop, piece.stop)
        if first < last:
            for number in range((first - piece.start) // per_block, -(-(last - piece.start) // per_block)):
                low = piece.start + number * per_block
                yield piece, number, low, min(low + per_block, piece.stop)


def new_tensor(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any, key: str) -> Tensor:
    """Return uninitialized memory for a saved tensor; raise :class:`CheckpointError` if there is not enough."""
    try:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(f"there is no memory for {key!r}, a {dtype} of shape {tuple(shape)}: {error}") from error


def whole_tensor(reader: Reader, manifest: Manifest, key: str) -> Tensor:
    """Read one tensor from all its pieces."""
    entry = manifest.tensors[key]
    tensor = new_tensor(entry.shape, entry.stride, entry.torch_dtype, "cpu", key)
    reader.read(key, entry, 0, entry.numel, tensor.as_strided((entry.numel,), (1,)))
    return tensor
