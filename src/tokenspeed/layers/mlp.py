"""The gated feed-forward layer."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tokenspeed.config import Activation


def gated(gate_up: jax.Array, activation: Activation) -> jax.Array:
    """act(gate) * up of a fused projection [T, 2F] whose first half is the gate (Shazeer, 2020)."""
    gates, ups = jnp.split(gate_up, 2, -1)
    wide = gates.astype(jnp.float32)
    active = jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide, approximate=True)
    return active.astype(ups.dtype) * ups
