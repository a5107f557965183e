"""Ragged paged attention, cache writes, and both fused with what stands between two projections.

Shapes, layouts and meanings are those of `pallas_kernels.attention`. Pages are float32 or float16 and hold 16, 32, 64 or
128 tokens; head_dim is a multiple of 16; everything else is float32. A query's result does not depend on what else is in
the batch: sums run over fixed blocks of its own sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.quantized_matmul import Norm

PAGE_SIZES = (16, 32, 64, 128)


def why_not(*, head_dim: int, page_size: int, kv_dtype: str, dtype: str = "float32") -> str | None:
    """Why these kernels cannot serve a case, or None."""
    if page_size not in PAGE_SIZES:
        return f"pages must hold {', '.join(map(str, PAGE_SIZES))} tokens, not {page_size}"
    if head_dim % 16:
        return f"head_dim must be a multiple of 16, not {head_dim}"
    if kv_dtype not in ("float32", "float16"):
        return f"pages must be float32 or float16, not {kv_dtype}"
    return None if dtype == "float32" else f"activations must be float32, not {dtype}"


def _scoring(max_q_len: int, scale: float, sliding_window: int | None, soft_cap: float | None) -> dict[str, object]:
    return {
        "decode": max_q_len == 1,
        "scale": np.float32(scale),
        "window": np.int32(sliding_window or 0),
        "soft_cap": np.float32(soft_cap or 0),
    }


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    max_q_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Op `paged_attention`: q [T, N, H] -> [T, N, H]."""
    call = jax.ffi.ffi_call("pallas_kernels_paged_attention", jax.ShapeDtypeStruct(q.shape, jnp.float32))
    attributes = _scoring(max_q_len, scale, sliding_window, soft_cap)
    return call(q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, num_seqs, **attributes)


def write_kv(
    k_pages: jax.Array, v_pages: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Op `write_kv`: k and v [T, K, H] into (pages[t], offsets[t]) of the caches, in place where nothing else needs them.

    Places outside the cache are left out.
    """
    results = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_pages, v_pages)]
    call = jax.ffi.ffi_call("pallas_kernels_write_kv", results, input_output_aliases={0: 0, 1: 1})
    keys, values = call(k_pages, v_pages, k, v, pages, offsets)
    return keys, values


def attend_qkv(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    max_q_len: int,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What stands between the QKV and the output projection, in one call.

    Queries and keys are normalised over head_dim (if `q_norm` and `k_norm` are given), their two halves rotated, keys and
    values written to the caches, and every query attends.

    Args:
      qkv: [T, (N + 2 K) * H]: queries, keys, values.
      cos, sin: [T, H / 2].

    Returns:
      [T, N * H], and the caches.
    """
    T, width = qkv.shape
    out = jax.ShapeDtypeStruct((T, width - 2 * k_pages.shape[1] * k_pages.shape[2]), jnp.float32)
    results = [out, *(jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_pages, v_pages))]
    norms: list[jax.Array] = []
    if q_norm is not None and k_norm is not None:
        if (q_norm.eps, q_norm.plus_one) != (k_norm.eps, k_norm.plus_one):
            raise ValueError("the norms of queries and keys must have the same eps and plus_one")
        norms = [q_norm.weight, k_norm.weight]
    elif q_norm is not None or k_norm is not None:
        raise ValueError("queries and keys are normalised together or not at all")
    call = jax.ffi.ffi_call("pallas_kernels_attend_qkv", results, input_output_aliases={3: 1, 4: 2})
    attended, keys, values = call(
        qkv,
        cos,
        sin,
        k_pages,
        v_pages,
        pages,
        offsets,
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        *norms,
        **_scoring(max_q_len, scale, sliding_window, soft_cap),
        norm_eps=np.float32(0 if q_norm is None else q_norm.eps),
        norm_plus=np.float32(q_norm is not None and q_norm.plus_one),
    )
    return attended, keys, values
