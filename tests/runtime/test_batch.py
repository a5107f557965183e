"""Packing a schedule and reading it back."""

from __future__ import annotations

import numpy as np
import pytest

from tokenspeed.runtime.batch import Bucket, pack, unpack
from tokenspeed.types import Schedule


def schedule() -> Schedule:
    return Schedule(
        step_id=3,
        token_ids=np.asarray([-1, 5, 6, 7], np.int32),
        positions=np.asarray([9, 0, 1, 2], np.int32),
        cu_q_lens=np.asarray([0, 1, 4], np.int32),
        kv_lens=np.asarray([10, 3], np.int32),
        slots=np.asarray([4, 2], np.int32),
        samples=np.asarray([True, False]),
        output_positions=np.asarray([6, 0], np.int32),
        page_updates=np.asarray([[2, 0, 11]], np.int32),
        new_slots=(),
        prompt_scores=(),
        wants_logprobs=True,
    )


def test_what_is_packed_is_read_back_and_the_rest_is_padding() -> None:
    bucket = Bucket(tokens=8, rows=4, updates=3)
    batch = unpack(pack(schedule(), bucket, padding_slot=16), bucket)
    assert batch.token_ids.tolist() == [-1, 5, 6, 7, 0, 0, 0, 0]
    assert batch.positions.tolist() == [9, 0, 1, 2, 0, 0, 0, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 4, 4, 4]
    assert batch.kv_lens.tolist() == [10, 3, 0, 0]
    assert batch.slots.tolist() == [4, 2, 16, 16]
    assert batch.samples.tolist() == [1, 0, 0, 0]
    assert batch.output_positions.tolist() == [6, 0, 0, 0]
    assert batch.page_updates.tolist() == [[2, 0, 11], [16, 0, 0], [16, 0, 0]]
    assert batch.num_seqs.tolist() == [2]
    assert batch.wants_logprobs == 1


def test_a_bucket_of_rows_takes_no_tokens_and_no_updates() -> None:
    bucket = Bucket(tokens=0, rows=2, updates=0)
    batch = unpack(pack(schedule(), bucket, padding_slot=16), bucket)
    assert batch.token_ids.shape == (0,)
    assert batch.page_updates.shape == (0, 3)
    assert batch.slots.tolist() == [4, 2]


def test_a_schedule_that_does_not_fit_is_our_fault() -> None:
    with pytest.raises(AssertionError):
        pack(schedule(), Bucket(tokens=2, rows=4, updates=3), padding_slot=16)
