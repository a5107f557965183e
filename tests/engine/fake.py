"""A device in numpy whose language model notices every mistake of a scheduler.

Its cache holds token ids instead of keys and values; the next token is a hash of what a row reads through its page table.
A wrong table, position, slot or output count, a page freed too early or written twice changes the tokens or trips a check.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tokenspeed.types import (
    NO_TOKEN,
    FinishReason,
    Request,
    RunnerLimits,
    SamplingParams,
    Schedule,
    ScoreArrays,
    SlotParams,
    StepResult,
)

VOCAB = 61
EOS = 1
GARBAGE = -77


def digest(context: np.ndarray, *numbers: int) -> int:
    text = np.ascontiguousarray(context, np.int64).tobytes() + b"|" + repr(numbers).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def next_token(context: np.ndarray, seed: int, output_position: int, masked: tuple[int, ...]) -> int:
    """The model and its sampler: a token of the context, the seed and the output position, none of `masked`."""
    value = digest(context, seed, output_position)
    while value % VOCAB in masked:
        value += 1
    return value % VOCAB


def score(context: np.ndarray, token_id: int) -> tuple[float, int, list[int], list[float]]:
    """Log-probability, rank and the 20 alternatives of a token after a context."""
    value = digest(context, token_id)
    top = [(value + 7 * k) % VOCAB for k in range(20)]
    return -float(value % 997) / 64, 1 + value % VOCAB, top, [-float(k) / 4 for k in range(20)]


def scores(pairs: list[tuple[np.ndarray, int]]) -> ScoreArrays:
    rows = [score(context, token_id) for context, token_id in pairs]
    return ScoreArrays(
        np.array([row[0] for row in rows], np.float32),
        np.array([row[1] for row in rows], np.int32),
        np.array([row[2] for row in rows], np.int32).reshape(len(rows), 20),
        np.array([row[3] for row in rows], np.float32).reshape(len(rows), 20),
    )


def stop_ids_of(request: Request) -> tuple[int, ...]:
    sampling = request.sampling
    return (() if sampling.ignore_eos else request.eos_ids) + sampling.stop_token_ids


def continuation(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the model says to a request when nobody schedules anything: the oracle. Needs a seed."""
    sampling, context, outputs = request.sampling, list(request.prompt_ids), list[int]()
    stop_ids = stop_ids_of(request)
    assert sampling.seed is not None
    while True:
        if len(outputs) == sampling.max_tokens or len(context) == max_model_len:
            return outputs, "length"
        masked = stop_ids if len(outputs) < sampling.min_tokens else ()
        token = next_token(np.array(context), sampling.seed % 2**64, len(outputs), masked)
        outputs.append(token)
        context.append(token)
        if token in stop_ids:
            return outputs, "stop"


@dataclass
class FakeStep:
    runner: FakeRunner
    schedule: Schedule
    done: StepResult | None = None

    def result(self) -> StepResult:
        while self.done is None:
            self.runner.execute_next()
        return self.done


