"""The XLA path of paged attention against the reference, and cache writes, with poison where nothing may be read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention

S = 16


def case(seed: int, q_lens: list[int], kv_lens: list[int], heads: int, kv_heads: int, dim: int, padding: int):
    """Arguments of the op: permuted pages, unused places NaN, `padding` rows and tokens at the end."""
    rng = np.random.default_rng(seed)
    rows = len(q_lens) + padding
    width = max(-(-kv // S) for kv in kv_lens) + 1
    pages = 1 + len(q_lens) * width
    table = np.zeros((rows, width), np.int32)
    table[: len(q_lens)] = 1 + rng.permutation(pages - 1).reshape(len(q_lens), width)
    k_pages = np.full((pages, kv_heads, dim, S), np.nan, np.float32)
    v_pages = np.full((pages, kv_heads, S, dim), np.nan, np.float32)
    for row, kv in enumerate(kv_lens):
        for position in range(kv):
            page, place = table[row, position // S], position % S
            k_pages[page, :, :, place] = rng.normal(size=(kv_heads, dim))
            v_pages[page, :, place] = rng.normal(size=(kv_heads, dim))
    tokens = sum(q_lens) + padding
    q = rng.normal(size=(tokens, heads, dim)).astype(np.float32)
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), np.full(padding, sum(q_lens))]).astype(np.int32)
    lens = np.asarray(kv_lens + [0] * padding, np.int32)
    return q, k_pages, v_pages, table, lens, cu_q_lens, np.asarray([len(q_lens)], np.int32)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([1, 1, 1], [1, 40, 17]), ([5, 1, 33, 1], [5, 20, 50, 1]), ([70], [90]), ([1, 64], [300, 64])],
)
def test_xla_equals_the_reference(
    q_lens: list[int], kv_lens: list[int], window: int | None, soft_cap: float | None
) -> None:
    decode = all(length == 1 for length in q_lens)
    args = case(len(q_lens), q_lens, kv_lens, 6, 2, 16, padding=2)
    if decode:
        args = (*args[:5], np.arange(len(q_lens) + 3, dtype=np.int32), args[6])
    options = {"scale": 0.3, "sliding_window": window, "soft_cap": soft_cap}
    wanted = attention.reference(*map(jnp.asarray, args), max_q_len=1 if decode else len(args[0]), **options)
    got = jax.jit(
        lambda *a: attention.xla(*a, max_q_len=1 if decode else len(args[0]), q_tile=16, block_tokens=32, **options)
    )(*args)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(got, wanted, atol=2e-5)
    gathered = attention.xla_gather(*map(jnp.asarray, args), max_q_len=1 if decode else len(args[0]), **options)
    np.testing.assert_allclose(gathered, wanted, atol=2e-5)
    assert np.abs(wanted[: sum(q_lens)]).max() > 0.1
    assert not np.asarray(wanted[sum(q_lens) :]).any()


def test_writes_go_to_their_page_and_place_only() -> None:
    k_pages, v_pages = jnp.zeros((4, 2, 8, S)), jnp.zeros((4, 2, S, 8))
    k = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
    pages, places = np.asarray([2, 0, 3]), np.asarray([5, 0, 15])
    new_k, new_v = attention.write_kv(k_pages, v_pages, jnp.asarray(k), jnp.asarray(2 * k), pages, places)
    for token in range(3):
        np.testing.assert_array_equal(new_k[pages[token], :, :, places[token]], k[token])
        np.testing.assert_array_equal(new_v[pages[token], :, places[token]], 2 * k[token])
    assert np.count_nonzero(new_k) == np.count_nonzero(new_v) == k.size
