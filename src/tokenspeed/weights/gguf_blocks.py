"""The block formats of GGUF tensors: bytes to small integers with scales, and to floats.

Layouts are those of ggml's `block_*` structs. A block of 32 or 256 weights is read as 64-bit words, eight weights a
word, which is twice as fast as bytewise numpy; blocks are taken a few thousand at a time so that temporaries stay in
the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference_dequantize

FLOAT_DTYPES: dict[GGMLQuantizationType, np.dtype] = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLQuantizationType.F64: np.dtype("<f8"),
}

_LOW = np.uint64(0x0F0F0F0F0F0F0F0F)
_PAIR = np.uint64(0x0303030303030303)
_BIT = np.uint64(0x0101010101010101)
_CHUNK = 1 << 18
"""Weights unpacked at a time."""

_FIFTH_BITS = (np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") << 4).view("<u8")[:, 0]
"""Eight bits of a byte, each moved to bit 4 of a byte of a word."""


class QuantizedTensor(NamedTuple):
    """A matrix of small integers: weight = values * scale + offset, with a scale and offset for every group of a row.

    The float32 result (product rounded, then sum rounded) is bit for bit what GGUF defines.
    """

    values: np.ndarray
    """int8 [N, K]; 0..15, 0..31 or 0..63 where there are offsets, else -128..127."""
    scales: np.ndarray
    """float32 [N, K / group_size]"""
    offsets: np.ndarray | None
    """float32 [N, K / group_size]; None: all zero."""
    group_size: int

    def rows(self, order: np.ndarray) -> QuantizedTensor:
        """The rows in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return self._replace(values=self.values[order], scales=self.scales[order], offsets=offsets)


def _f32(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float32)


