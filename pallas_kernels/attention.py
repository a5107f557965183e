"""Ragged paged attention: one signature for decode, chunked prefill and a mix of both; its reference and the XLA path.

Layout of a cache: keys [P, K, H, S] and values [P, K, S, H] (pages, kv heads, head dim, tokens a page), which keeps the
tokens of a page contiguous where scores are formed and the head contiguous where values are summed.

Signature of op `paged_attention`:
  q [T, N, H], k_pages, v_pages, page_table [B, W] int32, kv_lens [B] int32, cu_q_lens [B + 1] int32, num_seqs [1] int32,
  static: max_q_len, scale, sliding_window (None: all), soft_cap (None: none)  ->  [T, N, H] in q's dtype.
Row b's queries are tokens cu_q_lens[b] to cu_q_lens[b + 1] - 1, at positions kv_lens[b] - q_len to kv_lens[b] - 1; each
sees the keys at or before it (the last `sliding_window` of them, itself included). Rows from num_seqs on are padding.
With max_q_len == 1, T == B and token b belongs to row b.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.registry import Kernel, register

NEG_INF = float("-inf")


def _cap(scores: jax.Array, soft_cap: float | None) -> jax.Array:
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _visible(q_pos: jax.Array, k_pos: jax.Array, sliding_window: int | None) -> jax.Array:
    seen = k_pos <= q_pos
    return seen if sliding_window is None else seen & (k_pos > q_pos - sliding_window)


def reference(
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
    """The specification: gathers every page of every token's row, in float32. Padding rows give zeros."""
    T, N, H = q.shape
    K, S = k_pages.shape[1], k_pages.shape[3]
    tokens = jnp.arange(T)
    row = jnp.clip(jnp.searchsorted(cu_q_lens, tokens, side="right") - 1, 0, page_table.shape[0] - 1)
    live = (row < num_seqs[0]) & (tokens < cu_q_lens[num_seqs[0]])
    q_pos = kv_lens[row] - cu_q_lens[row + 1] + tokens
    keys = jnp.moveaxis(k_pages[page_table[row]], 3, 4).swapaxes(2, 3).reshape(T, -1, K, H)  # [T, W*S, K, H]
    values = v_pages[page_table[row]].swapaxes(2, 3).reshape(T, -1, K, H)
    k_pos = jnp.arange(page_table.shape[1] * S)
    seen = _visible(q_pos[:, None], k_pos[None], sliding_window) & live[:, None]  # [T, W*S]
    keys = jnp.where(seen[:, :, None, None], keys.astype(jnp.float32), 0)
    values = jnp.where(seen[:, :, None, None], values.astype(jnp.float32), 0)
    grouped = q.reshape(T, K, N // K, H).astype(jnp.float32)
    scores = jnp.einsum("tkgh,tskh->tkgs", grouped, keys, precision=lax.Precision.HIGHEST) * scale
    scores = jnp.where(seen[:, None, None], _cap(scores, soft_cap), NEG_INF)
    top = jnp.max(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0))
    total = jnp.sum(weights, -1, keepdims=True)
    out = jnp.einsum(
        "tkgs,tskh->tkgh", weights / jnp.where(total > 0, total, 1), values, precision=lax.Precision.HIGHEST
    )
    return out.reshape(T, N, H).astype(q.dtype)


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """einsum summed in float32; float32 operands are not rounded on the way in."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


def _online(
    carry: tuple[jax.Array, jax.Array, jax.Array], scores: jax.Array, values: jax.Array, spec: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One block of the online softmax (Milakov and Gimelshein, 2018). Scores [..., C, S]; carry max, sum, output."""
    top, total, out = carry
    new_top = jnp.maximum(top, jnp.max(scores, (-2, -1)))
    base = jnp.where(jnp.isfinite(new_top), new_top, 0)
    weights = jnp.exp(scores - base[..., None, None])
    keep = jnp.exp(top - base)
    out = out * keep[..., None] + _dot(spec, weights.astype(values.dtype), values)
    return new_top, total * keep + jnp.sum(weights, (-2, -1)), out


def _finish(total: jax.Array, out: jax.Array) -> jax.Array:
    return out / jnp.where(total > 0, total, 1)[..., None]


def _block_bounds(
    first: jax.Array, last: jax.Array, sliding_window: int | None, block: int
) -> tuple[jax.Array, jax.Array]:
    """Blocks of keys that queries at positions first to last can see."""
    begin = jnp.zeros_like(first) if sliding_window is None else jnp.maximum(first - sliding_window + 1, 0) // block
    return begin, last // block + 1


