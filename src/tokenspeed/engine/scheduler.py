"""The policy: which sequence computes what in the next step."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from tokenspeed.engine.lifecycle import Prefilling
from tokenspeed.engine.roster import Roster, Step
from tokenspeed.engine.sequence import Sequence
from tokenspeed.types import NO_TOKEN, PromptScore, Schedule

_RETRY_STEPS = 16
"""Steps after which a sequence that found no room looks for its prefix in the cache again."""


class _Chunk(NamedTuple):
    """Known ids of one sequence, [start, stop), that a step computes."""

    sequence: Sequence
    slot: int
    start: int
    stop: int
    ends: bool
    """Whether they are its last known ids."""


class Scheduler:
    """Fills steps under a token budget: a token for each decoding sequence first, prefill chunks with what remains.

    Prefill goes by rank: the lower priority number, then the earlier arrival. When pages run out, the running
    sequence of the last rank is put back, so the first always gets on; alone, any sequence fits.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._num_schedules = 0
        self._page_size = roster.limits.page_size
        most = roster.limits.max_num_seqs
        self._row_starts = _constant(np.arange(most + 1, dtype=np.int32))
        self._no_tokens = _constant(np.full(most, NO_TOKEN, np.int32))
        self._all_sample = _constant(np.ones(most, np.bool_))
        self._refused: tuple[Sequence, int, int] | None = None

    def schedule(self) -> Schedule | None:
        """The next step, or None if nothing can be computed until a step in flight is committed.

        Each sequence in flight counts as if its step yields a token; a sequence that this token ends by length is
        left out.
        """
        put_back = self._roster.counters.num_preemptions
        decodes = self._decodes()
        chunks = self._chunks(self._roster.limits.max_num_batched_tokens - len(decodes), put_back)
        decodes = decodes[self._roster.slots.decoding[decodes]]  # without those a chunk has put back
        if len(decodes) == 0 and not chunks:
            return None
        return self._pack(decodes, chunks)

    def _decodes(self) -> np.ndarray:
        """Slots that decode, each with a page for its token."""
        slots, table = self._roster.slots, self._roster.table
        while True:
            ready = (slots.decoding & (slots.num_sampled < slots.max_outputs)).nonzero()[0].astype(np.int32)
            growing = ready[slots.kv_lens[ready] == table.num_pages[ready] * self._page_size]
            if table.reserve(len(growing)):
                table.grow_each(growing)
                return ready
            self._roster.put_back(self._roster.lowest())

    def _chunks(self, budget: int, put_back: int) -> list[_Chunk]:
        """Prefill chunks by rank, of admitted and of newly admitted sequences.

        Args:
          put_back: sequences put back before this schedule. Once there are more, nobody is admitted in it: whoever
            lost pages here would only lose them again, and its token may still be in flight.
        """
        roster = self._roster
        prefilling = deque(roster.prefilling)
        admitting = True
        chunks: list[_Chunk] = []
        while budget > 0:
            admitting = admitting and roster.counters.num_preemptions == put_back
            head = roster.head() if admitting else None
            if head is not None and (not prefilling or head.rank < prefilling[0].rank):
                admitting = self._admit(head)
                sequence = head
            elif prefilling:
                sequence = prefilling.popleft()
            else:
                break
            if (chunk := self._chunk(sequence, budget)) is not None:
                chunks.append(chunk)
                budget -= chunk.stop - chunk.start
        return chunks

    def _admit(self, head: Sequence) -> bool:
        """Admits the first waiting sequence if its known ids fit beside one more page for each that decodes.

        With less room it would soon be put back.
        """
        roster, table = self._roster, self._roster.table
        if table.num_free_slots == 0:
            return False
        alone = roster.num_running == 0
        spare = table.num_available - int(np.count_nonzero(roster.slots.decoding))
        if not alone and self._refused_before(head, spare):
            return False
        shared = table.match(head.ids, head.request.cache_salt, head.num_reusable // self._page_size)
        needed = self._num_pages(len(head.ids)) - len(shared) + table.cache.count_idle(shared)
        if not alone and needed > spare:
            self._refused = (head, spare, self._num_schedules)
            return False
        self._refused = None
        roster.admit_head(shared)
        return True

    def _refused_before(self, head: Sequence, spare: int) -> bool:
        """Spares a long prompt that does not fit its look-up in every step."""
        if self._refused is None:
            return False
        sequence, least, when = self._refused
        return sequence is head and spare <= least and self._num_schedules < when + _RETRY_STEPS

    def _chunk(self, sequence: Sequence, budget: int) -> _Chunk | None:
        """The next ids of a prefilling sequence, as many as budget and pages allow."""
        roster, table, state = self._roster, self._roster.table, sequence.state
        if not isinstance(state, Prefilling):
            return None  # refused, or put back for a chunk before this one
        slot = state.lease.slot
        start, known = int(roster.slots.kv_lens[slot]), int(roster.slots.num_ids[slot])
        stop, held = min(known, start + budget), int(table.num_pages[slot])
        while not table.reserve(self._num_pages(stop) - held):
            victim = roster.lowest()
            if victim is sequence:
                stop = min(stop, (held + table.num_available) * self._page_size)
                table.reserve(self._num_pages(stop) - held)
                break
            roster.put_back(victim)
        if stop <= start:
            return None
        table.grow(state.lease, self._num_pages(stop))
        return _Chunk(sequence, slot, start, stop, stop == known)

    def _num_pages(self, num_ids: int) -> int:
        return -(-num_ids // self._page_size)

    def _pack(self, decodes: np.ndarray, chunks: list[_Chunk]) -> Schedule:
        """The arrays of a step, decode rows first; then counts it as dispatched."""
        roster, slots, num_decodes = self._roster, self._roster.slots, len(decodes)
        starts = slots.kv_lens[decodes]
        if chunks:
            rows = np.array([chunk.slot for chunk in chunks], np.int32)
            lens = [chunk.stop - chunk.start for chunk in chunks]
            ends = np.array([True] * num_decodes + [chunk.ends for chunk in chunks])
            all_slots = np.concatenate([decodes, rows])
            samples = ends & (slots.num_sampled[all_slots] < slots.max_outputs[all_slots])
            token_ids = np.concatenate(
                [self._no_tokens[:num_decodes]] + [slots.ids[c.slot, c.start : c.stop] for c in chunks]
            )
            positions = np.concatenate([starts] + [np.arange(c.start, c.stop, dtype=np.int32) for c in chunks])
            cu_q_lens = np.cumsum([0] + [1] * num_decodes + lens, dtype=np.int32)
            kv_lens = np.concatenate([starts + 1, np.array([chunk.stop for chunk in chunks], np.int32)])
        else:
            all_slots, positions, kv_lens = decodes, starts, starts + 1
            samples = ends = self._all_sample[:num_decodes]
            token_ids, cu_q_lens = self._no_tokens[:num_decodes], self._row_starts[: num_decodes + 1]
        schedule = Schedule(
            step_id=self._num_schedules,
            token_ids=token_ids,
            positions=positions,
            cu_q_lens=cu_q_lens,
            kv_lens=kv_lens,
            slots=all_slots,
            samples=samples,
            output_positions=slots.num_sampled[all_slots],
            page_updates=roster.table.take_updates(),
            new_slots=tuple(roster.new_slots),
            prompt_scores=self._prompt_scores(chunks, cu_q_lens, num_decodes),
            wants_logprobs=bool((slots.wants_logprobs[all_slots] & samples).any()),
        )
        roster.new_slots.clear()
        self._num_schedules += 1
        slots.kv_lens[all_slots] = kv_lens
        slots.num_sampled[all_slots] += samples
        for chunk in chunks:
            if chunk.ends:
                roster.complete(chunk.sequence)
        roster.in_flight.append(Step(schedule, roster.table.epochs[all_slots], ends))
        return schedule

    def _prompt_scores(self, chunks: list[_Chunk], cu_q_lens: np.ndarray, first_row: int) -> tuple[PromptScore, ...]:
        """What of each chunk must be scored; a chunk of a resumed sequence may have been scored before."""
        scores: list[PromptScore] = []
        for row, (sequence, _, start, stop, _) in enumerate(chunks, first_row):
            if sequence.request.sampling.prompt_logprobs is None:
                continue
            first, last = max(start, sequence.num_scored), min(stop, len(sequence.prompt_ids) - 1)
            if first < last:
                targets = sequence.prompt_ids[first + 1 : last + 1]
                scores.append(PromptScore(row, int(cu_q_lens[row]) + first - start, targets))
                sequence.num_scored = last
        return tuple(scores)


def _constant(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
