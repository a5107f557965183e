"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Norm(NamedTuple):
    """An RMSNorm that something else is fused with; fields are those of `rms_norm`."""

    weight: jax.Array
    eps: float
    plus_one: bool


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, plus_one: bool = False) -> jax.Array:
    """RMSNorm over the last axis in float32 (Zhang and Sennrich, 2019), returned in x's dtype.

    With `plus_one` the factor is 1 + weight and is applied before rounding, as Gemma does.
    """
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    if plus_one:
        return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return normed.astype(x.dtype) * weight.astype(x.dtype)
