"""Products of float32 rows with packed 4- to 8-bit weights: the packing, and the ops on it.

A weight is w[n, k] = values[n, k] * scales[n, k // G] + offsets[n, k // G]. Activations are rounded to int8 with one scale
for 32 of a row, as llama.cpp does; products are exact integers and sums float32.

Packed, a weight is one uint8 array [strips, K / 32, bytes]. A strip interleaves 16 rows (gated: 8 rows of the gate, then the
same 8 of the up projection). The bytes of a block of 16 rows by 32 columns are, in steps of 4 columns (row-major inside a
step: 16 rows by 4 columns):
  4 bits  steps 0 to 3 in the low nibbles, steps 4 to 7 in the high nibbles of the same 256 bytes;
  5 bits  the same, then 64 bytes whose bit s is the fifth bit of step s;
  6 bits  the same, then 2 bits of steps 0 to 3 and of steps 4 to 7, 32 bytes each, for the first 8 rows and the last 8;
  8 bits  512 bytes, signed;
then float16 scales [32 / G, 16], and float16 offsets [32 / G, 16] unless offset = -zero * scale throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

ROWS = 16
"""Rows a strip interleaves."""

BLOCK = 32
"""Columns that share an activation scale."""

Gate = Literal["silu", "gelu_tanh"]
T = TypeVar("T", bound=np.generic)

_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}
_HALF_MAX = 65504.0
_HALF_NORMAL = 2.0**-14
_STRIPS_AT_ONCE = 256  # bounds the memory packing takes beside its result


@dataclass(frozen=True)
class Layout:
    """How a weight is packed: static, hashable."""

    n: int
    """Columns of the output: rows of the weight, half of them where gated."""
    k: int
    bits: Literal[4, 5, 6, 8]
    """8: signed; the others unsigned."""
    group_size: Literal[16, 32]
    zero: int | None
    """offset = -zero * scale; None: offsets are stored."""
    gain: float
    """Power of two by which stored scales and offsets are multiplied."""
    gated: bool

    @property
    def strips(self) -> int:
        return -(-self.n // (ROWS // 2 if self.gated else ROWS))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the packed array."""
        parameters = (2 if self.zero is None else 1) * (BLOCK // self.group_size) * ROWS
        return self.strips, self.k // BLOCK, ROWS * BLOCK * self.bits // 8 + 2 * parameters

    def attributes(self) -> dict[str, object]:
        """For the kernels."""
        return {
            "n": np.int32(self.n),
            "k": np.int32(self.k),
            "bits": np.int32(self.bits),
            "subgroups": np.int32(BLOCK // self.group_size),
            "has_offsets": self.zero is None,
            "zero": np.float32(self.zero or 0),
            "gain": np.float32(self.gain),
        }


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight on the host; `arrays` is what goes to the device."""

    arrays: tuple[NDArray[np.uint8]]
    layout: Layout


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the last axis, fused with what it stands before or after."""

    weight: jax.Array
    eps: float
    plus_one: bool = False


def pack(
    values: NDArray[np.int8],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32] | None = None,
    group_size: int = 32,
    *,
    gated: bool = False,
) -> PackedWeight:
    """Packs a weight in the fewest bits that hold its values.

    Scales and offsets become float16: exact where they came from float16, else within 2^-11 of themselves.

    Args:
      values: [N, K]; with `gated` the gate's rows, then as many of the up projection.
      scales, offsets: [N, K / group_size]; no offsets means 0.
      group_size: 16, or a multiple of 32.

    Raises:
      ValueError: shapes that do not fit, or a scale that is not finite.
    """
    n, k = values.shape
    if k % BLOCK or (group_size != 16 and group_size % BLOCK) or (gated and n % 2):
        raise ValueError(
            f"cannot pack [{n}, {k}] in groups of {group_size}: K must be a multiple of 32, the group 16 or a multiple of 32"
        )
    if scales.shape != (n, k // group_size) or (offsets is not None and offsets.shape != scales.shape):
        raise ValueError(f"scales and offsets must be [{n}, {k // group_size}], got {scales.shape}")
    if not (np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())):
        raise ValueError("a scale or an offset is not finite")
    group: Literal[16, 32] = 16 if group_size == 16 else 32
    if group_size > BLOCK:
        scales = np.repeat(scales, group_size // BLOCK, axis=1)
        offsets = None if offsets is None else np.repeat(offsets, group_size // BLOCK, axis=1)
    bits, shift = _bits(values, group)
    zero = _zero(scales, offsets)
    if zero is not None:
        zero, offsets = zero + shift, None
    elif offsets is not None and shift:
        offsets = np.subtract(offsets, shift * scales, dtype=np.float32)
    gain = _gain(scales, offsets)
    layout = Layout(n // 2 if gated else n, k, bits, group, zero, gain, gated)
    parameters = [scales / gain] if offsets is None else [scales / gain, offsets / gain]
    halves = [np.asarray(part, np.float32).astype(np.float16) for part in parameters]
    blocks = np.empty(layout.shape, np.uint8)
    for begin in range(0, layout.strips, _STRIPS_AT_ONCE):
        end = min(begin + _STRIPS_AT_ONCE, layout.strips)
        part = blocks[begin:end]
        value_bytes = ROWS * BLOCK * bits // 8
        _pack_values(_strips(values, layout, begin, end), shift, bits, part[..., :value_bytes])
        for i, half in enumerate(halves):
            rows = _strips(half, layout, begin, end).reshape(end - begin, ROWS, k // BLOCK, -1)
            packed = (
                np.ascontiguousarray(rows.transpose(0, 2, 3, 1)).reshape(end - begin, k // BLOCK, -1).view(np.uint8)
            )
            width = packed.shape[2]
            part[..., value_bytes + i * width : value_bytes + (i + 1) * width] = packed
    return PackedWeight((blocks,), layout)


def _bits(values: NDArray[np.int8], group: int) -> tuple[Literal[4, 5, 6, 8], int]:
    """Fewest bits, and what is added to the values to make them unsigned."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    for bits in (4, 5, 6) if group == BLOCK else (6,):
        shift = 0 if low >= 0 else 1 << (bits - 1)
        if low + shift >= 0 and high + shift < 1 << bits:
            return bits, shift
    return 8, 0


def _zero(scales: NDArray[np.float32], offsets: NDArray[np.float32] | None) -> int | None:
    """z where offsets == -z * scales exactly, for one integer z."""
    if offsets is None:
        return 0
    used = np.flatnonzero(scales)
    if not used.size:
        return 0 if not offsets.any() else None
    ratio = float(-offsets.flat[used[0]]) / float(scales.flat[used[0]])
    zero = round(ratio) if abs(ratio) < 256 else 0
    return zero if np.array_equal(offsets, np.float32(-zero) * scales) else None


def _gain(scales: NDArray[np.float32], offsets: NDArray[np.float32] | None) -> float:
    """1 where float16 holds all parameters well, else the power of two that brings the largest to 2^14."""
    parameters = np.abs(scales if offsets is None else np.stack([scales, offsets]))
    top = float(parameters.max(initial=0.0))
    if top == 0.0:
        return 1.0
    least = float(parameters.min(where=parameters > 0, initial=top))
    if top <= _HALF_MAX and (least >= _HALF_NORMAL or np.array_equal(parameters, parameters.astype(np.float16))):
        return 1.0
    return float(2.0 ** (np.floor(np.log2(top)) - 14))


def _strips(rows: NDArray[T], layout: Layout, begin: int, end: int) -> NDArray[T]:
    """Rows of strips begin to end as [strips, 16, columns], missing rows zero."""
    parts = (rows[: layout.n], rows[layout.n :]) if layout.gated else (rows,)
    height = ROWS // len(parts)
    padded = np.zeros((len(parts), (end - begin) * height, rows.shape[1]), rows.dtype)
    for to, part in zip(padded, parts, strict=True):
        chosen = part[begin * height : end * height]
        to[: len(chosen)] = chosen
    return padded.reshape(len(parts), end - begin, height, -1).swapaxes(0, 1).reshape(end - begin, ROWS, -1)


def _pack_values(rows: NDArray[np.int8], shift: int, bits: int, out: NDArray[np.uint8]) -> None:
    strips, _, k = rows.shape
    words = (rows + np.int8(shift)).view(np.uint32)  # a step of one row
    steps = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.uint8).reshape(strips, k // BLOCK, 8, 64)
    if bits == 8:
        out[:] = steps.reshape(out.shape)
        return
    low = steps & 15
    out[..., :256] = (low[:, :, :4] | low[:, :, 4:] << 4).reshape(strips, k // BLOCK, 256)
    high = steps >> 4
    if bits == 5:
        out[..., 256:] = np.bitwise_or.reduce(high << np.arange(8, dtype=np.uint8)[:, None], axis=2)
    elif bits == 6:
        fields = high.reshape(strips, k // BLOCK, 2, 4, 2, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        planes = np.bitwise_or.reduce(fields, axis=3)  # [strips, blocks, steps // 4, half, 32]
        out[..., 256:] = planes.swapaxes(2, 3).reshape(strips, k // BLOCK, 128)


def unpack(weight: PackedWeight) -> NDArray[np.float32]:
    """The weight that the packed one stands for, [N, K], as every kernel reads it."""
    layout, (blocks,) = weight.layout, weight.arrays
    value_bytes = ROWS * BLOCK * layout.bits // 8
    values = _unpack_values(blocks[..., :value_bytes], layout.bits)  # [strips, blocks, 16, 32]
    halves = np.ascontiguousarray(blocks[..., value_bytes:]).view(np.float16).astype(np.float32)
    parameters = halves.reshape(layout.strips, layout.k // BLOCK, -1, BLOCK // layout.group_size, ROWS)
    scales, *stored = (
        np.repeat(parameters[:, :, i].swapaxes(2, 3), layout.group_size, axis=3) for i in range(parameters.shape[2])
    )
    offsets = stored[0] if stored else np.float32(-(layout.zero or 0)) * scales
    weights = (values * scales + offsets) * np.float32(layout.gain)
    rows = weights.transpose(0, 2, 1, 3).reshape(layout.strips, ROWS, layout.k)
    if not layout.gated:
        return rows.reshape(-1, layout.k)[: layout.n]
    return np.concatenate([rows[:, part].reshape(-1, layout.k)[: layout.n] for part in (slice(8), slice(8, None))])


def _unpack_values(packed: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    strips, groups, _ = packed.shape
    if bits == 8:
        steps = packed.reshape(strips, groups, 8, 64)
    else:
        nibbles = packed[..., :256].reshape(strips, groups, 4, 64)
        steps = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
    if bits == 5:
        steps = steps | (packed[..., None, 256:] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    elif bits == 6:
        planes = packed[..., 256:].reshape(strips, groups, 2, 2, 1, 32).swapaxes(2, 3)
        fields = planes.swapaxes(3, 4) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None, None] & 3
        steps = steps | fields.reshape(strips, groups, 8, 64) << 4
    rows = steps.reshape(strips, groups, 8, ROWS, 4).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(rows).view(np.int8).reshape(strips, groups, ROWS, BLOCK)


def quantized_matmul(
    x: jax.Array,
    blocks: jax.Array,
    layout: Layout,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    gate: Gate | None = None,
    out_norm: Norm | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """y = residual + out_norm(gate(norm(x) @ W^T + bias)), of which only the product is not optional.

    Args:
      x: [M, K] float32.
      blocks: a `PackedWeight`'s array.
      bias: [N]; where gated the gate's and then the up projection's, [2 N].
      gate: for a gated weight: y = act(gate) * up.
      out_norm: over the N columns.
      residual: [M, N], added last; its buffer is reused for the result where nothing else needs it.

    Returns:
      [M, N] float32.
    """
    if (gate is not None) != layout.gated:
        raise ValueError(f"the weight is {'' if layout.gated else 'not '}packed with a gate, but gate={gate!r}")
    norms = [None if part is None else part.weight for part in (norm, out_norm)]
    extra = [part for part in (norms[0], bias, norms[1], residual) if part is not None]
    call = jax.ffi.ffi_call(
        "pallas_kernels_quantized_matmul",
        jax.ShapeDtypeStruct((x.shape[0], layout.n), jnp.float32),
        input_output_aliases={} if residual is None else {1 + len(extra): 0},
    )
    return call(
        x,
        blocks,
        *extra,
        **layout.attributes(),
        gate=np.int32(_GATES[gate]),
        **_norm_attributes("norm", norm),
        has_bias=bias is not None,
        **_norm_attributes("out_norm", out_norm),
        has_residual=residual is not None,
    )


def _norm_attributes(name: str, norm: Norm | None) -> dict[str, object]:
    return {
        f"has_{name}": norm is not None,
        f"{name}_eps": np.float32(0 if norm is None else norm.eps),
        f"{name}_plus": np.float32(norm is not None and norm.plus_one),
    }


def quantized_rows(ids: jax.Array, blocks: jax.Array, layout: Layout) -> jax.Array:
    """Rows `ids` [T] int32 of a packed weight as float32 [T, K]: an embedding that shares the head's storage.

    An id outside [0, N) gives a row of NaN.
    """
    if layout.gated:
        raise ValueError("rows of a gated weight cannot be taken")
    call = jax.ffi.ffi_call(
        "pallas_kernels_quantized_rows", jax.ShapeDtypeStruct((ids.shape[0], layout.k), jnp.float32)
    )
    return call(ids, blocks, **layout.attributes())
