"""Rotary position embeddings and the scalings that stretch them (Su et al., 2021; Hugging Face's rope_scaling types)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed.config import Rope


def _llama3(rope: Rope, inv_freq: np.ndarray) -> np.ndarray:
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    assert original is not None
    assert low is not None
    assert high is not None
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    mixed = (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / rope.factor, inv_freq)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return np.where(between, mixed, scaled)


def _yarn_attention_factor(rope: Rope) -> float:
    def mscale(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _yarn(rope: Rope, inv_freq: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (Peng et al., 2023): interpolate low frequencies, keep high ones, ramp between."""
    assert rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings

    def correction(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast or 32.0), correction(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Frequencies float32 [H/2] that do not depend on length, and the factor on cos and sin."""
    inv_freq = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    factor = 1.0
    if rope.type == "linear":
        inv_freq = inv_freq / rope.factor
    elif rope.type == "llama3":
        inv_freq = _llama3(rope, inv_freq)
    elif rope.type == "yarn":
        inv_freq, factor = _yarn(rope, inv_freq, head_dim), _yarn_attention_factor(rope)
    return inv_freq.astype(np.float32), factor


def _dynamic(rope: Rope, head_dim: int, lengths: jax.Array) -> jax.Array:
    """Dynamic NTK: the base grows with the sequence's length. lengths [T] -> frequencies [T, H/2]."""
    assert rope.original_max_position_embeddings
    original = rope.original_max_position_embeddings
    stretched = jnp.maximum(lengths, original).astype(jnp.float32)
    growth = rope.factor * stretched / original - (rope.factor - 1)
    base = rope.theta * growth ** (head_dim / (head_dim - 2))
    return base[:, None] ** -(jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def shares_prefixes(rope: Rope, max_model_len: int) -> bool:
    """Whether equal prefixes have equal keys: dynamic scaling's depend on the length of what follows, once it is long."""
    original = rope.original_max_position_embeddings
    return rope.type != "dynamic" or original is None or max_model_len <= original


def cos_sin(rope: Rope, head_dim: int, positions: jax.Array, prompt_lens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines float32 [T, H/2] of positions [T].

    `prompt_lens` [T] is the length of each token's prompt: dynamic scaling takes a token's length to be its prompt's
    or its own position's, whichever is longer, so that it does not depend on how a prompt is cut into chunks.
    """
    inv_freq, factor = inverse_frequencies(rope, head_dim)
    frequencies = (
        _dynamic(rope, head_dim, jnp.maximum(prompt_lens, positions + 1)) if rope.type == "dynamic" else inv_freq[None]
    )
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the two halves of the last axis. x [T, N, H]; cos, sin [T, H/2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)
