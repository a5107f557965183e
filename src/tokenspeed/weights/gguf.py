"""The GGUF container: metadata, and tensors mapped into memory."""

from __future__ import annotations

import mmap
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from tokenspeed.types import ConfigError
from tokenspeed.weights.fields import Fields
from tokenspeed.weights.gguf_blocks import row_bytes

MetadataValue = bool | int | float | str | list[str] | np.ndarray

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where a tensor lies."""

    shape: tuple[int, ...]
    """Row-major: the last axis is contiguous (GGUF stores it reversed)."""
    kind: GGMLQuantizationType
    start: int
    """Of its first byte, from the file's beginning."""
    nbytes: int


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    def need(self, nbytes: int) -> int:
        """Steps over `nbytes` and returns where they begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise ConfigError(f"{self.name} is cut off inside its header; download it again")
        return start

    def number(self, form: struct.Struct) -> int:
        return form.unpack_from(self.data, self.need(form.size))[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """`count` strings. A vocabulary has hundreds of thousands, so this loop holds nothing but locals."""
        data, at, length_of, found = self.data, self.at, _U64.unpack_from, list[str]()
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0]
                found.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ConfigError(
                f"{self.name} is damaged: a text in its header cannot be read; download it again"
            ) from error
        self.need(at - self.at)
        return found

    def value(self, key: str) -> MetadataValue:
        kind = self.number(_U32)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(key)
        return self.number(self._scalar(key, kind))

    def _scalar(self, key: str, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ConfigError(f"{self.name} is damaged: {key!r:.60} is of the unknown type {kind}; download it again")
        return _SCALARS[kind]

    def _array(self, key: str) -> MetadataValue:
        kind, count = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            return self.texts(count)
        form = self._scalar(key, kind)
        start = self.need(count * form.size)
        return np.frombuffer(self.data, np.dtype(form.format), count, start)


class GGUFFile:
    """An open GGUF container (version 2 or 3, little-endian). Tensors are memory-mapped and read when asked for.

    Args:
      path: the file.
      header_only: accept a file whose tensor data is missing or cut off.

    Raises:
      ConfigError: the file is missing, foreign, damaged or cut off; or of a version or tensor type that is not supported.
    """

    path: Path
    metadata: dict[str, MetadataValue]
    """Arrays of strings are lists; other arrays are numpy."""
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path, *, header_only: bool = False) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ConfigError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(self._data, str(path))
        num_tensors, num_keys = self._read_head(cursor)
        self.metadata = {(key := cursor.text()): cursor.value(key) for _ in range(num_keys)}
        self.tensors = self._read_tensors(cursor, num_tensors)
        if not header_only:
            self._check_extents()

    def _read_head(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it begins with {self._data[:4]!r} instead of b'GGUF'")
        cursor.need(4)
        version = cursor.number(_U32)
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            what = "big-endian" if big_endian else f"of version {version}"
            raise ConfigError(
                f"{self.path} is a GGUF file {what}; little-endian ones of versions 2 and 3 are supported"
            )
        return cursor.number(_U64), cursor.number(_U64)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        found = {(name := cursor.text()): self._read_tensor(cursor, name) for _ in range(count)}
        alignment = Fields(self.metadata, str(self.path)).get("general.alignment", int) or 32
        base = -(-cursor.at // alignment) * alignment
        return {name: info._replace(start=base + info.start) for name, info in found.items()}

    def _read_tensor(self, cursor: _Cursor, name: str) -> TensorInfo:
        rank = cursor.number(_U32)
        if rank > 4:
            raise ConfigError(f"{self.path} is damaged: {name!r:.60} has {rank} dimensions; download it again")
        shape = tuple(reversed([cursor.number(_U64) for _ in range(rank)])) or (1,)
        if 0 in shape:
            raise ConfigError(f"{self.path} is damaged: {name!r:.60} is empty; download it again")
        kind_id = cursor.number(_U32)
        if kind_id not in set(GGMLQuantizationType):
            raise ConfigError(
                f"{self.path} stores {name!r:.60} in the unknown tensor type {kind_id}, which is not supported"
            )
        kind = GGMLQuantizationType(kind_id)
        nbytes = row_bytes(kind, shape[-1])
        if nbytes is None:
            raise ConfigError(
                f"{self.path} is damaged: rows of {name!r:.60} ({shape[-1]}) are not whole blocks of {kind.name}"
            )
        for size in shape[:-1]:
            nbytes *= size
        return TensorInfo(shape, kind, cursor.number(_U64), nbytes)

    def _check_extents(self) -> None:
        for name, info in self.tensors.items():
            end = info.start + info.nbytes
            if end > len(self._data):
                raise ConfigError(
                    f"{self.path} is cut off: {name} ends at byte {end}, but the file has {len(self._data)}; download it again"
                )

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, row bytes], mapped and read-only; rows are all axes but the last."""
        info = self.tensors[name]
        nbytes = row_bytes(info.kind, info.shape[-1])
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.start).reshape(-1, nbytes or 1)

    def release(self, name: str) -> None:
        """Lets go of the pages of a tensor that has been unpacked, so that the process does not hold the file as well.

        Views of it stay valid: their pages are read again when touched.
        """
        if sys.platform == "linux":
            info = self.tensors[name]
            start = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._data.madvise(mmap.MADV_DONTNEED, start, info.start + info.nbytes - start)
