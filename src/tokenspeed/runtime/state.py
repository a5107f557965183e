"""What lives on the device between steps: the cache, the page table, last tokens and every slot's sampling state."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tokenspeed.config import ModelConfig
from tokenspeed.layers.attention import Cache
from tokenspeed.pytree import record
from tokenspeed.types import MAX_LOGIT_BIAS, RunnerLimits, SlotParams

UINT32 = 2**32


@record
class SamplingState:
    """One row a slot, and a last one for padding. S slots, V vocabulary."""

    floats: jax.Array
    """float32 [S + 1, 6]: temperature, top_p, min_p, repetition, presence and frequency penalty."""
    ints: jax.Array
    """int32 [S + 1, 6]: top_k (0 off), min_tokens, seed's low and high word, prompt length, prompt mask in use."""
    bias_ids: jax.Array
    """int32 [S + 1, 512]; V where unused."""
    bias_values: jax.Array
    """float32 [S + 1, 512]"""
    allowed: jax.Array
    """uint32 [S + 1, ceil(V / 32)]: bit set where the id may be chosen."""
    stops: jax.Array
    """uint32 [S + 1, ceil(V / 32)]: ids masked until min_tokens."""
    in_prompt: jax.Array
    """uint32 [S + 1, ceil(V / 32)]: ids of the prompt, kept only for a repetition penalty."""
    output_counts: jax.Array
    """int32 [S + 1, V]: how often each id was produced."""


@record
class DeviceState:
    """Donated to every step, which returns the next one."""

    cache: Cache
    last_tokens: jax.Array
    """int32 [S + 1]"""
    page_table: jax.Array
    """int32 [S + 1, W]; the last row is padding's and stays zero."""
    sampling: SamplingState


