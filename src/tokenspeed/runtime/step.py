"""The programs of a step, pure functions of (weights, state, packed batch): decode, backbone, head, prompt scores.

A decode-only schedule is one program for a sequence bucket. Any other is a backbone program for a token bucket, which
leaves the last hidden state of each row, then a head program for a sequence bucket: the number of programs is a sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tokenspeed.config import ModelConfig
from tokenspeed.layers.attention import AttentionKernels, TokenBatch
from tokenspeed.models import dense
from tokenspeed.runtime.batch import Batch, Bucket, decode_rows, unpack
from tokenspeed.runtime.sampler import Scores, sample, score
from tokenspeed.runtime.state import DeviceState, update_pages
from tokenspeed.types import MAX_LOGPROBS, NO_TOKEN

SCORE_ROWS = 64
"""Prompt positions scored at once."""


class StepModel(NamedTuple):
    """What the programs are built from; hashable."""

    config: ModelConfig
    dtype: jnp.dtype
    kernels: AttentionKernels


def _tokens(model: StepModel, state: DeviceState, batch: Batch, max_q_len: int) -> TokenBatch:
    T = batch.positions.shape[0]
    tokens = jnp.arange(T)
    row = jnp.searchsorted(batch.cu_q_lens, tokens, side="right", method="compare_all") - 1
    row = jnp.minimum(row, batch.slots.shape[0] - 1)
    live = tokens < batch.cu_q_lens[batch.num_seqs[0]]
    slots = jnp.where(live, batch.slots[row], state.last_tokens.shape[0] - 1)
    page_size = state.cache[0][0].shape[3]
    return TokenBatch(
        token_ids=jnp.where(batch.token_ids == NO_TOKEN, state.last_tokens[slots], batch.token_ids),
        positions=batch.positions,
        prompt_lens=state.sampling.ints[slots, 4],
        pages=jnp.where(live, state.page_table[slots, batch.positions // page_size], 0),
        offsets=batch.positions % page_size,
        page_table=state.page_table[batch.slots],
        kv_lens=batch.kv_lens,
        cu_q_lens=batch.cu_q_lens,
        num_seqs=batch.num_seqs,
        max_q_len=max_q_len,
        kernels=model.kernels,
    )


def pack_scores(scores: Scores) -> jax.Array:
    """int32 [R, 42]: log-probability's bits, rank, top ids, top log-probabilities' bits."""
    floats = lax.bitcast_convert_type(jnp.concatenate([scores.logprobs[:, None], scores.top_logprobs], 1), jnp.int32)
    return jnp.concatenate([floats[:, :1], scores.ranks[:, None], scores.top_ids, floats[:, 1:]], 1)


def _choose(model: StepModel, weights: dense.Weights, state: DeviceState, hidden: jax.Array, batch: Batch):
    """Samples a token for each row of hidden [B, D]. Returns the state and int32 [B, 1 + 42]: token, its scores."""
    with jax.named_scope("sample"):
        logits = dense.logits(model.config, weights, hidden)
        token_ids = sample(logits, state.sampling, batch.slots, batch.output_positions)
        scores = lax.cond(
            batch.wants_logprobs != 0,
            lambda: pack_scores(score(logits, token_ids)),
            lambda: jnp.zeros((logits.shape[0], 2 + 2 * MAX_LOGPROBS), jnp.int32),
        )
        sampled = (batch.samples != 0) & (jnp.arange(token_ids.shape[0]) < batch.num_seqs[0])
        padding = state.last_tokens.shape[0] - 1
        slots = jnp.where(sampled, batch.slots, padding)
        counts = state.sampling.output_counts.at[slots, token_ids].add(jnp.where(sampled, 1, 0))
        state = replace(
            state,
            last_tokens=state.last_tokens.at[slots].set(jnp.where(sampled, token_ids, 0)),
            sampling=replace(state.sampling, output_counts=counts),
        )
        return state, jnp.concatenate([jnp.where(sampled, token_ids, NO_TOKEN)[:, None], scores], 1)


def decode(
    model: StepModel, bucket: Bucket, weights: dense.Weights, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """One token for each row. Returns the state and int32 [B, 43]."""
    batch = decode_rows(unpack(packed, bucket))
    state = update_pages(state, batch.page_updates)
    hidden, cache = dense.forward(model.config, weights, state.cache, _tokens(model, state, batch, 1), model.dtype)
    return _choose(model, weights, replace(state, cache=cache), hidden, batch)


def backbone(
    model: StepModel, bucket: Bucket, weights: dense.Weights, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """Runs the layers over T tokens. Returns the state, the rows' last hidden states [B, D], and all of them [T, D]."""
    batch = unpack(packed, bucket)
    state = update_pages(state, batch.page_updates)
    tokens = _tokens(model, state, batch, bucket.tokens)
    hidden, cache = dense.forward(model.config, weights, state.cache, tokens, model.dtype)
    return replace(state, cache=cache), hidden[jnp.maximum(batch.cu_q_lens[1:] - 1, 0)], hidden


def head(
    model: StepModel,
    bucket: Bucket,
    rows: int,
    weights: dense.Weights,
    state: DeviceState,
    hidden: jax.Array,
    packed: jax.Array,
) -> tuple[DeviceState, jax.Array]:
    """Samples the first `rows` rows of the backbone's last hidden states. Its bucket has no tokens and no updates."""
    return _choose(model, weights, state, hidden[:rows], unpack(packed, bucket))


def prompt_scores(
    model: StepModel, weights: dense.Weights, hidden: jax.Array, start: jax.Array, target_ids: jax.Array
) -> jax.Array:
    """Scores target_ids [64] against hidden[start : start + 64] of [T, D]: int32 [64, 42]; rows beyond T repeat the last."""
    places = jnp.minimum(start + jnp.arange(SCORE_ROWS), hidden.shape[0] - 1)
    return pack_scores(score(dense.logits(model.config, weights, hidden[places]), target_ids))
