"""Projections and embeddings over weights in whatever form they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


Weight = jax.Array
"""A weight as it is stored on the device."""


def linear(x: jax.Array, weight: Weight, bias: jax.Array | None = None) -> jax.Array:
    """x [T, D] times weight [F, D] transposed, plus bias [F]; accumulated in float32, returned in x's dtype."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    out = jnp.einsum(
        "td,fd->tf", x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32
    ).astype(x.dtype)
    return out if bias is None else out + bias.astype(x.dtype)


def embed(table: Weight, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a table [V, D] for ids [T] -> [T, D] in dtype."""
    return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)
