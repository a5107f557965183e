"""A schedule as one packed int32 array, padded to a bucket: how it is laid out on the host and read on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tokenspeed.pytree import record
from tokenspeed.types import NO_TOKEN, Schedule


class Bucket(NamedTuple):
    """Shape of a compiled step: tokens, rows and page-table updates it can carry."""

    tokens: int
    rows: int
    updates: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the packed fields, in order: those of `Batch`, then the scalars."""
        T, B, U = self
        return T, T, B + 1, B, B, B, B, 3 * U, 2


@record
class Batch:
    """One step's rows and tokens on the device, padded. Names and meanings are those of `Schedule`."""

    token_ids: jax.Array
    positions: jax.Array
    cu_q_lens: jax.Array
    kv_lens: jax.Array
    slots: jax.Array
    samples: jax.Array
    """int32 [B]: 1 where the row's last token is followed by a sampled one."""
    output_positions: jax.Array
    page_updates: jax.Array
    """int32 [U, 3]"""
    num_seqs: jax.Array
    """int32 [1]"""
    wants_logprobs: jax.Array
    """int32 []"""


def pack(schedule: Schedule, bucket: Bucket, padding_slot: int) -> np.ndarray:
    """int32 [sum of bucket.sizes]. Padding rows have no tokens and the padding slot; padding tokens follow the last row.

    A bucket without tokens or updates takes the rows alone.
    """
    T, B, U = bucket
    num_rows, num_tokens = schedule.num_rows, schedule.num_tokens
    page_updates = schedule.page_updates if U else schedule.page_updates[:0]
    num_updates = len(page_updates)
    assert num_rows <= B, (num_rows, bucket)
    assert num_updates <= U, (num_updates, bucket)
    assert not T or num_tokens <= T, (num_tokens, bucket)
    packed = np.zeros(sum(bucket.sizes), np.int32)
    fields = np.split(packed, np.cumsum(bucket.sizes)[:-1])
    token_ids, positions, cu_q_lens, kv_lens, slots, samples, output_positions, updates, scalars = fields
    if T:
        token_ids[:num_tokens] = schedule.token_ids
        positions[:num_tokens] = schedule.positions
    cu_q_lens[: num_rows + 1] = schedule.cu_q_lens
    cu_q_lens[num_rows + 1 :] = num_tokens
    kv_lens[:num_rows] = schedule.kv_lens
    slots[:num_rows] = schedule.slots
    slots[num_rows:] = padding_slot
    samples[:num_rows] = schedule.samples
    output_positions[:num_rows] = schedule.output_positions
    updates[0::3] = padding_slot
    updates[: 3 * num_updates] = page_updates.reshape(-1)
    scalars[:] = num_rows, schedule.wants_logprobs
    return packed


def unpack(packed: jax.Array, bucket: Bucket) -> Batch:
    """The inverse of `pack`, on the device."""
    bounds = np.cumsum(bucket.sizes)[:-1].tolist()
    token_ids, positions, cu_q_lens, kv_lens, slots, samples, output_positions, updates, scalars = jnp.split(
        packed, bounds
    )
    return Batch(
        token_ids=token_ids,
        positions=positions,
        cu_q_lens=cu_q_lens,
        kv_lens=kv_lens,
        slots=slots,
        samples=samples,
        output_positions=output_positions,
        page_updates=updates.reshape(-1, 3),
        num_seqs=scalars[:1],
        wants_logprobs=scalars[1],
    )


def decode_rows(batch: Batch) -> Batch:
    """A decode batch's token fields follow from its rows: one token a row, the slot's last one."""
    return replace(
        batch,
        token_ids=jnp.full_like(batch.slots, NO_TOKEN),
        positions=jnp.maximum(batch.kv_lens - 1, 0),
        cu_q_lens=jnp.arange(len(batch.slots) + 1, dtype=jnp.int32),
    )
