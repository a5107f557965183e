"""Packing against plain numpy, and the products against the same arithmetic in float64."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import Layout, Norm, PackedWeight, pack, quantized_matmul, quantized_rows, unpack

# Values' range, group size, and how offsets relate to scales: none, a multiple of the scale, or their own.
KINDS = {
    "q4_0": (0, 15, 32, -8),
    "q4_1": (0, 15, 32, "own"),
    "q5_0": (0, 31, 32, -16),
    "q5_1": (0, 31, 32, "own"),
    "q6_k": (0, 63, 16, -32),
    "q6_own": (0, 63, 16, "own"),
    "u6": (0, 63, 32, "own"),
    "q8_0": (-127, 127, 32, None),
    "q8_16": (-128, 127, 16, "own"),
    "q8_full": (-128, 127, 32, -3),
    "int4_128": (-8, 7, 128, None),
    "int4_own": (-8, 7, 32, "own"),
}


def random_weight(rng: np.random.Generator, kind: str, n: int, k: int):
    low, high, group, relation = KINDS[kind]
    values = rng.integers(low, high + 1, (n, k)).astype(np.int8)
    values.flat[:2] = low, high
    scales = (rng.random((n, k // group)) * 0.1 + 0.001).astype(np.float16).astype(np.float32)
    if relation == "own":
        offsets = rng.standard_normal(scales.shape).astype(np.float16).astype(np.float32)
    else:
        offsets = None if relation is None else np.float32(relation) * scales
    return values, scales, offsets, group


def dequantised(values, scales, offsets, group) -> np.ndarray:
    shift = 0 if offsets is None else np.repeat(offsets, group, axis=1)
    return values * np.repeat(scales, group, axis=1) + np.float32(shift)


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Activations as the kernel rounds them: int8 [M, K] and float32 scales [M, K]."""
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    scales = np.broadcast_to(top * (np.float32(1) / np.float32(127)), groups.shape)
    return np.rint(groups * inverse).reshape(x.shape), scales.reshape(x.shape)


