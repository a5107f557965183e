"""Attention and cache writes against plain numpy in float64, with pages permuted and everything unused poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import Norm, attend_qkv, paged_attention, write_kv


@dataclass
class Case:
    """A batch over a paged cache; keys and values of sequence b are k[b], v[b] [kv_len, K, H]."""

    k: list[np.ndarray]
    v: list[np.ndarray]
    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    page_table: np.ndarray
    kv_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_seqs: np.ndarray

    def batch(self):
        return self.page_table, self.kv_lens, self.cu_q_lens, self.num_seqs

    def q_lens(self) -> list[int]:
        return list(np.diff(self.cu_q_lens[: self.num_seqs[0] + 1]))


def make_case(
    rng, lens: list[tuple[int, int]], K: int, group: int, H: int, S: int, dtype=np.float32, padding: int = 2
) -> Case:
    """lens: (q_len, kv_len) a sequence. Unused pages, tails of pages and padding rows hold NaN or nonsense."""
    B, W = len(lens) + padding, max(-(-kv // S) for _, kv in lens) + 1
    P = 2 + sum(-(-kv // S) for _, kv in lens) + 3
    order = iter(rng.permutation(np.arange(1, P)))
    k_pages, v_pages = np.full((P, K, H, S), np.nan, dtype), np.full((P, K, S, H), np.nan, dtype)
    page_table = np.zeros((B, W), np.int32)
    keys, values = [], []
    for b, (_, kv) in enumerate(lens):
        k, v = (rng.standard_normal((kv, K, H)).astype(dtype) for _ in range(2))
        keys.append(k.astype(np.float64))
        values.append(v.astype(np.float64))
        for i in range(-(-kv // S)):
            page = page_table[b, i] = next(order)
            part = slice(i * S, min(kv, (i + 1) * S))
            count = part.stop - part.start
            k_pages[page, :, :, :count] = k[part].transpose(1, 2, 0)
            v_pages[page, :, :count] = v[part].transpose(1, 0, 2)
    page_table[len(lens) :] = 7777777
    q_lens = [q for q, _ in lens]
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens), [sum(q_lens)] * padding]).astype(np.int32)
    kv_lens = np.array([kv for _, kv in lens] + [999] * padding, np.int32)
    T = sum(q_lens) + padding
    q = rng.standard_normal((T, K * group, H)).astype(np.float32)
    q[sum(q_lens) :] = np.nan
    return Case(keys, values, q, k_pages, v_pages, page_table, kv_lens, cu_q_lens, np.array([len(lens)], np.int32))


def expected(
    case: Case, *, scale: float, sliding_window: int | None = None, soft_cap: float | None = None
) -> np.ndarray:
    out = np.zeros(case.q.shape)
    for b, q_len in enumerate(case.q_lens()):
        k, v, start = case.k[b], case.v[b], case.cu_q_lens[b]
        group = case.q.shape[1] // k.shape[1]
        for t in range(q_len):
            position = len(k) - q_len + t
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            seen = slice(first, position + 1)
            for n in range(case.q.shape[1]):
                scores = k[seen, n // group] @ case.q[start + t, n].astype(np.float64) * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                weights = np.exp(scores - scores.max())
                out[start + t, n] = weights / weights.sum() @ v[seen, n // group]
    return out


def attend(case: Case, max_q_len: int | None = None, **options) -> np.ndarray:
    longest = max(case.q_lens(), default=1) if max_q_len is None else max_q_len
    fn = jax.jit(lambda *args: paged_attention(*args, max_q_len=longest, **options))
    return np.asarray(fn(case.q, case.k_pages, case.v_pages, *case.batch()))


def lengths(max_context: int = 150, max_queries: int = 40):
    pair = st.integers(1, max_context).flatmap(lambda kv: st.tuples(st.integers(1, min(kv, max_queries)), st.just(kv)))
    return st.lists(pair, min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(
    lens=lengths(),
    K=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7]),
    H=st.sampled_from([64, 80, 128]),
    S=st.sampled_from([16, 32, 64, 128]),
    window=st.sampled_from([None, None, 1, 5, 33, 100]),
    cap=st.sampled_from([None, None, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_mixed_batches(lens, K, group, H, S, window, cap, seed):
    case = make_case(np.random.default_rng(seed), lens, K, group, H, S)
    options = {"scale": H**-0.5, "sliding_window": window, "soft_cap": cap}
    got = attend(case, max_q_len=40, **options)
    np.testing.assert_allclose(got, expected(case, **options), rtol=1e-4, atol=2e-6)
    assert (got[case.cu_q_lens[-1] :] == 0).all()


@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
@pytest.mark.parametrize(("H", "S"), [(64, 32), (128, 16), (256, 64), (192, 128)])
def test_decode_over_several_chunks(group: int, H: int, S: int):
    rng = np.random.default_rng(group)
    case = make_case(rng, [(1, 1), (1, 700), (1, 256), (1, 257)], 2, group, H, S, padding=1)
    got = attend(case, scale=0.1)
    np.testing.assert_allclose(got, expected(case, scale=0.1), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("window", [None, 300])
def test_long_context_and_many_queries(window: int | None):
    rng = np.random.default_rng(0)
    case = make_case(rng, [(130, 900), (1, 2500), (60, 60)], 1, 3, 64, 32)
    options = {"scale": 0.125, "sliding_window": window}
    np.testing.assert_allclose(attend(case, **options), expected(case, **options), rtol=1e-4, atol=2e-6)


def test_half_precision_pages():
    rng = np.random.default_rng(1)
    case = make_case(rng, [(1, 300), (9, 40), (50, 100)], 2, 4, 64, 32, np.float16)
    np.testing.assert_allclose(attend(case, scale=0.125), expected(case, scale=0.125), rtol=1e-4, atol=2e-6)


def test_a_query_does_not_depend_on_its_batch():
    """Bit for bit: alone or among others, in one chunk of a prompt or in two, one token at a time."""
    rng = np.random.default_rng(2)
    H, S, context = 64, 32, 700
    case = make_case(rng, [(45, context), *[(1, 30 + i) for i in range(40)], (20, 400)], 1, 3, H, S)
    together = attend(case, scale=0.125, sliding_window=500)[:45]
    for begin, end in [(0, 45), (0, 20), (20, 45), (44, 45)]:
        cu, kv = np.array([0, end - begin], np.int32), np.array([context - 45 + end], np.int32)
        one = Case(
            [], [], case.q[begin:end], case.k_pages, case.v_pages, case.page_table[:1], kv, cu, np.array([1], np.int32)
        )
        np.testing.assert_array_equal(attend(one, scale=0.125, sliding_window=500), together[begin:end])


def test_extreme_scores():
    rng = np.random.default_rng(3)
    case = make_case(rng, [(3, 200), (1, 90)], 1, 2, 64, 32)
    case.q *= 300
    got = attend(case, scale=1.0)
    np.testing.assert_allclose(got, expected(case, scale=1.0), rtol=2e-3, atol=2e-3)


def test_nan_is_not_hidden():
    """A query that is NaN, or sees a key that is, gives NaN; no other does."""
    rng = np.random.default_rng(8)
    case = make_case(rng, [(4, 300), (1, 90)], 1, 2, 64, 32)
    case.q[1] = np.nan
    case.k_pages[case.page_table[0, 298 // 32], :, :, 298 % 32] = np.nan
    bad = np.isnan(attend(case, scale=0.1)).all(axis=(1, 2))
    assert bad.tolist()[:5] == [False, True, True, True, False]
    assert np.isfinite(attend(case, scale=0.1)[[0, 4]]).all()


def test_no_sequences():
    rng = np.random.default_rng(4)
    case = make_case(rng, [(2, 5)], 1, 1, 64, 16)
    case.num_seqs[0] = 0
    case.cu_q_lens[:] = 0
    assert (attend(case, max_q_len=2, scale=1.0) == 0).all()


def written(k_pages, v_pages, k, v, pages, offsets):
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for t, (page, offset) in enumerate(zip(pages, offsets, strict=True)):
        k_pages[page, :, :, offset], v_pages[page, :, offset] = k[t], v[t]
    return k_pages, v_pages


def places(rng, P: int, S: int, T: int, padding: int):
    """Runs of neighbouring places in permuted pages, then padding at the start of page 0."""
    flat = [page * S + offset for page in rng.permutation(np.arange(1, P)) for offset in range(S)]
    begin = int(rng.integers(0, S))
    chosen = np.array(flat[begin : begin + T] + [0] * padding)
    return (chosen // S).astype(np.int32), (chosen % S).astype(np.int32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("T", [1, 3, 70])
def test_write_in_place(dtype: type, T: int):
    rng = np.random.default_rng(T)
    P, K, H, S = 12, 2, 64, 16
    caches = [rng.standard_normal(shape).astype(dtype) for shape in [(P, K, H, S), (P, K, S, H)]]
    k, v = (rng.standard_normal((T + 1, K, H)).astype(np.float32) * 50 for _ in range(2))
    v[0, 0, :4] = 1e6, 1e-6, -3e-8, 65519
    pages, offsets = places(rng, P, S, T, 1)
    with np.errstate(over="ignore"):
        want = written(*caches, k.astype(dtype), v.astype(dtype), pages, offsets)
    on_device = [jax.device_put(cache) + dtype(0) for cache in caches]  # owned by the device, so it can be donated
    where = [cache.unsafe_buffer_pointer() for cache in on_device]
    got = jax.jit(write_kv, donate_argnums=(0, 1))(*on_device, k, v, pages, offsets)
    assert [cache.unsafe_buffer_pointer() for cache in got] == where
    for have, expect in zip(got, want, strict=True):
        np.testing.assert_array_equal(have, expect)


def test_write_keeps_the_old_cache_for_others():
    rng = np.random.default_rng(5)
    caches = [rng.standard_normal(shape).astype(np.float32) for shape in [(3, 1, 16, 16), (3, 1, 16, 16)]]
    one = np.ones((1, 1, 16), np.float32)
    page = np.array([1], np.int32)

    @jax.jit
    def both(keys, values):
        doubled = keys * 2
        return write_kv(doubled, values, one, one, page, page), doubled

    (keys, _), doubled = both(*caches)
    np.testing.assert_array_equal(doubled, caches[0] * 2)
    assert (np.asarray(keys)[1, :, :, 1] == 1).all()


def test_places_outside_the_cache_are_left_out():
    caches = [np.zeros((2, 1, 16, 16), np.float32) for _ in range(2)]
    ones = np.ones((4, 1, 16), np.float32)
    pages, offsets = np.array([2, -1, 1, 1], np.int32), np.array([0, 0, 16, -1], np.int32)
    for cache in jax.jit(write_kv)(*caches, ones, ones, pages, offsets):
        assert (np.asarray(cache) == 0).all()


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("lens", [[(1, 90), (1, 5), (1, 300)], [(1, 40), (35, 35), (20, 300)]])
def test_fused(normed: bool, lens: list[tuple[int, int]]):
    """The fused op against rotation, writes and attention one by one."""
    rng = np.random.default_rng(6)
    K, group, H, S = 2, 3, 64, 32
    case = make_case(rng, lens, K, group, H, S)
    T, N = len(case.q), K * group
    qkv = rng.standard_normal((T, (N + 2 * K) * H)).astype(np.float32)
    angles = rng.uniform(-3, 3, (T, H // 2)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    norms = (
        [Norm(rng.standard_normal(H).astype(np.float32), 1e-6, plus_one=True) for _ in range(2)]
        if normed
        else [None, None]
    )
    q, k, v = np.split(qkv.reshape(T, N + 2 * K, H).astype(np.float64), [N, N + K], axis=1)

    def prepared(x, norm):
        if norm is not None:
            x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + norm.eps) * (1 + norm.weight)
        a, b = np.split(x, 2, -1)
        c, s = cos[:, None], sin[:, None]
        return np.concatenate([a * c - b * s, b * c + a * s], -1).astype(np.float32)

    q, k, v = prepared(q, norms[0]), prepared(k, norms[1]), v.astype(np.float32)
    pages, offsets = np.zeros(T, np.int32), np.zeros(T, np.int32)
    for b, (q_len, kv) in enumerate(lens):
        tokens = slice(case.cu_q_lens[b], case.cu_q_lens[b + 1])
        positions = np.arange(kv - q_len, kv)
        pages[tokens], offsets[tokens] = case.page_table[b, positions // S], positions % S
        case.k[b][positions], case.v[b][positions] = k[tokens], v[tokens]
    case.q = q
    options = {"scale": 0.125, "max_q_len": max(q for q, _ in lens)}
    fn = jax.jit(lambda *args: attend_qkv(*args, q_norm=norms[0], k_norm=norms[1], **options))
    out, k_pages, v_pages = fn(qkv, cos, sin, case.k_pages, case.v_pages, pages, offsets, *case.batch())
    want = written(case.k_pages, case.v_pages, k, v, pages, offsets)
    for have, expect in zip((k_pages, v_pages), want, strict=True):
        np.testing.assert_allclose(have[1:], expect[1:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, expected(case, scale=0.125).reshape(T, -1), rtol=1e-4, atol=1e-5)


def test_fused_refuses_half_a_norm():
    norm = Norm(np.ones(64, np.float32), 1e-6)
    x = np.zeros((1, 192), np.float32)
    cache = np.zeros((1, 1, 64, 16), np.float32)
    with pytest.raises(ValueError, match="together"):
        attend_qkv(x, x, x, cache, cache, x, x, x, x, x, x, max_q_len=1, scale=1.0, q_norm=norm)
