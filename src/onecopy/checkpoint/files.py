"""Writes and reads one rank's safetensors file, block by block.

The safetensors library can read these files. Its own writer copies all tensors into one more buffer and does not flush
the file, so the (simple) format is written here: the length of a JSON header, the header, the bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from onecopy.checkpoint import disk
from onecopy.checkpoint.manifest import BLOCK_BYTES, Entry, File, Manifest, Piece
from onecopy.common.flat_views import as_bytes
from onecopy.errors import CorruptCheckpointError

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


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


def check_storable(tensor: Tensor, where: str) -> None:
    """Raise ``TypeError`` if a tensor cannot be saved; ``where`` names it in the message."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        raise TypeError(f"{where} is a {tensor.layout} tensor on {tensor.device}, which cannot be saved")
    if tensor.dtype not in _NAMES:
        raise TypeError(f"{where} is a tensor of type {tensor.dtype}, which cannot be saved")


def write_file(path: Path, pieces: Sequence[LivePiece]) -> tuple[File, list[Piece]]:
    """Write a file and flush it to the disk; return the descriptions of the file and, in order, of the pieces."""
    # Larger elements first: then every piece is aligned.
    order = sorted(range(len(pieces)), key=lambda number: -pieces[number].flat.element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for number in order:
        piece = pieces[number]
        nbytes = piece.flat.numel() * piece.flat.element_size()
        header[piece.name] = {
            "dtype": _NAMES[piece.flat.dtype],
            "shape": [piece.flat.numel()],
            "data_offsets": [end, end + nbytes],
        }
        offsets[number] = end
        end += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = len(text).to_bytes(8, "little") + text
    checks: dict[int, tuple[int, ...]] = {}
    descriptor = disk.create(path)
    try:
        disk.write(descriptor, front)
        with disk.EarlyFlush(descriptor) as early:
            for number in order:
                checks[number] = tuple(_write_blocks(descriptor, pieces[number].flat, early))
        disk.flush(descriptor)
    finally:
        os.close(descriptor)
    file = File(len(front) + end, len(front), zlib.crc32(front))
    described = [
        Piece(path.name, len(front) + offsets[number], piece.start, piece.stop, checks[number])
        for number, piece in enumerate(pieces)
    ]
    return file, described


def _write_blocks(descriptor: int, flat: Tensor, early: disk.EarlyFlush) -> Iterator[int]:
    """Write flat memory in blocks; yield the checksum of each block."""
    for block in as_bytes(flat).split(BLOCK_BYTES) if flat.numel() else ():
        host = block.cpu()
        memory = _memory_of(host)
        disk.write(descriptor, memory)
        early.wrote(host.numel())
        yield zlib.crc32(memory)


def _memory_of(flat: Tensor) -> memoryview:
    """Return contiguous CPU memory as bytes; the tensor must outlive the result."""
    nbytes = flat.numel() * flat.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(flat.data_ptr())).cast("B")


class Reader:
    """Reads the files of a checkpoint; each file is opened once and stays open until the end of the ``with`` block."""

    def __init__(self, folder: Path, files: Mapping[str, File]) -> None:
        disk.check_supported()
        self._folder = folder
        self._files = files
        self._open: dict[str, int] = {}
        self._block = bytearray(BLOCK_BYTES)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _descriptor(self, name: str) -> int:
        """Open a file, or return it if it is open; raise if its size or header is not as it was written."""
        if name not in self._open:
            path, expected = self._folder / name, self._files[name]
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{path} is missing") from None
            self._stack.callback(os.close, descriptor)
            size = os.fstat(descriptor).st_size
            if size != expected.size:
                raise CorruptCheckpointError(f"{path} has {size} bytes, but {expected.size} were written")
            header = bytearray(expected.header)
            disk.read_into(descriptor, memoryview(header), 0)
            if zlib.crc32(header) != expected.crc32:
                raise CorruptCheckpointError(f"{path} is damaged: the checksum of its header does not match")
            self._open[name] = descriptor
        return self._open[name]

    def check_file(self, name: str) -> None:
        """Raise if a file is missing or its size or header is not as it was written."""
        self._descriptor(name)

    def blocks(self, key: str, entry: Entry, start: int, stop: int) -> Iterator[tuple[int, int, Tensor]]:
        """Read and check elements ``[start, stop)`` of a tensor in memory order, block by block.

        Yields the start, the stop and the values of each part. The next part overwrites the values.
        """
        for piece in entry.pieces:
            if piece.start < stop and piece.stop > start:
                yield from self._blocks_of(piece, key, entry, max(start, piece.start), min(stop, piece.stop))

    def fill(self, flat: Tensor, key: str, entry: Entry, start: int, stop: int) -> None:
        """Read elements ``[start, stop)`` of a tensor into flat memory; :meth:`blocks` has checked them before."""
        dtype = entry.torch_dtype
        direct = flat.device.type == "cpu" and flat.dtype == dtype and not (flat.is_conj() or flat.is_neg())
        for piece in entry.pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            step = high - low if direct else BLOCK_BYTES // dtype.itemsize
            for first in range(low, high, step):
                target = flat[first - start : min(first + step, high) - start]
                nbytes = target.numel() * dtype.itemsize
                memory = _memory_of(target) if direct else memoryview(self._block)[:nbytes]
                offset = piece.offset + (first - piece.start) * dtype.itemsize
                if disk.read_into(self._descriptor(piece.file), memory, offset) != nbytes:
                    raise CorruptCheckpointError(f"{self._folder / piece.file} ends within {key!r}")
                if not direct:
                    target.copy_(torch.frombuffer(memory, dtype=dtype))

    def _blocks_of(
        self, piece: Piece, key: str, entry: Entry, start: int, stop: int
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Read and check elements ``[start, stop)`` of a tensor, all of which are in one piece."""
        dtype = entry.torch_dtype
        per_block = BLOCK_BYTES // dtype.itemsize
        descriptor = self._descriptor(piece.file)
        for number in range((start - piece.start) // per_block, -(-(stop - piece.start) // per_block)):
            low = piece.start + number * per_block
            high = min(low + per_block, piece.stop)
            nbytes = (high - low) * dtype.itemsize
            content = memoryview(self._block)[:nbytes]
            count = disk.read_into(descriptor, content, piece.offset + (low - piece.start) * dtype.itemsize)
            if count != nbytes or zlib.crc32(content) != piece.crc32[number]:
                raise CorruptCheckpointError(
                    f"{self._folder / piece.file} is damaged: elements {low} to {high} of {key!r} do not match their "
                    "checksum"
                )
            first, last = max(low, start), min(high, stop)
            yield first, last, torch.frombuffer(content, dtype=dtype)[first - low : last - low]


def whole_tensor(reader: Reader, manifest: Manifest, key: str) -> Tensor:
    """Read one tensor from all its pieces."""
    entry = manifest.tensors[key]
    tensor = torch.empty_strided(entry.shape, entry.stride, dtype=entry.torch_dtype)
    flat = tensor.as_strided((entry.numel,), (1,))
    for first, last, part in reader.blocks(key, entry, 0, entry.numel):
        flat[first:last].copy_(part)
    return tensor
