"""The compiled step under the real engine, on a tiny random model in float32: what a batch, a pool or a loop may not change."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.oracle.cases import write_checkpoint
from tokenspeed.config import EngineConfig
from tokenspeed.engine.client import ThreadEngine
from tokenspeed.runtime.build import build_runner
from tokenspeed.runtime.model_runner import Buckets, ladder
from tokenspeed.types import ConfigError, Request, RunnerLimits, SamplingParams, TokenDelta, TokenLogprobs
from tokenspeed.weights.checkpoint import open_checkpoint

VOCAB = 128
MARGIN = 1e-4
"""Greedy choices closer than this may differ."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_checkpoint("llama3", path)
    return path


@dataclass
class Answer:
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: str | None
    num_preemptions: int
    arrivals: list[float]


class Engine:
    """An engine on the tiny model; `run` answers requests that are all there at once."""

    def __init__(self, folder: Path, **config: object) -> None:
        options = {"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 64, "page_size": 16} | config
        self.config = EngineConfig(model=str(folder), dtype="float32", progress=False, **options)
        self.runner = build_runner(self.config, open_checkpoint(folder, self.config))
        self.client = ThreadEngine(self.runner, self.config)

    def start(self, request: Request) -> queue.SimpleQueue[tuple[float, TokenDelta]]:
        inbox: queue.SimpleQueue[tuple[float, TokenDelta]] = queue.SimpleQueue()
        self.client.add(request, lambda delta: inbox.put((time.perf_counter(), delta)))
        return inbox

    @staticmethod
    def collect(inbox: queue.SimpleQueue[tuple[float, TokenDelta]]) -> Answer:
        answer = Answer((), (), None, None, 0, [])
        while answer.finish_reason is None:
            arrived, delta = inbox.get(timeout=120)
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or ()
            answer.prompt_logprobs = answer.prompt_logprobs or delta.prompt_logprobs
            answer.finish_reason, answer.num_preemptions = delta.finish_reason, delta.num_preemptions
            answer.arrivals += [arrived] * len(delta.token_ids)
        return answer

    def run(self, requests: list[Request]) -> list[Answer]:
        return [self.collect(inbox) for inbox in [self.start(request) for request in requests]]

    def close(self) -> None:
        self.client.close()
        self.runner.close()


def request(name: str, prompt: list[int], sampling: SamplingParams) -> Request:
    return Request(request_id=name, prompt_ids=tuple(prompt), sampling=sampling, eos_ids=(2,), arrival_time=time.time())


def mixed_requests(count: int, prefix: str) -> list[Request]:
    """Mixed lengths and sampling settings, a few prompts in common, always the same."""
    rng = np.random.default_rng(5)
    common = rng.integers(3, VOCAB, 40).tolist()
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 5},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.8, "seed": 2, "top_k": 12, "top_p": 0.9},
        {"temperature": 1.5, "seed": 3, "min_p": 0.05, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 4, "logit_bias": {7: 3.0, 9: -100.0}, "banned_token_ids": (11, 12)},
        {"temperature": 0.0, "allowed_token_ids": tuple(range(20, 90)), "ignore_eos": True},
        {"temperature": 0.0, "stop_token_ids": (33, 34)},
    )
    requests: list[Request] = []
    for i in range(count):
        own = rng.integers(3, VOCAB, int(rng.integers(1, 90))).tolist()
        prompt = common + own if i % 3 == 0 else own
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 50)), logprobs=2, **kinds[i % len(kinds)])
        requests.append(request(f"{prefix}{i}", prompt, sampling))
    return requests


def assert_same(got: list[Answer], wanted: list[Answer], requests: list[Request]) -> None:
    for answer, other, asked in zip(got, wanted, requests, strict=True):
        if answer.token_ids == other.token_ids:
            assert answer.finish_reason == other.finish_reason
            continue
        assert asked.sampling.greedy, f"{asked.request_id}: seeded tokens differ"
        differ = next(
            i for i, pair in enumerate(zip(answer.token_ids, other.token_ids, strict=False)) if pair[0] != pair[1]
        )
        first, second = other.logprobs[differ].top_logprobs[:2]
        assert first - second < MARGIN, f"{asked.request_id}: token {differ} differs by a margin of {first - second}"


@pytest.fixture(scope="module")
def alone(folder: Path) -> tuple[list[Request], list[Answer]]:
    """Each request by itself, without overlap or prefix cache."""
    engine = Engine(folder, overlap=False, enable_prefix_caching=False)
    requests = mixed_requests(64, "alone")
    answers = [engine.run([one])[0] for one in requests]
    engine.close()
    return requests, answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [None, 19])
def test_batching_changes_nothing(
    folder: Path, alone: tuple[list[Request], list[Answer]], overlap: bool, num_pages: int | None
) -> None:
    requests, wanted = alone
    engine = Engine(folder, overlap=overlap, num_pages=num_pages)
    together = engine.run(mixed_requests(64, "together"))
    assert_same(together, wanted, requests)
    put_back = sum(answer.num_preemptions for answer in together)
    assert (put_back > 0) == (num_pages is not None), f"{put_back} put back with {num_pages} pages"
    assert len({answer.token_ids for answer in together}) > 48
    assert engine.client.stats().num_pages_used == 0
    engine.close()