def _decode(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    block_tokens: int = 256,
) -> jax.Array:
    B, N, H = q.shape
    K, S = k_pages.shape[1], k_pages.shape[3]
    C = min(max(block_tokens // S, 1), page_table.shape[1])
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % C)))
    grouped = q.reshape(B, K, N // K, H) * jnp.asarray(scale, q.dtype)
    q_pos = kv_lens - 1

    def block(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        pages = lax.dynamic_slice_in_dim(table, i * C, C, 1)
        scores = _dot("bkgh,bckhs->bkgcs", grouped, k_pages[pages])
        k_pos = (i * C * S + jnp.arange(C * S)).reshape(C, S)
        seen = _visible(q_pos[:, None, None], k_pos[None], sliding_window)[:, None, None]
        scores = jnp.where(seen, _cap(scores, soft_cap), NEG_INF)
        values = jnp.where(seen[:, 0, 0, :, None, :, None], v_pages[pages], 0)
        return _online(carry, scores, values, "bkgcs,bcksh->bkgh")

    shape = (B, K, N // K)
    carry = (jnp.full(shape, NEG_INF), jnp.zeros(shape), jnp.zeros((*shape, H)))
    if table.shape[1] == C:
        carry = block(jnp.int32(0), carry)
    else:
        first = jnp.min(jnp.where(kv_lens > 0, q_pos, jnp.max(q_pos)))
        begin, end = _block_bounds(first, jnp.max(q_pos), sliding_window, C * S)
        carry = lax.fori_loop(begin, end, block, carry)
    return _finish(*carry[1:]).reshape(B, N, H).astype(q.dtype)


def xla(
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
    q_tile: int = 32,
    block_tokens: int = 256,
) -> jax.Array:
    """Loops over tiles of queries and blocks of pages, as many as there really are; no row's context is gathered whole."""
    if max_q_len == 1:
        return _decode(
            q, k_pages, v_pages, page_table, kv_lens, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap
        )
    T, N, H = q.shape
    B, W = page_table.shape
    K, S = k_pages.shape[1], k_pages.shape[3]
    C = min(max(block_tokens // S, 1), W)
    table = jnp.pad(page_table, ((0, 0), (0, -W % C)))
    Q = min(q_tile, T)
    q_lens = jnp.where(jnp.arange(B) < num_seqs[0], cu_q_lens[1:] - cu_q_lens[:-1], 0)
    tiles_before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum((q_lens + Q - 1) // Q)])
    grouped = jnp.pad(q, ((0, Q), (0, 0), (0, 0))).reshape(T + Q, K, N // K, H) * jnp.asarray(scale, q.dtype)

    def tile(i: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tiles_before, i, side="right") - 1
        offset = (i - tiles_before[row]) * Q
        start = cu_q_lens[row] + offset
        queries = lax.dynamic_slice_in_dim(grouped, start, Q, 0)
        first = kv_lens[row] - q_lens[row] + offset
        q_pos = first + jnp.arange(Q)
        last = jnp.minimum(first + Q, kv_lens[row]) - 1
        pages_of_row = lax.dynamic_index_in_dim(table, row, 0, keepdims=False)

        def block(
            j: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            pages = lax.dynamic_slice_in_dim(pages_of_row, j * C, C, 0)
            scores = _dot("qkgh,ckhs->qkgcs", queries, k_pages[pages])
            k_pos = (j * C * S + jnp.arange(C * S)).reshape(C, S)
            seen = _visible(q_pos[:, None, None], k_pos[None], sliding_window)[:, None, None]
            scores = jnp.where(seen, _cap(scores, soft_cap), NEG_INF)
            values = jnp.where((k_pos <= last)[:, None, :, None], v_pages[pages], 0)
            return _online(carry, scores, values, "qkgcs,cksh->qkgh")

        begin, end = _block_bounds(first, last, sliding_window, C * S)
        shape = (Q, K, N // K)
        init = (jnp.full(shape, NEG_INF), jnp.zeros(shape), jnp.zeros((*shape, H)))
        _, total, tile_out = lax.fori_loop(begin, end, block, init)
        # A row's last tile runs into the next row, whose own tiles come later and write over it.
        return lax.dynamic_update_slice_in_dim(out, _finish(total, tile_out).astype(q.dtype), start, 0)

    out = lax.fori_loop(0, tiles_before[-1], tile, jnp.zeros((T + Q, K, N // K, H), q.dtype))
    used = cu_q_lens[num_seqs[0]]
    return jnp.where(jnp.arange(T)[:, None, None] < used, out[:T].reshape(T, N, H), 0)


GATHER_TOKENS = 1 << 18
"""Most cache places `xla_gather` reads at once."""


def xla_gather(
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
    """For a GPU: decode without a loop, reading every page a row could have, if they are few; elsewhere fewer, larger turns."""
    (B, W), S = page_table.shape, k_pages.shape[3]
    if max_q_len == 1 and B * W * S <= GATHER_TOKENS:
        return _decode(
            q,
            k_pages,
            v_pages,
            page_table,
            kv_lens,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            block_tokens=W * S,
        )
    return xla(
        q,
        k_pages,
        v_pages,
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        max_q_len=max_q_len,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        q_tile=128,
        block_tokens=1024,
    )


def write_kv(
    k_pages: jax.Array,
    v_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Op `write_kv`: puts keys and values [T, K, H] into (pages[t], offsets[t]) of the donated caches.

    Page 0 is scratch: padding tokens write there.
    """
    k_pages = k_pages.at[pages, :, :, offsets].set(k.astype(k_pages.dtype))
    v_pages = v_pages.at[pages, :, offsets].set(v.astype(v_pages.dtype))
    return k_pages, v_pages


def _any_case(**_: object) -> None:
    return None


def _gathers(*, platform: str, **_: object) -> str | None:
    return None if platform == "gpu" else "loops over blocks are quicker off a GPU"


register(Kernel("paged_attention", "xla_gather", xla_gather, 20, _gathers))
register(Kernel("paged_attention", "xla", xla, 10, _any_case))
register(Kernel("paged_attention", "reference", reference, 0, _any_case))
register(Kernel("write_kv", "xla", write_kv, 10, _any_case))