def run(x: np.ndarray, weight: PackedWeight, **kwargs) -> np.ndarray:
    return np.asarray(jax.jit(lambda x, b: quantized_matmul(x, b, weight.layout, **kwargs))(x, weight.arrays[0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_unpack_inverts_pack(kind: str, gated: bool):
    rng = np.random.default_rng(0)
    for n, k in [(2, 256), (50, 256), (16 * 300, 128)]:
        parts = random_weight(rng, kind, n, k)
        weight = pack(*parts, gated=gated)
        assert weight.arrays[0].shape == weight.layout.shape
        exact = kind != "int4_own"  # its offset moves by 8 scales, which float16 rounds
        np.testing.assert_allclose(unpack(weight), dequantised(*parts), rtol=0, atol=0 if exact else 2e-3)


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    m=st.integers(1, 13),
    n=st.integers(1, 70),
    blocks=st.integers(1, 9),
    seed=st.integers(0, 2**32 - 1),
)
def test_product(kind: str, m: int, n: int, blocks: int, seed: int):
    rng = np.random.default_rng(seed)
    weight = pack(*random_weight(rng, kind, n, 128 * blocks))
    x = (rng.standard_normal((m, 128 * blocks)) * 10 ** rng.uniform(-2, 2, (m, 1))).astype(np.float32)
    x[rng.random(m) < 0.2] = 0
    got = run(x, weight)
    w = unpack(weight).astype(np.float64)
    q, scales = quantised(x)
    rounded = q.astype(np.float64) * scales
    # The same integers and scales: what is left is float32 summation.
    layout = weight.layout
    zero = layout.zero or 0
    largest = np.abs(w).max() + 2 * abs(zero) * np.abs(w).max() / max(1, 127 - zero)
    summation = 3e-6 * (np.abs(rounded).sum(-1, keepdims=True) * largest + 1e-30)
    assert (np.abs(got - rounded @ w.T) <= summation).all()
    # And within the rounding of activations of the float64 product.
    bound = (scales / 2 * (1 + 1e-5)) @ np.abs(w).T
    assert (np.abs(got - x.astype(np.float64) @ w.T) <= bound + summation).all()


def test_one_group_is_exact():
    """With a power-of-two scale everything is an integer below 2^24: any slip shows."""
    rng = np.random.default_rng(1)
    for low, high in [(0, 15), (0, 31), (0, 63), (-128, 127)]:
        values = rng.integers(low, high + 1, (48, 32)).astype(np.int8)
        values[0], values[1, ::2], values[2] = high, low, low
        weight = pack(values, np.full((48, 1), 0.5, np.float32))
        x = rng.integers(-127, 128, (9, 32)).astype(np.float32)
        x[:, 0] = 127
        x[0] = 127
        x[1] = -127
        np.testing.assert_array_equal(run(x, weight), x @ values.T * np.float32(0.5))


def test_many_rows_and_wide_k_cross_every_band():
    rng = np.random.default_rng(2)
    weight = pack(*random_weight(rng, "q4_1", 40, 8192))
    x = rng.standard_normal((75, 8192)).astype(np.float32)
    q, scales = quantised(x)
    expected = (q * scales).astype(np.float64) @ unpack(weight).T
    np.testing.assert_allclose(run(x, weight), expected, rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(run(x, weight)[:5], run(x[:5], weight))  # a row does not depend on its batch


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("m", [1, 6, 19])
def test_fused_neighbours(gate: str | None, normed: bool, m: int):
    rng = np.random.default_rng(3)
    n, k = 44, 192
    weight = pack(*random_weight(rng, "q4_1", n, k), gated=gate is not None)
    columns = weight.layout.n
    x, norm = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)
    residual = rng.standard_normal((m, columns)).astype(np.float32)
    out_norm = Norm(rng.standard_normal(columns).astype(np.float32), 1e-4, plus_one=True) if normed else None
    got = run(
        x, weight, norm=Norm(norm, 1e-5, plus_one=True), bias=bias, gate=gate, out_norm=out_norm, residual=residual
    )
    normed = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * (1 + norm.astype(np.float64))
    y = run(normed.astype(np.float32), pack(*random_weight(np.random.default_rng(3), "q4_1", n, k)))
    y = y.astype(np.float64) + bias
    if gate:
        g, u = jnp.asarray(y[:, :columns], jnp.float32), y[:, columns:]
        y = np.asarray(jax.nn.silu(g) if gate == "silu" else jax.nn.gelu(g, approximate=True), np.float64) * u
    if out_norm is not None:
        y = y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-4) * (1 + out_norm.weight)
    np.testing.assert_allclose(got, y + residual, rtol=2e-3, atol=2e-3 * np.abs(y).max())


def test_residual_keeps_its_value_for_others():
    rng = np.random.default_rng(4)
    weight = pack(*random_weight(rng, "q8_0", 64, 64))
    x = rng.standard_normal((3, 64)).astype(np.float32)

    @jax.jit
    def both(x: jax.Array, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        doubled = 2 * x
        return quantized_matmul(doubled, blocks, weight.layout, residual=doubled), doubled + 1

    y, other = both(x, weight.arrays[0])
    np.testing.assert_array_equal(other, 2 * x + 1)
    np.testing.assert_allclose(y, 2 * x + run(2 * x, weight), rtol=1e-6, atol=1e-5)


def test_callers_in_several_threads_at_once():
    """The pool serves one caller at a time; the others work alone, with the same results."""
    rng = np.random.default_rng(9)
    weight = pack(*random_weight(rng, "q4_1", 300, 128))
    fn = jax.jit(lambda x, b: quantized_matmul(x, b, weight.layout))
    inputs = [rng.standard_normal((m, 128)).astype(np.float32) for m in (1, 3, 8, 33)]
    alone = [np.asarray(fn(x, weight.arrays[0])) for x in inputs]

    def many(i: int) -> bool:
        return all(np.array_equal(fn(inputs[i], weight.arrays[0]), alone[i]) for _ in range(60))

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(many, range(len(inputs))))


def test_nan_and_infinity_stay_in_their_rows():
    rng = np.random.default_rng(5)
    weight = pack(*random_weight(rng, "q4_1", 32, 64))
    x = rng.standard_normal((5, 64)).astype(np.float32)
    x[1, 7], x[3, 40] = np.nan, np.inf
    got = run(x, weight)
    assert not np.isfinite(got[[1, 3]]).any()
    assert np.isfinite(got[[0, 2, 4]]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str):
    rng = np.random.default_rng(6)
    weight = pack(*random_weight(rng, kind, 90, 128))
    ids = np.array([0, 89, 5, 5, 16, 17, 31, 90, -1], np.int32)
    got = np.asarray(jax.jit(lambda ids, b: quantized_rows(ids, b, weight.layout))(ids, weight.arrays[0]))
    np.testing.assert_allclose(got[:7], unpack(weight)[ids[:7]], rtol=1e-6, atol=1e-7)
    assert np.isnan(got[7:]).all()


@pytest.mark.parametrize("magnitude", [1e-9, 1e-5, 1.0, 1e7])
def test_gain_keeps_scales_within_half_precision(magnitude: float):
    rng = np.random.default_rng(7)
    values, scales, offsets, group = random_weight(rng, "q4_1", 32, 64)
    assert offsets is not None
    scales, offsets = scales * np.float32(magnitude), offsets * np.float32(magnitude)
    weight = pack(values, scales, offsets, group)
    np.testing.assert_allclose(
        unpack(weight), dequantised(values, scales, offsets, group), rtol=2e-3, atol=4e-3 * magnitude
    )
    x = rng.standard_normal((2, 64)).astype(np.float32)
    np.testing.assert_allclose(run(x, weight), x @ unpack(weight).T, rtol=0, atol=0.2 * magnitude)


def test_fewest_bits():
    def layout(low: int, high: int, group: int = 32) -> Layout:
        values = np.array([[low, high] * 32] * 2, np.int8)
        return pack(values, np.ones((2, 64 // group), np.float32), group_size=group).layout

    assert [layout(0, high).bits for high in (15, 16, 31, 32, 63, 64)] == [4, 5, 5, 6, 6, 8]
    assert [(layout(-8, 7).bits, layout(-8, 7).zero), (layout(-9, 7).bits, layout(-33, 0).bits)] == [(4, 8), (5, 8)]
    assert layout(0, 15, 16).bits == 6


@pytest.mark.parametrize(
    ("shape", "group", "gated", "scale"),
    [((4, 48), 32, False, 1.0), ((4, 64), 24, False, 1.0), ((3, 64), 32, True, 1.0), ((4, 64), 32, False, np.inf)],
)
def test_refuses_what_it_cannot_pack(shape: tuple[int, int], group: int, gated: bool, scale: float):
    values = np.zeros(shape, np.int8)
    scales = np.full((shape[0], shape[1] // group), scale, np.float32)
    with pytest.raises(ValueError, match=r"cannot pack|not finite"):
        pack(values, scales, group_size=group, gated=gated)


def test_gate_must_match_the_weight():
    weight = pack(np.ones((4, 32), np.int8), np.ones((4, 1), np.float32), gated=True)
    with pytest.raises(ValueError, match="packed with a gate"):
        run(np.ones((1, 32), np.float32), weight)
