"""Every live sequence, and the transitions between its states together with what each state owns."""

from __future__ import annotations

import random
import time
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from tokenspeed.engine.lifecycle import Decoding, Finished, Prefilling, PutBack, Queued, Running
from tokenspeed.engine.metrics import Counters
from tokenspeed.engine.page_table import PageTable
from tokenspeed.engine.sequence import Sequence, SlotArrays
from tokenspeed.types import FinishReason, Request, RunnerLimits, Schedule, SlotParams


@dataclass(frozen=True, slots=True)
class Step:
    """A schedule and what its commit must remember."""

    schedule: Schedule
    epochs: np.ndarray
    """int64 [B]: of each row's slot; the row is dropped if its lease has ended since."""
    ends: np.ndarray
    """bool [B]: whether the row reaches the end of its sequence's known ids."""
    late: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    """Rows whose sequence was put back since; their results still count."""


class Roster:
    """Owns the sequences, their slots and pages, and the steps in flight; decides nothing."""

    def __init__(self, limits: RunnerLimits, *, share_prefixes: bool, seed: int) -> None:
        assert (limits.num_pages - 1) * limits.page_size >= limits.max_model_len, (
            f"{limits.num_pages} pages of {limits.page_size} cannot hold one sequence of {limits.max_model_len}"
        )
        assert limits.max_num_batched_tokens >= limits.max_num_seqs, (
            "a step must hold a token of every running sequence"
        )
        self.limits = limits
        self.table = PageTable(limits, share_prefixes=share_prefixes)
        self.slots = SlotArrays(limits)
        self.counters = Counters()
        self.in_flight: deque[Step] = deque()
        self.prefilling: list[Sequence] = []
        """In order of rank."""
        self.new_slots: list[SlotParams] = []
        """Slots taken since the last schedule."""
        self._live: dict[str, Sequence] = {}
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._num_arrivals = 0
        self._seeds = random.Random(seed)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_running(self) -> int:
        return self.limits.max_num_seqs - self.table.num_free_slots

    @property
    def num_waiting(self) -> int:
        return self.num_live - self.num_running

    @property
    def live_ids(self) -> list[str]:
        """Request ids of all live sequences."""
        return list(self._live)

    def add(self, request: Request, prompt_ids: np.ndarray) -> None:
        """Queues a request."""
        assert request.sampling.n == 1, "a front end splits n > 1"
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        seed = request.sampling.seed
        bits = self._seeds.getrandbits(64) if seed is None else seed % 2**64
        sequence = Sequence(request, prompt_ids, self._num_arrivals, bits, self.limits.max_model_len)
        assert len(prompt_ids) > 0
        assert len(prompt_ids) + (request.sampling.max_tokens != 0) <= self.limits.max_model_len
        self._num_arrivals += 1
        self._live[request.request_id] = sequence
        self._wait(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The live sequence of a request."""
        return self._live.get(request_id)

    def head(self) -> Sequence | None:
        """The waiting sequence that goes first."""
        while self._waiting:
            sequence = self._waiting[0][2]
            if not sequence.is_finished:
                return sequence
            heappop(self._waiting)
        return None

    def lowest(self) -> Sequence:
        """The running sequence that goes last: the one to put back."""
        return max((sequence for sequence in self.slots.sequences if sequence is not None), key=lambda s: s.rank)

    def admit_head(self, shared: np.ndarray) -> Sequence:
        """Gives the waiting sequence that goes first a slot and the pages of its cached prefix."""
        _, _, sequence = heappop(self._waiting)
        state = sequence.state
        assert isinstance(state, Queued | PutBack)
        cached = len(shared) * self.limits.page_size
        if isinstance(state, Queued):
            sequence.scheduled_time = time.time()
            sequence.num_cached_tokens = cached
            self.counters.prefix_queries += len(sequence.prompt_ids)
            self.counters.prefix_hits += cached
        lease = self.table.open(shared)
        sequence.state = state.admit(lease)
        self.slots.take(lease.slot, sequence, cached)
        self.new_slots.append(sequence.slot_params(lease.slot))
        insort(self.prefilling, sequence, key=lambda s: s.rank)
        return sequence

    def complete(self, sequence: Sequence) -> None:
        """All known ids of a prefilling sequence are scheduled."""
        state = sequence.state
        assert isinstance(state, Prefilling)
        self.prefilling.remove(sequence)
        sequence.state = state.complete()
        self.slots.decoding[state.lease.slot] = True

    def put_back(self, sequence: Sequence) -> None:
        """Takes a running sequence's slot and pages; what it has in flight still counts."""
        state = sequence.state
        assert isinstance(state, Prefilling | Decoding)
        lease = state.lease
        for step in self.in_flight:
            rows = np.flatnonzero((step.schedule.slots == lease.slot) & (step.epochs == lease.epoch))
            step.late.update((row, sequence) for row in rows.tolist())
        sequence.ids = self.slots.known(lease.slot).copy()
        self._leave(sequence, state)
        sequence.state = state.put_back()
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._wait(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence in whatever state it is and releases what it holds."""
        state = sequence.state
        assert not isinstance(state, Finished)
        if isinstance(state, Prefilling | Decoding):
            self._leave(sequence, state)
        sequence.state = state.finish(reason)
        del self._live[sequence.request.request_id]

    def _wait(self, sequence: Sequence) -> None:
        heappush(self._waiting, (*sequence.rank, sequence))

    def _leave(self, sequence: Sequence, state: Running) -> None:
        if isinstance(state, Prefilling):
            self.prefilling.remove(sequence)
        self.slots.leave(state.lease.slot)
        self.table.close(state.lease)