@dataclass
class FakeRunner:
    """Executes steps in the order of dispatch, some at once and some as late as their result is read."""

    limits: RunnerLimits
    eagerness: float = 0.3
    """Chance that the device catches up before a dispatch returns."""
    seed: int = 0
    num_compiles: int = 0
    facts: dict[str, str] = field(default_factory=lambda: {"device": "fake"})
    fail_at: int | None = None
    schedules: list[Schedule] = field(default_factory=list[Schedule])

    def __post_init__(self) -> None:
        limits = self.limits
        self.cache = np.full((limits.num_pages, limits.page_size), GARBAGE, np.int64)
        self.table = np.zeros((limits.max_num_seqs, -(-limits.max_model_len // limits.page_size)), np.int64)
        self.last_tokens = np.full(limits.max_num_seqs, GARBAGE, np.int64)
        self.outputs = np.zeros(limits.max_num_seqs, np.int64)
        self.params: dict[int, SlotParams] = {}
        self._queue: deque[FakeStep] = deque()
        self._random = random.Random(self.seed)

    def padded_tokens(self, schedule: Schedule) -> int:
        return -(-schedule.num_tokens // 16) * 16

    def dispatch(self, schedule: Schedule) -> FakeStep:
        if self.fail_at is not None and schedule.step_id >= self.fail_at:
            raise RuntimeError("the fake device is on fire")
        self.schedules.append(schedule)
        step = FakeStep(self, schedule)
        self._queue.append(step)
        if self._random.random() < self.eagerness:
            while self._queue:
                self.execute_next()
        return step

    def execute_next(self) -> None:
        step = self._queue.popleft()
        step.done = self._execute(step.schedule)

    def _execute(self, schedule: Schedule) -> StepResult:
        self._check(schedule)
        for params in schedule.new_slots:
            self.params[params.slot] = params
            self.outputs[params.slot] = len(params.output_ids)
            self.last_tokens[params.slot] = GARBAGE
        self._update_table(schedule)
        rows = [self._write(schedule, row) for row in range(schedule.num_rows)]
        contexts = [self._read(schedule, row) for row in range(schedule.num_rows)]
        tokens = np.array([self._sample(schedule, row, contexts[row]) for row in range(schedule.num_rows)], np.int32)
        prompt_scores = tuple(
            scores(
                [
                    (contexts[one.row][: int(schedule.positions[one.start + k]) + 1], int(target))
                    for k, target in enumerate(one.target_ids)
                ]
            )
            for one in schedule.prompt_scores
        )
        written = [place for row in rows for place in row]
        assert len(set(written)) == len(written), "two writers of one place in a step"
        chosen = scores(list(zip(contexts, tokens.tolist(), strict=True))) if schedule.wants_logprobs else None
        return StepResult(schedule.step_id, tokens, chosen, prompt_scores)

    def _check(self, schedule: Schedule) -> None:
        limits, lens = self.limits, np.diff(schedule.cu_q_lens)
        assert 0 < schedule.num_tokens <= limits.max_num_batched_tokens
        assert schedule.num_rows <= limits.max_num_seqs
        assert len(set(schedule.slots.tolist())) == schedule.num_rows
        assert schedule.cu_q_lens[0] == 0
        assert schedule.cu_q_lens[-1] == schedule.num_tokens == len(schedule.positions)
        assert (lens > 0).all()
        assert (schedule.kv_lens <= limits.max_model_len).all()
        decodes = schedule.token_ids[schedule.cu_q_lens[:-1]] == NO_TOKEN
        assert (np.diff(decodes.astype(int)) <= 0).all(), "decode rows come first"
        assert (lens[decodes] == 1).all()
        assert (schedule.token_ids == NO_TOKEN).sum() == decodes.sum()
        assert schedule.samples[decodes].all()
        for array, dtype in zip(schedule[1:6], [np.int32] * 5, strict=True):
            assert array.dtype == dtype
        assert schedule.samples.dtype == np.bool_
        assert schedule.output_positions.dtype == schedule.page_updates.dtype == np.int32

    def _update_table(self, schedule: Schedule) -> None:
        seen: dict[tuple[int, int], int] = {}
        for slot, index, page in schedule.page_updates.tolist():
            assert 0 < page < self.limits.num_pages
            assert seen.setdefault((slot, index), page) == page, "one entry, two pages in a step"
            self.table[slot, index] = page

    def _write(self, schedule: Schedule, row: int) -> list[tuple[int, int]]:
        slot, size = int(schedule.slots[row]), self.limits.page_size
        start, stop = schedule.cu_q_lens[row : row + 2]
        positions, ids = schedule.positions[start:stop], schedule.token_ids[start:stop].astype(np.int64)
        kv_len = int(schedule.kv_lens[row])
        assert positions.tolist() == list(range(kv_len - len(positions), kv_len))
        if ids[0] == NO_TOKEN:
            ids = self.last_tokens[slot : slot + 1]
            assert ids[0] >= 0, "a decode before any token"
        pages, offsets = self.table[slot, positions // size], positions % size
        assert (pages > 0).all()
        self.cache[pages, offsets] = ids
        return list(zip(pages.tolist(), offsets.tolist(), strict=True))

    def _read(self, schedule: Schedule, row: int) -> np.ndarray:
        kv_len, size = int(schedule.kv_lens[row]), self.limits.page_size
        pages = self.table[schedule.slots[row], : -(-kv_len // size)]
        return self.cache[pages].ravel()[:kv_len]

    def _sample(self, schedule: Schedule, row: int, context: np.ndarray) -> int:
        slot = int(schedule.slots[row])
        params = self.params[slot]
        assert schedule.output_positions[row] == self.outputs[slot]
        if not schedule.samples[row]:
            return NO_TOKEN
        position = int(self.outputs[slot])
        masked = params.stop_ids if position < params.sampling.min_tokens else ()
        token = next_token(context, params.seed, position, masked)
        self.outputs[slot] += 1
        self.last_tokens[slot] = token
        return token


def limits(
    *,
    num_pages: int = 200,
    page_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 96,
) -> RunnerLimits:
    return RunnerLimits(num_pages, page_size, max_num_seqs, max_num_batched_tokens, max_model_len, VOCAB)


def request(name: str, prompt: list[int], *, priority: int = 0, salt: str | None = None, **sampling: object) -> Request:
    params = SamplingParams(**{"seed": 5, "max_tokens": 12, **sampling})  # pyright: ignore[reportArgumentType]
    return Request(
        request_id=name,
        prompt_ids=tuple(prompt),
        sampling=params,
        eos_ids=(EOS,),
        arrival_time=0.0,
        priority=priority,
        cache_salt=salt,
    )
