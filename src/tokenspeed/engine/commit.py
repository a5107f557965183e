"""What a finished step means: its tokens to their sequences, filled pages to the prefix cache, ended sequences out."""

from __future__ import annotations

import numpy as np

from tokenspeed.engine.lifecycle import Decoding, Prefilling, PutBack
from tokenspeed.engine.roster import Roster, Step
from tokenspeed.engine.sequence import Sequence, token_logprobs
from tokenspeed.types import FinishReason, ScoreArrays, StepResult, TokenDelta, TokenLogprobs


def commit(roster: Roster, result: StepResult) -> list[TokenDelta]:
    """Applies the result of the oldest step in flight; returns what it added to each sequence.

    A row whose sequence ended after the dispatch is dropped; a row whose sequence was put back counts.
    """
    step = roster.in_flight.popleft()
    assert step.schedule.step_id == result.step_id, f"step {step.schedule.step_id} is next, not {result.step_id}"
    roster.counters.num_steps += 1
    live = roster.table.is_open(step.schedule.slots, step.epochs)
    _keep_prompt_scores(roster, step, live, result)
    rows = (live & step.schedule.samples).nonzero()[0]
    slots, token_ids = step.schedule.slots[rows], result.token_ids[rows]
    assert (token_ids >= 0).all(), "a sampling row gave no token"
    stops, full = roster.slots.append(slots, token_ids)
    _publish_pages(roster, step, live)
    deltas = _sampled(roster, rows, slots, token_ids, _reasons(stops, full), result.scores)
    for row in (live & step.ends & ~step.schedule.samples).nonzero()[0].tolist():
        deltas.append(_end_scoring(roster, _in_slot(roster, step.schedule.slots[row])))
    for row, sequence in step.late.items():
        if isinstance(sequence.state, PutBack):  # it may have been aborted since
            deltas += _late(roster, sequence, step, row, result)
    return deltas


def _keep_prompt_scores(roster: Roster, step: Step, live: np.ndarray, result: StepResult) -> None:
    for asked, scores in zip(step.schedule.prompt_scores, result.prompt_scores, strict=True):
        late = step.late.get(asked.row)
        if live[asked.row]:
            _in_slot(roster, step.schedule.slots[asked.row]).add_prompt_scores(scores)
        elif late is not None:
            late.add_prompt_scores(scores)


def _publish_pages(roster: Roster, step: Step, live: np.ndarray) -> None:
    """Shares the pages this step has filled; what later steps still write lies beyond them."""
    table, schedule = roster.table, step.schedule
    filled = live & (schedule.kv_lens // table.page_size > table.num_shared[schedule.slots])
    for row in filled.nonzero()[0].tolist():
        slot = int(schedule.slots[row])
        sequence = _in_slot(roster, slot)
        state = sequence.state
        assert isinstance(state, Prefilling | Decoding)
        table.publish(state.lease, roster.slots.ids[slot, : schedule.kv_lens[row]], sequence.request.cache_salt)


def _reasons(stops: np.ndarray, full: np.ndarray) -> list[FinishReason | None]:
    reasons: list[FinishReason | None] = [None] * len(stops)
    for row in (stops | full).nonzero()[0].tolist():
        reasons[row] = "stop" if stops[row] else "length"
    return reasons


def _sampled(
    roster: Roster,
    rows: np.ndarray,
    slots: np.ndarray,
    token_ids: np.ndarray,
    reasons: list[FinishReason | None],
    scores: ScoreArrays | None,
) -> list[TokenDelta]:
    """The deltas of sampled tokens, ending the sequences that have a reason to."""
    logprobs = _logprobs(roster, rows, slots, scores)
    sequences, deltas = roster.slots.sequences, list[TokenDelta]()
    for index, (slot, token_id, reason) in enumerate(zip(slots.tolist(), token_ids.tolist(), reasons, strict=True)):
        sequence = sequences[slot]
        assert sequence is not None
        deltas.append(sequence.delta((token_id,), reason, logprobs.get(index)))
        if reason is not None:
            roster.finish(sequence, reason)
    return deltas


def _logprobs(
    roster: Roster, rows: np.ndarray, slots: np.ndarray, scores: ScoreArrays | None
) -> dict[int, TokenLogprobs]:
    """By index into `rows`, for the sequences that asked."""
    if scores is None:
        return {}
    asked = np.flatnonzero(roster.slots.wants_logprobs[slots])
    return {index: _row_logprobs(_in_slot(roster, slots[index]), scores, int(rows[index])) for index in asked.tolist()}


def _row_logprobs(sequence: Sequence, scores: ScoreArrays, row: int) -> TokenLogprobs:
    one = ScoreArrays(*(array[row : row + 1] for array in scores))
    return token_logprobs(one, sequence.request.sampling.logprobs or 0)[0]


def _end_scoring(roster: Roster, sequence: Sequence) -> TokenDelta:
    """A request for prompt log-probabilities alone ends with its prompt."""
    delta = sequence.delta((), "length")
    roster.finish(sequence, "length")
    return delta


def _late(roster: Roster, sequence: Sequence, step: Step, row: int, result: StepResult) -> list[TokenDelta]:
    """What a step in flight gave a sequence that was put back meanwhile."""
    if not step.ends[row]:
        return []
    if not step.schedule.samples[row]:
        return [_end_scoring(roster, sequence)]
    token_id = int(result.token_ids[row])
    sequence.ids = np.append(sequence.ids, np.int32(token_id))
    reason = sequence.finish_reason(token_id, len(sequence.ids) - len(sequence.prompt_ids))
    logprobs = None
    if result.scores is not None and sequence.request.sampling.logprobs is not None:
        logprobs = _row_logprobs(sequence, result.scores, row)
    delta = sequence.delta((token_id,), reason, logprobs)
    if reason is not None:
        roster.finish(sequence, reason)
    return [delta]


def _in_slot(roster: Roster, slot: int) -> Sequence:
    sequence = roster.slots.sequences[slot]
    assert sequence is not None
    return sequence