def _nibbles(packed: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    np.bitwise_and(packed, _LOW, out=low)
    np.bitwise_and(packed >> np.uint64(4), _LOW, out=high)


def _q4_0(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    _nibbles(blocks["qs"], words[:, :2], words[:, 2:])
    scales[:, 0] = blocks["d"]
    np.multiply(scales, np.float32(-8), out=offsets)


def _q4_1(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    _nibbles(blocks["qs"], words[:, :2], words[:, 2:])
    scales[:, 0] = blocks["d"]
    offsets[:, 0] = blocks["m"]


def _q5_0(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    _nibbles(blocks["qs"], words[:, :2], words[:, 2:])
    words |= _FIFTH_BITS[blocks["qh"]]
    scales[:, 0] = blocks["d"]
    np.multiply(scales, np.float32(-16), out=offsets)


def _q5_1(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    _nibbles(blocks["qs"], words[:, :2], words[:, 2:])
    words |= _FIFTH_BITS[blocks["qh"]]
    scales[:, 0] = blocks["d"]
    offsets[:, 0] = blocks["m"]


def _q8_0(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, _: np.ndarray) -> None:
    words[...] = blocks["qs"]
    scales[:, 0] = blocks["d"]


def _k_scales(blocks: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    """Unpacks eight six-bit scales and eight six-bit minima from twelve bytes."""
    first, second, third = (blocks["scales"][:, i : i + 4] for i in (0, 4, 8))
    d, low = _f32(blocks["d"])[:, None], -_f32(blocks["dmin"])[:, None]
    np.multiply(d, first & 63, out=scales[:, :4])
    np.multiply(d, third & 15 | first >> 6 << 4, out=scales[:, 4:])
    np.multiply(low, second & 63, out=offsets[:, :4])
    np.multiply(low, third >> 4 | second >> 6 << 4, out=offsets[:, 4:])


def _q4_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    pairs = words.reshape(-1, 4, 2, 4)
    _nibbles(blocks["qs"], pairs[:, :, 0], pairs[:, :, 1])
    _k_scales(blocks, scales, offsets)


def _q5_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    _q4_k(blocks, words, scales, offsets)
    eighths, high = words.reshape(-1, 8, 4), np.ascontiguousarray(blocks["qh"])
    for bit in range(8):
        eighths[:, bit] |= (high >> np.uint64(bit) & _BIT) << np.uint64(4)


def _q6_k(blocks: np.ndarray, words: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> None:
    quarters, high = words.reshape(-1, 2, 4, 4), np.ascontiguousarray(blocks["qh"])
    _nibbles(blocks["ql"], quarters[:, :, :2], quarters[:, :, 2:])
    for pair in range(4):
        quarters[:, :, pair] |= (high >> np.uint64(2 * pair) & _PAIR) << np.uint64(4)
    np.multiply(_f32(blocks["d"])[:, None], blocks["scales"], out=scales)
    np.multiply(scales, np.float32(-32), out=offsets)


class BlockFormat(NamedTuple):
    """How one GGUF type packs weights."""

    record: np.dtype
    """One block."""
    size: int
    """Weights a block."""
    group_size: int
    """Weights a scale."""
    has_offsets: bool
    unpack: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    """(blocks [n], words uint64 [n, size / 8], scales and offsets float32 [n, size / group_size]): fills the last three."""


_HALF, _QS4, _K_SCALES = ("d", "<f2"), ("qs", "<u8", 2), ("scales", "u1", 12)
_K_HEAD = [_HALF, ("dmin", "<f2"), _K_SCALES]

BLOCK_FORMATS: dict[GGMLQuantizationType, BlockFormat] = {
    GGMLQuantizationType.Q4_0: BlockFormat(np.dtype([_HALF, _QS4]), 32, 32, True, _q4_0),
    GGMLQuantizationType.Q4_1: BlockFormat(np.dtype([_HALF, ("m", "<f2"), _QS4]), 32, 32, True, _q4_1),
    GGMLQuantizationType.Q5_0: BlockFormat(np.dtype([_HALF, ("qh", "u1", 4), _QS4]), 32, 32, True, _q5_0),
    GGMLQuantizationType.Q5_1: BlockFormat(np.dtype([_HALF, ("m", "<f2"), ("qh", "u1", 4), _QS4]), 32, 32, True, _q5_1),
    GGMLQuantizationType.Q8_0: BlockFormat(np.dtype([_HALF, ("qs", "<u8", 4)]), 32, 32, False, _q8_0),
    GGMLQuantizationType.Q4_K: BlockFormat(np.dtype([*_K_HEAD, ("qs", "<u8", (4, 4))]), 256, 32, True, _q4_k),
    GGMLQuantizationType.Q5_K: BlockFormat(
        np.dtype([*_K_HEAD, ("qh", "<u8", 4), ("qs", "<u8", (4, 4))]), 256, 32, True, _q5_k
    ),
    GGMLQuantizationType.Q6_K: BlockFormat(
        np.dtype([("ql", "<u8", (2, 2, 4)), ("qh", "<u8", (2, 4)), ("scales", "i1", 16), _HALF]), 256, 16, True, _q6_k
    ),
}


def row_bytes(kind: GGMLQuantizationType, columns: int) -> int | None:
    """Bytes of a row of `columns` weights; None if they do not fill whole blocks."""
    size, nbytes = GGML_QUANT_SIZES[kind]
    return None if columns % size else columns // size * nbytes


def can_read(kind: GGMLQuantizationType) -> bool:
    """Whether tensors of this type can be turned into floats."""
    if kind in FLOAT_DTYPES or kind in BLOCK_FORMATS:
        return True
    try:
        reference_dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _chunks(form: BlockFormat, blocks: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    step = _CHUNK // form.size
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        yield part, blocks[part]


def unpack(raw: np.ndarray, kind: GGMLQuantizationType) -> QuantizedTensor:
    """Rows of packed bytes (uint8 [N, row bytes]) of a type of `BLOCK_FORMATS` as integers with scales."""
    form = BLOCK_FORMATS[kind]
    blocks = raw.reshape(-1).view(form.record)
    words = np.empty((len(blocks), form.size // 8), np.uint64)
    scales = np.empty((len(blocks), form.size // form.group_size), np.float32)
    offsets = np.empty_like(scales)
    for part, chunk in _chunks(form, blocks):
        form.unpack(chunk, words[part], scales[part], offsets[part])
    rows = len(raw)
    return QuantizedTensor(
        words.view(np.int8).reshape(rows, -1),
        scales.reshape(rows, -1),
        offsets.reshape(rows, -1) if form.has_offsets else None,
        form.group_size,
    )


def dequantize(raw: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Rows of packed bytes (uint8 [N, row bytes]) of a type that `can_read` as floats [N, K].

    Types stored as floats come as they are, without a copy; the others as float32.
    """
    if kind in FLOAT_DTYPES:
        return raw.view(FLOAT_DTYPES[kind])
    if kind not in BLOCK_FORMATS:
        return reference_dequantize(raw, kind)
    form = BLOCK_FORMATS[kind]
    blocks = raw.reshape(-1).view(form.record)
    weights = np.empty((len(blocks), form.size // form.group_size, form.group_size), np.float32)
    words = np.empty((_CHUNK // form.size, form.size // 8), np.uint64)
    scales = np.empty((len(words), form.size // form.group_size), np.float32)
    offsets = np.empty_like(scales)
    for part, chunk in _chunks(form, blocks):
        count = len(chunk)
        form.unpack(chunk, words[:count], scales[:count], offsets[:count])
        values = words[:count].view(np.int8).reshape(weights[part].shape)
        np.multiply(values, scales[:count, :, None], out=weights[part])
        if form.has_offsets:
            weights[part] += offsets[:count, :, None]
    return weights.reshape(len(raw), -1)