def bitmap(ids: np.ndarray | tuple[int, ...], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(V / 32)] with the bits of `ids` set, least significant first."""
    bits = np.zeros(-(-vocab_size // 32) * 32, bool)
    bits[np.asarray(ids, np.int64)] = True
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _all_allowed(vocab_size: int) -> np.ndarray:
    return bitmap(np.arange(vocab_size), vocab_size)


def zeros(model: ModelConfig, limits: RunnerLimits, cache_dtype: jnp.dtype) -> DeviceState:
    """An empty state, allocated where jit puts it; call under jit or eval_shape."""
    S, V = limits.max_num_seqs, model.vocab_size
    words = -(-V // 32)
    pages, size, K, H = limits.num_pages, limits.page_size, model.num_kv_heads, model.head_dim
    return DeviceState(
        cache=tuple(
            (jnp.zeros((pages, K, H, size), cache_dtype), jnp.zeros((pages, K, size, H), cache_dtype))
            for _ in range(model.num_layers)
        ),
        last_tokens=jnp.zeros(S + 1, jnp.int32),
        page_table=jnp.zeros((S + 1, -(-limits.max_model_len // size)), jnp.int32),
        sampling=SamplingState(
            floats=jnp.ones((S + 1, 6), jnp.float32),
            ints=jnp.zeros((S + 1, 6), jnp.int32),
            bias_ids=jnp.full((S + 1, MAX_LOGIT_BIAS), V, jnp.int32),
            bias_values=jnp.zeros((S + 1, MAX_LOGIT_BIAS), jnp.float32),
            allowed=jnp.broadcast_to(jnp.asarray(_all_allowed(V)), (S + 1, words)),
            stops=jnp.zeros((S + 1, words), jnp.uint32),
            in_prompt=jnp.zeros((S + 1, words), jnp.uint32),
            output_counts=jnp.zeros((S + 1, V), jnp.int32),
        ),
    )


@record
class SlotRow:
    """A slot's sampling state on its way to the device; shapes are SamplingState's without the first axis."""

    slot: ArrayLike
    floats: ArrayLike
    ints: ArrayLike
    bias_ids: ArrayLike
    bias_values: ArrayLike
    allowed: ArrayLike
    stops: ArrayLike
    in_prompt: ArrayLike
    output_counts: ArrayLike


class SlotRows:
    """Makes `SlotRow`s from requests; parts most requests share stay on the device and are sent once."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._no_bias_ids = jnp.full(MAX_LOGIT_BIAS, vocab_size, jnp.int32)
        self._no_bias_values = jnp.zeros(MAX_LOGIT_BIAS, jnp.float32)
        self._all_allowed = jnp.asarray(_all_allowed(vocab_size))
        self._no_ids = jnp.zeros_like(self._all_allowed)
        self._no_counts = jnp.zeros(vocab_size, jnp.int32)
        self._stops: dict[tuple[int, ...], jax.Array] = {}

    def row(self, params: SlotParams) -> SlotRow:
        """The row of one slot."""
        sampling = params.sampling
        bias = sampling.logit_bias
        bias_ids, bias_values = self._no_bias_ids, self._no_bias_values
        if bias:
            bias_ids = np.full(MAX_LOGIT_BIAS, self._vocab_size, np.int32)
            bias_values = np.zeros(MAX_LOGIT_BIAS, np.float32)
            bias_ids[: len(bias)] = list(bias)
            bias_values[: len(bias)] = np.clip(list(bias.values()), -100, 100)
        counts = self._no_counts
        if len(params.output_ids):
            counts = np.bincount(params.output_ids, minlength=self._vocab_size).astype(np.int32)
        repeats = sampling.repetition_penalty != 1.0
        return SlotRow(
            slot=np.int32(params.slot),
            floats=np.asarray(
                (
                    0.0 if sampling.greedy else max(sampling.temperature, 0.01),
                    sampling.top_p,
                    sampling.min_p,
                    sampling.repetition_penalty,
                    sampling.presence_penalty,
                    sampling.frequency_penalty,
                ),
                np.float32,
            ),
            ints=np.asarray(
                (
                    max(sampling.top_k, 0),
                    sampling.min_tokens,
                    np.uint32(params.seed % UINT32).view(np.int32),
                    np.uint32(params.seed // UINT32 % UINT32).view(np.int32),
                    len(params.prompt_ids),
                    repeats,
                ),
                np.int32,
            ),
            bias_ids=bias_ids,
            bias_values=bias_values,
            allowed=self._allowed(params),
            stops=self._stop_ids(params.stop_ids) if sampling.min_tokens else self._no_ids,
            in_prompt=bitmap(params.prompt_ids, self._vocab_size) if repeats else self._no_ids,
            output_counts=counts,
        )

    def _allowed(self, params: SlotParams) -> jax.Array | np.ndarray:
        sampling = params.sampling
        if sampling.allowed_token_ids is None and not sampling.banned_token_ids:
            return self._all_allowed
        allowed = (
            _all_allowed(self._vocab_size)
            if sampling.allowed_token_ids is None
            else bitmap(sampling.allowed_token_ids, self._vocab_size)
        )
        return allowed & ~bitmap(sampling.banned_token_ids, self._vocab_size)

    def _stop_ids(self, ids: tuple[int, ...]) -> jax.Array:
        if ids not in self._stops:
            if len(self._stops) >= 64:
                self._stops.clear()
            self._stops[ids] = jnp.asarray(bitmap(ids, self._vocab_size))
        return self._stops[ids]


def row_of(state: SamplingState, slot: jax.Array) -> SlotRow:
    """A slot's row as it is on the device."""
    return SlotRow(
        slot=slot,
        floats=state.floats[slot],
        ints=state.ints[slot],
        bias_ids=state.bias_ids[slot],
        bias_values=state.bias_values[slot],
        allowed=state.allowed[slot],
        stops=state.stops[slot],
        in_prompt=state.in_prompt[slot],
        output_counts=state.output_counts[slot],
    )


def admit(state: DeviceState, row: SlotRow) -> DeviceState:
    """The state with one slot's sampling row replaced."""
    old = state.sampling
    slot = row.slot
    sampling = SamplingState(
        floats=old.floats.at[slot].set(row.floats),
        ints=old.ints.at[slot].set(row.ints),
        bias_ids=old.bias_ids.at[slot].set(row.bias_ids),
        bias_values=old.bias_values.at[slot].set(row.bias_values),
        allowed=old.allowed.at[slot].set(row.allowed),
        stops=old.stops.at[slot].set(row.stops),
        in_prompt=old.in_prompt.at[slot].set(row.in_prompt),
        output_counts=old.output_counts.at[slot].set(row.output_counts),
    )
    return replace(state, sampling=sampling)


def update_pages(state: DeviceState, updates: jax.Array) -> DeviceState:
    """The state with page-table entries (slot, index, page) [U, 3] set; entries of the padding slot change nothing."""
    padding = state.page_table.shape[0] - 1
    pages = jnp.where(updates[:, 0] == padding, 0, updates[:, 2])
    return replace(state, page_table=state.page_table.at[updates[:, 0], updates[:, 1]].set(pages))
