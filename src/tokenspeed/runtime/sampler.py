"""Chooses tokens on the device: every request's own settings in one program, no sort over the vocabulary.

Order (vLLM's): allowed ids, min_tokens, logit bias, repetition, frequency and presence penalties, argmax or temperature,
min_p, top_k, top_p. Thresholds of top-k and top-p are found by bisection over the bits of the logits, exactly. Random
numbers are counter-based: Threefry of (seed, output position), one uniform a token, inverted through the cumulative
distribution, so that a request's tokens depend on nothing else in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from tokenspeed.runtime.state import SamplingState
from tokenspeed.types import GREEDY_TEMPERATURE, MAX_LOGPROBS

NEG_INF = float("-inf")
LANES = 128
"""Width of the blocks in which the cumulative distribution is searched."""


class Scores(NamedTuple):
    """Log-probabilities of one id a row, its rank, and the most likely ids. R rows."""

    logprobs: jax.Array
    """float32 [R]"""
    ranks: jax.Array
    """int32 [R]"""
    top_ids: jax.Array
    """int32 [R, 20]"""
    top_logprobs: jax.Array
    """float32 [R, 20]"""


class _Rows(NamedTuple):
    """The sampling state of the rows in this step. B rows."""

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    top_k: jax.Array
    min_tokens: jax.Array
    seed: jax.Array


def _rows(state: SamplingState, slots: jax.Array) -> _Rows:
    floats, ints = state.floats[slots], state.ints[slots]
    seed = lax.bitcast_convert_type(ints[:, 2:4], jnp.uint32)[:, ::-1]
    return _Rows(
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        repetition=floats[:, 3],
        presence=floats[:, 4],
        frequency=floats[:, 5],
        top_k=ints[:, 0],
        min_tokens=ints[:, 1],
        seed=seed,
    )


def _unpack(words: jax.Array, size: int) -> jax.Array:
    """bool [B, size] from bits [B, ceil(size / 32)]."""
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(words.shape[0], -1)[:, :size].astype(bool)


def _penalised(
    logits: jax.Array, state: SamplingState, slots: jax.Array, rows: _Rows, uses_prompt: jax.Array
) -> jax.Array:
    counts = state.output_counts[slots]
    seen = counts > 0
    seen_or_prompt = jnp.where(uses_prompt[:, None], seen | _unpack(state.in_prompt[slots], logits.shape[1]), seen)
    factor = rows.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(seen_or_prompt, repeated, logits)
    return logits - rows.frequency[:, None] * counts - rows.presence[:, None] * seen


def _constrained(
    logits: jax.Array, state: SamplingState, slots: jax.Array, rows: _Rows, output_positions: jax.Array
) -> jax.Array:
    """Masks, bias and penalties; each costs nothing when no row asks for it."""
    B, V = logits.shape
    allowed = state.allowed[slots]
    stops = jnp.where((output_positions < rows.min_tokens)[:, None], state.stops[slots], 0)
    logits = jnp.where(_unpack(allowed & ~stops, V), logits, NEG_INF)
    bias_ids = state.bias_ids[slots]
    logits = lax.cond(
        jnp.any(bias_ids[:, 0] < V),
        lambda x: x.at[jnp.arange(B)[:, None], bias_ids].add(state.bias_values[slots], mode="drop"),
        lambda x: x,
        logits,
    )
    penalises = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    uses_prompt = state.ints[slots, 5] != 0
    return lax.cond(jnp.any(penalises), lambda x: _penalised(x, state, slots, rows, uses_prompt), lambda x: x, logits)


def _ordered(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the float32 values."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _search(reaches: Callable[[jax.Array], jax.Array], shape: tuple[int, ...]) -> jax.Array:
    """The largest uint32 key for which `reaches(key)` holds, bit by bit; `reaches` holds up to some key, then no more."""

    def bit(i: jax.Array, key: jax.Array) -> jax.Array:
        candidate = key | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(reaches(candidate), candidate, key)

    return lax.fori_loop(0, 32, bit, jnp.zeros(shape, jnp.uint32))


def _top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Masks all but the top_k largest logits of each row (0: all stay); ties with the last one stay."""
    keys = _ordered(logits)
    wanted = jnp.where(top_k > 0, jnp.minimum(top_k, logits.shape[1]), logits.shape[1])
    threshold = _search(lambda key: jnp.sum(keys >= key[:, None], -1) >= wanted, top_k.shape)
    return jnp.where(keys >= threshold[:, None], logits, NEG_INF)


