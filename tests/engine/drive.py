"""Runs an EngineCore step by step on a FakeRunner, and compares what each request was told with the oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.engine.fake import FakeRunner, continuation, request, score
from tokenspeed.config import EngineConfig
from tokenspeed.engine.engine import EngineCore
from tokenspeed.engine.page_table import PageTable
from tokenspeed.types import EngineOutput, Request, RunnerLimits, StepStats, TokenDelta, TokenLogprobs


@dataclass
class Driver:
    """An engine whose steps the test makes."""

    limits: RunnerLimits
    overlap: bool = True
    prefix_caching: bool = True
    eagerness: float = 0.3
    seed: int = 0
    deltas: dict[str, list[TokenDelta]] = field(default_factory=dict[str, list[TokenDelta]])
    stats: list[StepStats] = field(default_factory=list[StepStats])

    def __post_init__(self) -> None:
        config = EngineConfig(overlap=self.overlap, enable_prefix_caching=self.prefix_caching)
        self.runner = FakeRunner(self.limits, self.eagerness, self.seed)
        self.core = EngineCore(self.runner, config, self._take)
        self.roster = self.core._roster

    def _take(self, output: EngineOutput) -> None:
        self.stats.append(output.stats)
        for delta in output.deltas:
            self.deltas[delta.request_id].append(delta)

    def add(self, request: Request) -> None:
        self.deltas[request.request_id] = []
        self.core.add(request, np.array(request.prompt_ids, np.int32))

    def finish(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            self.core.step()
            if self.core.idle:
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def run(self, requests: list[Request], *, spread: int = 0) -> None:
        """Runs requests to their end, arriving at random over `spread` steps."""
        order = random.Random(self.seed)
        for one in requests:
            for _ in range(order.randint(0, 2 * spread // max(1, len(requests)))):
                self.core.step()
            self.add(one)
        self.finish()

    def tokens(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.token_ids]

    def check(self, requests: list[Request]) -> None:
        """Each request was told exactly what the oracle says, once, and nothing is left over."""
        for one in requests:
            check_answer(one, self.deltas[one.request_id], self.limits.max_model_len)
        self.check_empty()

    def check_empty(self) -> None:
        """No slot, page or sequence is held."""
        table = self.roster.table
        check_pages(table, self.limits)
        assert self.roster.num_live == self.roster.num_running == 0
        assert table.num_free_slots == self.limits.max_num_seqs
        assert table.num_available == self.limits.num_pages - 1
        assert table.num_used == 0
        assert len(table.cache) == table.cache.num_idle
        assert not self.roster.prefilling
        assert all(sequence is None for sequence in self.roster.slots.sequences)


def check_pages(table: PageTable, limits: RunnerLimits) -> None:
    """Every page has exactly one owner: a slot, the cache or the pool; and users are counted right."""
    owned: list[int] = []
    users = np.zeros(limits.num_pages, np.int64)
    for slot in range(limits.max_num_seqs):
        row, shared = table.pages[slot, : table.num_pages[slot]], table.num_shared[slot]
        users[row[:shared]] += 1
        owned += row[shared:].tolist()
    cached = [page for page, key in enumerate(table.cache._keys) if key is not None]
    free = table.pool._stack[: table.pool.num_free].tolist()
    everything = owned + cached + free
    assert sorted(everything) == list(range(1, limits.num_pages)), "a page is lost or has two owners"
    assert (table.cache._users[cached] == users[cached]).all()
    assert users.sum() == users[cached].sum()
    assert table.cache.num_idle == sum(users[page] == 0 for page in cached)


def check_answer(request: Request, deltas: list[TokenDelta], max_model_len: int) -> None:
    outputs, reason = continuation(request, max_model_len)
    assert [token for delta in deltas for token in delta.token_ids] == outputs, request
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
    last = outputs[-1] if outputs else None
    is_user_stop = reason == "stop" and last in request.sampling.stop_token_ids and last not in eos_of(request)
    assert deltas[-1].stop_token_id == (last if is_user_stop else None)
    check_logprobs(request, deltas, outputs)
    check_prompt_logprobs(request, deltas)


def eos_of(request: Request) -> tuple[int, ...]:
    return () if request.sampling.ignore_eos else request.eos_ids


def check_logprobs(request: Request, deltas: list[TokenDelta], outputs: list[int]) -> None:
    asked, context = request.sampling.logprobs, list(request.prompt_ids)
    for delta in deltas:
        if asked is None:
            assert delta.logprobs is None
            continue
        for token, told in zip(delta.token_ids, delta.logprobs or (), strict=True):
            assert told == expected_logprobs(context, token, asked)
            context.append(token)


def check_prompt_logprobs(request: Request, deltas: list[TokenDelta]) -> None:
    asked, prompt = request.sampling.prompt_logprobs, list(request.prompt_ids)
    assert all(delta.prompt_logprobs is None for delta in deltas[1:])
    if asked is None:
        assert deltas[0].prompt_logprobs is None
        return
    wanted = (None, *(expected_logprobs(prompt[:k], prompt[k], asked) for k in range(1, len(prompt))))
    assert deltas[0].prompt_logprobs == wanted


def expected_logprobs(context: list[int], token: int, asked: int) -> TokenLogprobs:
    logprob, rank, top_ids, top = score(np.array(context), token)
    return TokenLogprobs(float(np.float32(logprob)), rank, tuple(top_ids[:asked]), tuple(top[:asked]))


def random_request(name: str, rng: random.Random, prefixes: Sequence[list[int]], max_model_len: int) -> Request:
    """A request with settings of every kind, its prompt often a continuation of another's."""
    prefix = rng.choice(prefixes) if rng.random() < 0.7 else []
    prompt = (prefix + [rng.randrange(60) for _ in range(rng.randint(1, 30))])[: max_model_len - 2]
    max_tokens = rng.choice([1, 2, 5, 20, 40, None])
    sampling: dict[str, object] = {"seed": rng.randint(-(2**63), 2**63 - 1), "max_tokens": max_tokens}
    if rng.random() < 0.3:
        sampling["ignore_eos"] = True
    if rng.random() < 0.4:
        sampling["stop_token_ids"] = tuple(rng.sample(range(60), rng.randint(1, 6)))
    if rng.random() < 0.3 and max_tokens != 1:
        sampling["min_tokens"] = rng.randint(1, min(8, max_tokens or 8))
    if rng.random() < 0.3:
        sampling["logprobs"] = rng.choice([0, 3, 20])
    if rng.random() < 0.25:
        sampling["prompt_logprobs"] = rng.choice([0, 2])
        if rng.random() < 0.5:
            sampling["max_tokens"] = 0
            sampling.pop("min_tokens", None)
    salt = rng.choice([None, None, "a", "b"])
    return request(name, prompt, priority=rng.choice([0, 0, 0, 1, -1]), salt=salt, **sampling)


def random_prefixes(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(60) for _ in range(rng.randint(4, 40))] for _ in range(3)]


def mixed_requests(count: int, seed: int, max_model_len: int) -> list[Request]:
    rng = random.Random(seed)
    prefixes = random_prefixes(rng)
    return [random_request(f"r{k}", rng, prefixes, max_model_len) for k in range(count)]
