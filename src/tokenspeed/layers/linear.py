"""Projections and embeddings over weights in whatever form they are stored, fused with their neighbours where that form can."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import cpu
from pallas_kernels.cpu.quantized_matmul import BLOCK
from tokenspeed.config import Activation
from tokenspeed.layers.mlp import gated
from tokenspeed.layers.norm import Norm, rms_norm
from tokenspeed.pytree import record, static


@record
class PackedWeight:
    """A weight kept in 4 to 8 bits, as pallas_kernels.cpu packs it."""

    blocks: jax.Array
    """uint8 [strips, K / 32, bytes]"""
    layout: cpu.Layout = static()


def packed(
    values: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None, group_size: int, *, gated: bool
) -> PackedWeight | None:
    """Packs values * scales + offsets (see pallas_kernels.cpu.pack); None if the shape cannot be."""
    if values.shape[1] % BLOCK:
        return None
    weight = cpu.pack(values, scales, offsets, group_size, gated=gated)
    return PackedWeight(blocks=jnp.asarray(weight.arrays[0]), layout=weight.layout)


Weight = jax.Array | PackedWeight
"""A matrix (out, in), dense or packed."""


def linear(
    x: jax.Array,
    weight: Weight,
    *,
    norm: Norm | None = None,
    bias: jax.Array | None = None,
    gate: Activation | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """residual + gate(norm(x) @ weight^T + bias): x [T, D], weight [F, D] -> [T, F] in x's dtype, summed in float32.

    With `gate` the weight's first half are the gates and its second what they multiply: the result is [T, F / 2].
    """
    if isinstance(weight, PackedWeight):
        fused = None if norm is None else cpu.Norm(norm.weight, norm.eps, norm.plus_one)
        return cpu.quantized_matmul(
            x, weight.blocks, weight.layout, norm=fused, bias=bias, gate=gate, residual=residual
        )
    if norm is not None:
        x = rms_norm(x, norm.weight, eps=norm.eps, plus_one=norm.plus_one)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum("td,fd->tf", x, weight, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    if bias is not None:
        out = out + bias
    if gate is not None:
        out = gated(out, gate)
    return out if residual is None else residual + out


def embed(table: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a table [V, D] for ids [T] -> [T, D] in dtype."""
    if isinstance(table, PackedWeight):
        return cpu.quantized_rows(ids, table.blocks, table.layout).astype(dtype)
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)