def _top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Masks all but the smallest set of most likely ids whose mass reaches top_p; ties with the last one stay."""
    keys = _ordered(logits)
    probs = jax.nn.softmax(logits, -1)
    # At 1 no key is high enough and every id stays, whatever rounding does to the sum.
    wanted = jnp.where(top_p >= 1, jnp.inf, jnp.minimum(top_p, jnp.sum(probs, -1)))
    mass = lambda key: jnp.sum(jnp.where(keys >= key[:, None], probs, 0), -1)  # noqa: E731
    threshold = _search(lambda key: mass(key) >= wanted, top_p.shape)
    return jnp.where(keys >= threshold[:, None], logits, NEG_INF)


def _uniforms(seeds: jax.Array, counters: jax.Array) -> jax.Array:
    """float32 [B] in [0, 1): Threefry-2x32 of (seed [B, 2], counter [B]) (Salmon et al., 2011)."""
    words = jax.vmap(lambda seed, n: threefry_2x32(seed, jnp.stack([n.astype(jnp.uint32), jnp.uint32(0)])))(
        seeds, counters
    )
    return (words[:, 0] >> 8).astype(jnp.float32) * 2.0**-24


def _invert(probs: jax.Array, uniforms: jax.Array) -> jax.Array:
    """The first id whose cumulative probability exceeds the row's uniform; blocks first, then inside one."""
    B, V = probs.shape
    blocks = jnp.pad(probs, ((0, 0), (0, -V % LANES))).reshape(B, -1, LANES)
    sums = jnp.cumsum(jnp.sum(blocks, -1), -1)
    target = uniforms * sums[:, -1]
    block = jnp.minimum(jnp.sum(sums <= target[:, None], -1), sums.shape[1] - 1)
    before = jnp.where(block > 0, jnp.take_along_axis(sums, jnp.maximum(block - 1, 0)[:, None], 1)[:, 0], 0)
    inside = jnp.take_along_axis(blocks, block[:, None, None], 1)[:, 0]
    place = jnp.sum(jnp.cumsum(inside, -1) <= (target - before)[:, None], -1)
    # Rounding can push the place past the block's last possible id: then take that one.
    last = LANES - 1 - jnp.argmax(inside[:, ::-1] > 0, -1)
    return (block * LANES + jnp.minimum(place, last)).astype(jnp.int32)


def _drawn(logits: jax.Array, rows: _Rows, output_positions: jax.Array) -> jax.Array:
    scaled = logits / jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    floor = jnp.max(scaled, -1) + jnp.log(rows.min_p)
    scaled = jnp.where(scaled >= floor[:, None], scaled, NEG_INF)
    scaled = lax.cond(jnp.any(rows.top_k > 0), lambda x: _top_k(x, rows.top_k), lambda x: x, scaled)
    scaled = lax.cond(jnp.any(rows.top_p < 1), lambda x: _top_p(x, rows.top_p), lambda x: x, scaled)
    probs = jnp.exp(scaled - jnp.max(scaled, -1, keepdims=True))
    return _invert(probs, _uniforms(rows.seed, output_positions))


def sample(logits: jax.Array, state: SamplingState, slots: jax.Array, output_positions: jax.Array) -> jax.Array:
    """Chooses one id a row: logits float32 [B, V], slots and output_positions int32 [B] -> int32 [B]."""
    rows = _rows(state, slots)
    constrained = _constrained(logits, state, slots, rows, output_positions)
    greedy = jnp.argmax(constrained, -1).astype(jnp.int32)
    draws = rows.temperature >= GREEDY_TEMPERATURE
    drawn = lax.cond(
        jnp.any(draws), lambda: _drawn(constrained, rows, output_positions), lambda: jnp.zeros_like(greedy)
    )
    return jnp.where(draws, drawn, greedy)


def score(logits: jax.Array, ids: jax.Array) -> Scores:
    """Log-probabilities of ids [R] under raw logits [R, V], their ranks, and the 20 most likely ids."""
    V = logits.shape[1]
    total = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, ids[:, None], 1)
    width = min(MAX_LOGPROBS, V)
    top, top_ids = lax.top_k(logits, width)
    pad = ((0, 0), (0, MAX_LOGPROBS - width))
    return Scores(
        logprobs=chosen[:, 0] - total,
        ranks=jnp.sum(logits > chosen, -1).astype(jnp.int32) + 1,
        top_ids=jnp.pad(top_ids.astype(jnp.int32), pad),
        top_logprobs=jnp.pad(top - total[:, None], pad, constant_values=NEG_INF),
    )