def test_nothing_is_compiled_while_serving(folder: Path) -> None:
    """200 requests of every kind, prompt scores and resumption among them, after a start that compiled all."""
    engine = Engine(folder, num_pages=19)
    requests = mixed_requests(200, "mixed")
    scored = [
        request(f"scored{n}", list(range(3, 3 + n)), SamplingParams(temperature=0.0, prompt_logprobs=3, max_tokens=2))
        for n in (1, 2, 64, 65, 100)
    ]
    answers = engine.run([*requests, *scored])
    assert all(answer.finish_reason in ("stop", "length") for answer in answers)
    assert sum(answer.num_preemptions for answer in answers) > 0
    assert engine.runner.num_compiles == 0
    assert engine.client.stats().num_compiles == 0
    engine.close()


def test_compilations_are_counted(folder: Path) -> None:
    engine = Engine(folder, enforce_eager=True)
    engine.run([request("first", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3))])
    assert engine.runner.num_compiles > 0
    engine.close()


def test_prompt_scores_are_those_of_generation(folder: Path) -> None:
    """Feeding a greedy answer back as a prompt scores its tokens as they were scored when chosen."""
    engine = Engine(folder)
    prompt = list(range(10, 90))
    greedy = SamplingParams(temperature=0.0, max_tokens=30, logprobs=5, ignore_eos=True)
    [answer] = engine.run([request("greedy", prompt, greedy)])
    whole = [*prompt, *answer.token_ids]
    [scored] = engine.run([request("scored", whole, SamplingParams(max_tokens=0, prompt_logprobs=5, temperature=0.0))])
    assert scored.finish_reason == "length"
    assert scored.token_ids == ()
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == len(whole)
    assert scored.prompt_logprobs[0] is None
    for chosen, again in zip(answer.logprobs, scored.prompt_logprobs[len(prompt) :], strict=True):
        assert again is not None
        assert again.rank == chosen.rank == 1
        assert again.top_ids == chosen.top_ids
        np.testing.assert_allclose(again.top_logprobs, chosen.top_logprobs, atol=2e-5)
        assert again.logprob == pytest.approx(chosen.logprob, abs=2e-5)
    engine.close()


def test_a_pool_too_small_for_the_context_is_refused_before_serving(folder: Path) -> None:
    with pytest.raises(ConfigError, match="room for 112 tokens and --max-model-len is 256"):
        Engine(folder, num_pages=8)


def test_a_context_the_model_was_not_made_for_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len=4096 is more than the 640 positions"):
        Engine(folder, max_model_len=4096)


def test_prefixes_are_not_shared_where_keys_depend_on_the_length(tmp_path: Path) -> None:
    """Dynamic rope past its original context: a short prompt must not serve its pages to a longer one."""
    write_checkpoint("llama_dynamic", tmp_path)
    prompt = list(range(3, 43))
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    engine = Engine(tmp_path, enforce_eager=True, max_model_len=None)
    assert not engine.runner.limits.shares_prefixes
    engine.run([request("short", prompt[:18], greedy)])
    requests = [request("long", prompt, greedy)]
    after = engine.run(requests)
    engine.close()
    fresh = Engine(tmp_path, enforce_eager=True, max_model_len=None)
    assert_same(after, fresh.run(requests), requests)
    fresh.close()


@pytest.mark.parametrize(
    ("smallest", "largest", "factor", "sizes"),
    [(1, 16, 4, (1, 4, 16)), (1, 12, 2, (1, 2, 4, 8, 12)), (16, 256, 4, (16, 64, 256)), (5, 5, 2, (5,))],
)
def test_bucket_sizes(smallest: int, largest: int, factor: int, sizes: tuple[int, ...]) -> None:
    assert ladder(smallest, largest, factor) == sizes


def test_buckets_reach_every_limit() -> None:
    limits = RunnerLimits(
        num_pages=9, page_size=16, max_num_seqs=6, max_num_batched_tokens=10, max_model_len=64, vocab_size=9
    )
    assert Buckets.of(limits, 4) == Buckets(rows=(1, 4, 6), tokens=(10,))


@pytest.fixture
def cached(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    yield engine
    engine.close()


def test_a_returning_conversation_reuses_its_own_answer(cached: Engine) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = list(range(20, 70))
    [first] = cached.run([request("turn1", prompt, greedy)])
    follow = [*prompt, *first.token_ids, 5, 6, 7]
    inbox = cached.start(request("turn2", follow, greedy))
    cached_tokens = inbox.get(timeout=60)[1].num_cached_tokens
    # All of the first turn but its last token was in the cache; full pages of it are reused.
    assert cached_tokens == (len(prompt) + 39) // 16 * 16
    assert cached.collect(inbox).finish_reason == "length"
