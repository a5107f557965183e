"""One sequence's output: from the engine's token deltas to text that is safe to send, ended by stop strings."""

from __future__ import annotations

import msgspec

from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.stop import StopMatcher
from tokenspeed.text.tokenizer import TokenBytes
from tokenspeed.types import FinishReason, SamplingParams, TokenDelta, TokenLogprobs


class TextDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one delta adds to a user's output. Text may come later than the tokens that it is of."""

    text: str
    """New text that can no longer change."""
    token_ids: tuple[int, ...]
    """New ids, counted in the usage: all up to the one that ended the output."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One an id of `token_ids`, if asked for."""
    finish_reason: FinishReason | None = None
    """Set once, on the last delta. If the engine's delta had none, a stop string matched: the request must be aborted."""
    stop_reason: str | int | None = None
    """The stop string or stop id that ended the output; None for end of sequence and length."""


class OutputAssembler:
    """Assembles one sequence's output. The result does not depend on how many tokens come in a delta.

    The token that ends the output (end of sequence, a stop id) is listed and counted; its text is left out unless
    `include_stop_str_in_output`. Of a stop string and the token limit that fall on one token, `length` is reported.
    """

    def __init__(self, tokenizer: TokenBytes, sampling: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens)
        self._includes_stop = sampling.include_stop_str_in_output
        self._matcher = StopMatcher(sampling.stop, self._includes_stop, sampling.min_tokens) if sampling.stop else None
        self.finished = False

    def push(self, delta: TokenDelta) -> TextDelta:
        """Adds what one step gave; after the end, nothing more is taken."""
        if self.finished:
            return TextDelta(text="", token_ids=())
        ids = delta.token_ids
        hidden = delta.finish_reason == "stop" and not self._includes_stop
        text, stop, used = self._read(ids[:-1] if hidden else ids)
        if stop is None:
            reason, stop_reason, used = delta.finish_reason, delta.stop_token_id, len(ids)
            text += self._matcher.flush() if self._matcher and reason else ""
        elif delta.finish_reason == "length" and used == len(ids):
            reason, stop_reason = "length", None
        else:
            reason, stop_reason = "stop", stop
        self.finished = reason is not None
        return TextDelta(
            text=text,
            token_ids=ids[:used],
            logprobs=None if delta.logprobs is None else delta.logprobs[:used],
            finish_reason=reason,
            stop_reason=stop_reason,
        )

    def _read(self, ids: tuple[int, ...]) -> tuple[str, str | None, int]:
        """The ids' text; the stop string if one is complete, and by how many of the ids."""
        if self._matcher is None:
            return self._detokenizer.push(ids), None, len(ids)
        text = ""
        for used, token_id in enumerate(ids, 1):
            added, stop = self._matcher.push(self._detokenizer.push((token_id,)))
            text += added
            if stop is not None:
                return text, stop, used
        return text, None, len(ids)
