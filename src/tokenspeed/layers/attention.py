"""Attention over a paged cache: writes this step's keys and values, then attends, with the kernels chosen for the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from tokenspeed.layers.norm import Norm, rms_norm
from tokenspeed.layers.rope import rotate
from tokenspeed.pytree import record, static

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""One (keys [P, K, H, S], values [P, K, S, H]) a layer."""


class AttentionKernels(NamedTuple):
    """Implementations chosen when the step was built; signatures in pallas_kernels."""

    attend: Callable[..., jax.Array]
    write: Callable[..., tuple[jax.Array, jax.Array]]
    attend_qkv: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    """Both, fused with what stands between two projections; None: composed here."""


@record
class TokenBatch:
    """Where this step's tokens stand. T flat tokens of B rows (sequences), rows in order."""

    token_ids: jax.Array
    """int32 [T]"""
    positions: jax.Array
    """int32 [T]"""
    prompt_lens: jax.Array
    """int32 [T]: length of the prompt each token's sequence began with."""
    pages: jax.Array
    """int32 [T]: page each token's keys and values go to; 0 is scratch."""
    offsets: jax.Array
    """int32 [T]: place in that page."""
    page_table: jax.Array
    """int32 [B, W]"""
    kv_lens: jax.Array
    """int32 [B], this step's tokens included."""
    cu_q_lens: jax.Array
    """int32 [B + 1]"""
    num_seqs: jax.Array
    """int32 [1]; rows beyond it are padding."""
    max_q_len: int = static()
    kernels: AttentionKernels = static()


class QKNorms(NamedTuple):
    """RMSNorms over head_dim of queries and keys; fields are those of `rms_norm`."""

    q: Norm
    k: Norm


def _composed(
    qkv: jax.Array,
    cos_and_sin: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    batch: TokenBatch,
    norms: QKNorms | None,
    scoring: dict[str, object],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    T, (_, K, H, _) = qkv.shape[0], cache[0].shape
    heads = qkv.reshape(T, -1, H)
    q, k, v = jnp.split(heads, (heads.shape[1] - 2 * K, heads.shape[1] - K), axis=1)
    if norms is not None:
        q, k = (rms_norm(x, n.weight, eps=n.eps, plus_one=n.plus_one) for x, n in ((q, norms.q), (k, norms.k)))
    q, k = rotate(q, *cos_and_sin), rotate(k, *cos_and_sin)
    keys, values = batch.kernels.write(*cache, k, v, batch.pages, batch.offsets)
    out = batch.kernels.attend(
        q, keys, values, batch.page_table, batch.kv_lens, batch.cu_q_lens, batch.num_seqs, **scoring
    )
    return out.reshape(T, -1), keys, values


def attention(
    qkv: jax.Array,
    cos_and_sin: tuple[jax.Array, jax.Array],
    cache: tuple[jax.Array, jax.Array],
    batch: TokenBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    norms: QKNorms | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Queries, keys and values [T, (N + 2K) * H] -> ([T, N * H], the cache with keys and values written).

    Queries and keys are normalised (if `norms`), rotated by cos and sin [T, H / 2], and attend.
    """
    scoring: dict[str, object] = {
        "max_q_len": batch.max_q_len,
        "scale": scale,
        "sliding_window": sliding_window,
        "soft_cap": soft_cap,
    }
    fused = batch.kernels.attend_qkv
    if fused is None:
        out, keys, values = _composed(qkv, cos_and_sin, cache, batch, norms, scoring)
    else:
        out, keys, values = fused(
            qkv,
            *cos_and_sin,
            *cache,
            batch.pages,
            batch.offsets,
            batch.page_table,
            batch.kv_lens,
            batch.cu_q_lens,
            batch.num_seqs,
            q_norm=None if norms is None else norms.q,
            k_norm=None if norms is None else norms.k,
            **scoring,
        )
    return out, (keys, values)
