"""A request's life inside the engine: `Sequence` from arrival to end, and `SlotArrays` for what a step needs of the running ones."""

from __future__ import annotations

import numpy as np

from tokenspeed.engine.lifecycle import Finished, Queued, State
from tokenspeed.types import FinishReason, Request, RunnerLimits, ScoreArrays, SlotParams, TokenDelta, TokenLogprobs


class Sequence:
    """One request inside the engine.

    Args:
      prompt_ids: int32 [prompt length].
      number: counts arrivals.
      seed: uint64 bit pattern, the same each time the sequence takes a slot.
    """

    __slots__ = (
        "_scores",
        "ids",
        "max_outputs",
        "num_cached_tokens",
        "num_preemptions",
        "num_scored",
        "number",
        "prompt_ids",
        "request",
        "scheduled_time",
        "seed",
        "state",
        "stop_ids",
    )

    def __init__(self, request: Request, prompt_ids: np.ndarray, number: int, seed: int, max_model_len: int) -> None:
        sampling = request.sampling
        room = max_model_len - len(prompt_ids)
        self.request = request
        self.prompt_ids = prompt_ids
        self.number = number
        self.seed = seed
        self.ids = prompt_ids
        """int32: prompt and outputs so far; up to date only while the sequence has no slot."""
        self.max_outputs = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.stop_ids = (() if sampling.ignore_eos else request.eos_ids) + sampling.stop_token_ids
        self.state: State = Queued()
        self.num_scored = 0
        """Prompt ids whose log-probability a dispatched step was asked for."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.scheduled_time = 0.0
        self._scores: list[TokenLogprobs | None] | None = None if sampling.prompt_logprobs is None else [None]

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority number, then the earlier arrival."""
        return self.request.priority, self.number

    @property
    def num_reusable(self) -> int:
        """Leading known ids whose keys and values may come from the prefix cache.

        The last id is computed again to sample after it; a prompt id that is still to be scored needs its step.
        """
        known = len(self.ids) - 1
        scores_missing = (
            self.request.sampling.prompt_logprobs is not None and self.num_scored < len(self.prompt_ids) - 1
        )
        return min(known, self.num_scored) if scores_missing else known

    def slot_params(self, slot: int) -> SlotParams:
        """What the device must know of a sequence that takes a slot."""
        outputs = self.ids[len(self.prompt_ids) :]
        return SlotParams(slot, self.request.sampling, self.seed, self.stop_ids, self.prompt_ids, outputs)

    def add_prompt_scores(self, scores: ScoreArrays) -> None:
        """Keeps the scores of the next prompt ids until the first delta."""
        if self._scores is not None:
            self._scores += token_logprobs(scores, self.request.sampling.prompt_logprobs or 0)

    def delta(
        self, token_ids: tuple[int, ...], reason: FinishReason | None, logprobs: TokenLogprobs | None = None
    ) -> TokenDelta:
        """What a step added; the first delta takes the prompt's scores with it."""
        scores = None
        if self._scores is not None and len(self._scores) == len(self.prompt_ids):
            scores, self._scores = tuple(self._scores), None
        return TokenDelta(
            request_id=self.request.request_id,
            token_ids=token_ids,
            logprobs=None if logprobs is None else (logprobs,),
            prompt_logprobs=scores,
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason == "stop" and self._is_stop_id(token_ids[-1]) else None,
            num_cached_tokens=self.num_cached_tokens,
            scheduled_time=self.scheduled_time,
            num_preemptions=self.num_preemptions,
        )

    def finish_reason(self, token_id: int, num_outputs: int) -> FinishReason | None:
        """Why the sequence ends with this output, if it does."""
        if token_id in self.stop_ids and num_outputs >= self.request.sampling.min_tokens:
            return "stop"
        return "length" if num_outputs >= self.max_outputs else None

    @property
    def is_finished(self) -> bool:
        return isinstance(self.state, Finished)

    def _is_stop_id(self, token_id: int) -> bool:
        sampling, is_eos = self.request.sampling, token_id in self.request.eos_ids
        return token_id in sampling.stop_token_ids and (sampling.ignore_eos or not is_eos)


class SlotArrays:
    """What scheduling and committing need of running sequences, one row a slot, so that a step costs no loop over tokens.

    A sampled token counts in `num_sampled` when its step is dispatched, and in `num_ids` when it is committed.
    """

    def __init__(self, limits: RunnerLimits) -> None:
        slots = limits.max_num_seqs
        self.sequences: list[Sequence | None] = [None] * slots
        self.ids = np.zeros((slots, limits.max_model_len), np.int32)
        """Known ids. The operating system backs only the pages of it that were written."""
        self.num_ids = np.zeros(slots, np.int32)
        self.num_prompt = np.zeros(slots, np.int32)
        self.kv_lens = np.zeros(slots, np.int32)
        """Ids whose keys and values are in the cache once all dispatched steps are done."""
        self.num_sampled = np.zeros(slots, np.int32)
        self.max_outputs = np.zeros(slots, np.int32)
        self.min_outputs = np.zeros(slots, np.int32)
        self.wants_logprobs = np.zeros(slots, np.bool_)
        self.decoding = np.zeros(slots, np.bool_)
        self.stop_ids = np.full((slots, 4), -1, np.int32)

    def take(self, slot: int, sequence: Sequence, kv_len: int) -> None:
        """Fills the row of a sequence that takes a slot with `kv_len` of its ids in the cache."""
        known, sampling = len(sequence.ids), sequence.request.sampling
        self.sequences[slot] = sequence
        self.ids[slot, :known] = sequence.ids
        self.num_ids[slot] = known
        self.num_prompt[slot] = len(sequence.prompt_ids)
        self.kv_lens[slot] = kv_len
        self.num_sampled[slot] = known - len(sequence.prompt_ids)
        self.max_outputs[slot] = sequence.max_outputs
        self.min_outputs[slot] = sampling.min_tokens
        self.wants_logprobs[slot] = sampling.logprobs is not None
        self.decoding[slot] = False
        self._set_stop_ids(slot, sequence.stop_ids)

    def leave(self, slot: int) -> None:
        """Empties a row."""
        self.sequences[slot] = None
        self.decoding[slot] = False

    def append(self, slots: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds a committed output to each slot.

        Returns:
          bool, bool: whether it ended the sequence as an end or stop id; whether for its length.
        """
        lens = self.num_ids[slots]
        self.ids[slots, lens] = token_ids
        self.num_ids[slots] = lens + 1
        outputs = lens + 1 - self.num_prompt[slots]
        stops = (self.stop_ids[slots] == token_ids[:, None]).any(axis=1) & (outputs >= self.min_outputs[slots])
        return stops, outputs >= self.max_outputs[slots]

    def known(self, slot: int) -> np.ndarray:
        """int32 view of the known ids."""
        return self.ids[slot, : self.num_ids[slot]]

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


def token_logprobs(scores: ScoreArrays, num_alternatives: int) -> list[TokenLogprobs]:
    """One TokenLogprobs a row, with the asked number of alternatives."""
    return [
        TokenLogprobs(logprob, rank, tuple(top_ids), tuple(top))
        for logprob, rank, top_ids, top in zip(
            scores.logprobs.tolist(),
            scores.ranks.tolist(),
            scores.top_ids[:, :num_alternatives].tolist(),
            scores.top_logprobs[:, :num_alternatives].tolist(),
            strict=True,
        )
    ]
