"""The sampler against a plain numpy reading of its order of application, row by row."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tokenspeed.config import ModelConfig, Rope
from tokenspeed.runtime import state as device_state
from tokenspeed.runtime.sampler import sample, score
from tokenspeed.types import RunnerLimits, SamplingParams, SlotParams

V = 100
SLOTS = 8
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=V,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1e4),
)
LIMITS = RunnerLimits(
    num_pages=2, page_size=16, max_num_seqs=SLOTS, max_num_batched_tokens=16, max_model_len=64, vocab_size=V
)
PROMPT = np.asarray([3, 4, 4, 5], np.int32)
OUTPUT = np.asarray([7, 7, 8], np.int32)
STOPS = (9,)

_sample = jax.jit(sample)
_admit = jax.jit(device_state.admit)


def states(params: list[SamplingParams], seed: int = 11) -> device_state.SamplingState:
    state = device_state.zeros(MODEL, LIMITS, jnp.dtype("float32"))
    rows = device_state.SlotRows(V)
    for slot, sampling in enumerate(params):
        state = _admit(state, rows.row(SlotParams(slot, sampling, seed + slot, STOPS, PROMPT, OUTPUT)))
    return state.sampling


def adjusted(logits: np.ndarray, params: SamplingParams, output_position: int) -> np.ndarray:
    """Logits after masks, bias and penalties."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(V), params.allowed_token_ids)] = -np.inf
    x[list(params.banned_token_ids)] = -np.inf
    if output_position < params.min_tokens:
        x[list(STOPS)] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += np.clip(bias, -100, 100)
    counts = np.bincount(OUTPUT, minlength=V)
    seen = (counts > 0) | (np.bincount(PROMPT, minlength=V) > 0)
    r = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def distribution(logits: np.ndarray, params: SamplingParams, output_position: int) -> np.ndarray:
    """Probabilities the token is drawn from."""
    x = adjusted(logits, params, output_position) / max(params.temperature, 0.01)
    x = np.where(x >= x.max() + np.log(max(params.min_p, 1e-300)), x, -np.inf)
    order = np.argsort(-x, kind="stable")
    if params.top_k > 0:
        x[order[params.top_k :]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    if params.top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= params.top_p]] = 0
        p /= p.sum()
    return p


GREEDY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, repetition_penalty=1.7),
    SamplingParams(temperature=0, presence_penalty=1.5, frequency_penalty=-1.0),
    SamplingParams(temperature=0, logit_bias={50: 8.0, 51: -100.0, 52: 500.0}),
    SamplingParams(temperature=0, allowed_token_ids=(1, 2, 9), min_tokens=4),
    SamplingParams(temperature=0, banned_token_ids=tuple(range(0, V, 2))),
    SamplingParams(temperature=1e-6, top_p=0.5),
    SamplingParams(temperature=0, min_tokens=3),
]


@pytest.mark.parametrize("seed", range(5))
def test_greedy_rows_take_the_best_allowed_penalised_id(seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(SLOTS, V)).astype(np.float32) * 3
    positions = np.full(SLOTS, len(OUTPUT), np.int32)
    got = _sample(logits, states(GREEDY), np.arange(SLOTS), positions)
    wanted = [adjusted(logits[i], params, 3).argmax() for i, params in enumerate(GREEDY)]
    assert got.tolist() == wanted


DRAWN = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, top_k=10, top_p=0.6, min_p=0.02, repetition_penalty=1.3),
    SamplingParams(temperature=2.0, presence_penalty=2.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, top_k=1),
]


def test_draws_follow_the_distribution_and_never_leave_its_support() -> None:
    """4,000 draws a row by counting the output position up; chi-squared against the numpy distribution."""
    draws = 4000
    logits = np.random.default_rng(0).normal(size=(SLOTS, V)).astype(np.float32) * 2
    state = states(DRAWN)
    many = jax.jit(
        jax.vmap(lambda n: sample(jnp.asarray(logits), state, jnp.arange(SLOTS), jnp.full(SLOTS, n, jnp.int32)))
    )
    got = np.asarray(many(jnp.arange(3, 3 + draws)))
    for row, params in enumerate(DRAWN):
        p = distribution(logits[row], params, 3)
        counts = np.bincount(got[:, row], minlength=V)
        assert not counts[p == 0].any(), params
        likely = p * draws >= 5
        expected, seen = p[likely] * draws, counts[likely]
        rest = draws - expected.sum()
        chi2 = ((seen - expected) ** 2 / expected).sum() + (draws - seen.sum() - rest) ** 2 / max(rest, 1)
        freedom = likely.sum()
        # Mean freedom, variance 2 * freedom: five standard deviations.
        assert chi2 < freedom + 5 * np.sqrt(2 * freedom) + 5, (params, chi2, freedom)


def test_a_row_depends_on_its_seed_and_position_alone() -> None:
    logits = np.random.default_rng(1).normal(size=(SLOTS, V)).astype(np.float32)
    logits[:] = logits[0]
    params = [SamplingParams(temperature=1.0)] * SLOTS
    state = states(params)
    together = _sample(logits, state, np.arange(SLOTS), np.full(SLOTS, 5, np.int32)).tolist()
    shuffled = _sample(logits, state, np.arange(SLOTS)[::-1], np.full(SLOTS, 5, np.int32)).tolist()
    alone = [_sample(logits[:1], state, np.asarray([slot]), np.asarray([5], np.int32)).item() for slot in range(SLOTS)]
    assert together == shuffled[::-1] == alone
    assert len(set(together)) > 1
    assert _sample(logits, state, np.arange(SLOTS), np.full(SLOTS, 6, np.int32)).tolist() != together


def test_seeds_of_64_bits_all_count() -> None:
    logits = np.zeros((1, V), np.float32)
    drawn = Counter(
        _sample(logits, states([SamplingParams(temperature=1.0)], seed), np.asarray([0]), np.asarray([0])).item()
        for seed in (0, 1, 1 << 32, 1 << 63, (1 << 64) - 1, 5, 5 << 32)
    )
    assert len(drawn) >= 5


def test_ties_and_infinities_are_drawn_without_nan() -> None:
    logits = np.full((SLOTS, V), -np.inf, np.float32)
    logits[:, 40:44] = 1.0
    got = _sample(logits, states(DRAWN), np.arange(SLOTS), np.zeros(SLOTS, np.int32))
    assert set(got.tolist()) <= {40, 41, 42, 43}


@pytest.mark.parametrize("vocab", [V, 12])
def test_scores_are_those_of_log_softmax(vocab: int) -> None:
    logits = np.random.default_rng(2).normal(size=(3, vocab)).astype(np.float32)
    ids = np.asarray([0, 5, 7])
    got = score(jnp.asarray(logits), jnp.asarray(ids))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    order = np.argsort(-logits, -1)
    np.testing.assert_allclose(got.logprobs, exact[np.arange(3), ids], atol=1e-5)
    assert got.ranks.tolist() == [order[i].tolist().index(ids[i]) + 1 for i in range(3)]
    width = min(20, vocab)
    np.testing.assert_array_equal(got.top_ids[:, :width], order[:, :width])
    np.testing.assert_allclose(got.top_logprobs[:, :width], np.take_along_axis(exact, order[:, :width], 1), atol=1e-5)
    assert np.all(np.isneginf(got.top_logprobs[:, width:]))
