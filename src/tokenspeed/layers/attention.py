"""Attention over a paged cache: writes this step's keys and values, then attends, with the kernels chosen for the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from tokenspeed.pytree import record, static

Cache = tuple[tuple[jax.Array, jax.Array], ...]
"""One (keys [P, K, H, S], values [P, K, S, H]) a layer."""


class AttentionKernels(NamedTuple):
    """Implementations chosen when the step was built; signatures in pallas_kernels.attention."""

    attend: Callable[..., jax.Array]
    write: Callable[..., tuple[jax.Array, jax.Array]]


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


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    batch: TokenBatch,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """q [T, N, H], k and v [T, K, H] -> ([T, N, H], the cache with k and v written)."""
    keys, values = batch.kernels.write(*cache, k, v, batch.pages, batch.offsets)
    out = batch.kernels.attend(
        q,
        keys,
        values,
        batch.page_table,
        batch.kv_lens,
        batch.cu_q_lens,
        batch.num_seqs,
        max_q_len=batch.max_q_len,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
    )
    return out, (keys, values)
