"""Incremental encoding: equal to the full encode, quick where a text grew, bounded in memory."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest

from tests import assets
from tests.text import real_text
from tokenspeed.text.incremental import PART_CHARACTERS, IncrementalEncoder
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.types import InvalidRequest


@cache
def loaded(asset: Callable[[], Path]) -> Tokenizer:
    return load_tokenizer(asset())


class CountingTokenizer(Tokenizer):
    """Counts the characters that it encodes."""

    encoded = 0

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        self.encoded += sum(map(len, parts))
        return super().encode_parts(parts)


def counting() -> CountingTokenizer:
    real = loaded(assets.smollm2)
    return CountingTokenizer(real.backend, bos_id=real.bos_id, eos_ids=real.eos_ids, source="x")


def check_splits(tokenizer: Tokenizer, count: int, seed: int) -> None:
    """Random texts that come back longer, some with another end, against the full encode."""
    draw, encoder = random.Random(seed), IncrementalEncoder(tokenizer, capacity=1_000_000)
    texts = [real_text.sources(), *real_text.sessions()]
    for _ in range(count):
        text = draw.choice(texts)
        start = draw.randrange(len(text)) if draw.random() < 0.5 else 0
        whole = text[start : start + draw.randint(1, 4000)]
        split = draw.randint(0, len(whole))
        encoder.encode(whole[:split])
        changed = whole[:split] + draw.choice(["", " ", "\n", "x", "'s", "\u0301", "<|im_end|>"]) + whole[split:]
        for grown in (whole, changed):
            assert encoder.encode(grown) == tokenizer.encode(grown)


@pytest.mark.parametrize("asset", [assets.smollm2, assets.gemma3])
def test_ids_are_those_of_the_full_encode(asset: Callable[[], Path]) -> None:
    check_splits(loaded(asset), 150, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asset",
    [
        assets.smollm2,
        assets.gemma3,
        assets.qwen25_coder_05b,
        pytest.param(lambda: assets.tokenizer("llama3_1"), id="llama3_1"),
        pytest.param(lambda: assets.tokenizer("deepseek_v3"), id="deepseek_v3"),
    ],
)
def test_ids_of_ten_thousand_splits_are_those_of_the_full_encode(asset: Callable[[], Path]) -> None:
    check_splits(load_tokenizer(asset()), 10_000, seed=2)


def test_special_tokens_go_around_the_whole() -> None:
    tokenizer = loaded(assets.gemma3)
    text = real_text.sources()[:5000]
    encoder = IncrementalEncoder(tokenizer)
    for add in (True, False, True):
        assert encoder.encode(text, add) == tokenizer.encode(text, add)
    assert encoder.encode("") == tokenizer.encode("") == [tokenizer.bos_id]


def test_what_is_known_is_not_encoded_again() -> None:
    tokenizer, text = counting(), real_text.sessions()[0] + real_text.sources()[:30_000]
    encoder = IncrementalEncoder(tokenizer)
    tokenizer.encoded = 0
    encoder.encode(text[:25_000])
    assert tokenizer.encoded == 25_000
    encoder.encode(text)
    assert tokenizer.encoded - 25_000 < len(text) - 25_000 + 2 * PART_CHARACTERS
    before = tokenizer.encoded
    encoder.encode(text)
    assert tokenizer.encoded - before < 2 * PART_CHARACTERS


def test_memory_is_bounded_and_the_oldest_is_forgotten_first() -> None:
    tokenizer, text = counting(), real_text.sources()
    encoder = IncrementalEncoder(tokenizer, capacity=20_000)
    first, second, third = (text[k * 15_000 : k * 15_000 + 9_000] for k in range(3))

    def encoded(of: str) -> int:
        before = tokenizer.encoded
        assert encoder.encode(of) == loaded(assets.smollm2).encode(of)
        return tokenizer.encoded - before

    for part in (first, second, first, third):
        encoded(part)
    assert encoded(first) < 2 * PART_CHARACTERS
    assert encoded(second) > 5_000


def test_a_text_larger_than_the_memory_is_encoded() -> None:
    encoder = IncrementalEncoder(loaded(assets.smollm2), capacity=10)
    text = real_text.sources()[:9000]
    assert encoder.encode(text) == encoder.encode(text) == loaded(assets.smollm2).encode(text)


def test_the_callers_list_is_their_own() -> None:
    encoder, text = IncrementalEncoder(loaded(assets.smollm2)), real_text.sources()[:9000]
    encoder.encode(text).clear()
    assert encoder.encode(text) == loaded(assets.smollm2).encode(text)


def test_a_lone_surrogate_is_refused() -> None:
    encoder = IncrementalEncoder(loaded(assets.smollm2))
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        encoder.encode("a " * 1000 + "\ud83c" + " b" * 1000)
    assert encoder.encode("a " * 1000) == loaded(assets.smollm2).encode("a " * 1000)


def test_threads_share_an_encoder() -> None:
    encoder, text = IncrementalEncoder(loaded(assets.smollm2), capacity=30_000), real_text.sources()
    starts = [(k % 7) * 6_000 for k in range(60)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda start: encoder.encode(text[start : start + 12_000]), starts))
    assert found == [loaded(assets.smollm2).encode(text[start : start + 12_000]) for start in starts]


@pytest.mark.slow
@pytest.mark.parametrize("asset", [assets.smollm2, assets.gemma3, assets.qwen25_coder_05b])
def test_a_turn_on_a_long_conversation_takes_five_milliseconds(asset: Callable[[], Path]) -> None:
    """800 tokens after 50,000, in processor time: other work on the machine does not count."""
    tokenizer = loaded(asset)
    session = next(text for text in real_text.sessions() if len(text) > 250_000)
    ids = tokenizer.encode(session, add_special_tokens=False)
    text, grown = (tokenizer.decode(ids[:count], skip_special_tokens=False) for count in (50_000, 50_800))
    assert grown.startswith(text[:-4])
    taken: list[float] = []
    for _ in range(20):
        encoder = IncrementalEncoder(tokenizer)
        encoder.encode(text)
        start = time.process_time()
        encoder.encode(grown)
        taken.append(time.process_time() - start)
    assert statistics.median(taken) <= 0.005
