"""The samples of one prompt while they grow: from the engine's deltas to what a user sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenspeed.text.assembler import OutputAssembler, TextDelta
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestOutput,
    TokenDelta,
    TokenLogprobs,
    Usage,
)


class Sample:
    """One engine request, and its output so far."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request_id = request.request_id
        self.finish_reason: FinishReason | None = None
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        self._assembler = OutputAssembler(tokenizer, request.sampling)
        self._wants_logprobs = request.sampling.logprobs is not None
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._stop_reason: str | int | None = None

    def take(self, delta: TokenDelta) -> TextDelta:
        """Adds a delta; returns the text and the tokens that are new."""
        self.cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        added = self._assembler.push(delta)
        self._text += added.text
        self._token_ids += added.token_ids
        self._logprobs += added.logprobs or ()
        self.finish_reason, self._stop_reason = added.finish_reason, added.stop_reason
        return added

    def output(self, index: int) -> CompletionOutput:
        """The output so far."""
        return CompletionOutput(
            index=index,
            text=self._text,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs) if self._wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )


class Growth(NamedTuple):
    """What one delta added.

    Attributes:
      sample: the first of the samples it belongs to.
    """

    sample: int
    added: TextDelta


class PromptOutputs:
    """The samples of one prompt.

    Args:
      request_id: of the prompt.
      prompt: its text, if it came as text.
      requests: what `make_requests` made of it; one request stands for all samples where they would be alike.
      num_samples: how many were asked for.
    """

    def __init__(
        self, request_id: str, prompt: str | None, requests: Sequence[Request], num_samples: int, tokenizer: Tokenizer
    ) -> None:
        self.requests = tuple(requests)
        self._request_id = request_id
        self._prompt = prompt
        self._samples = [Sample(request, tokenizer) for request in requests]
        self._index = {request.request_id: k for k, request in enumerate(requests)}
        self._num_samples = num_samples

    def take(self, delta: TokenDelta) -> Growth | None:
        """Adds a delta of one of the requests; None if that one had finished already."""
        k = self._index[delta.request_id]
        return None if self._samples[k].finish_reason else Growth(k, self._samples[k].take(delta))

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that go on."""
        return [sample.request_id for sample in self._samples if sample.finish_reason is None]

    def output(self) -> RequestOutput:
        """All samples so far."""
        copies = self._samples * (self._num_samples if len(self._samples) == 1 else 1)
        outputs = tuple(sample.output(index) for index, sample in enumerate(copies))
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self.requests[0].prompt_ids,
            outputs=outputs,
            usage=Usage(
                prompt_tokens=len(self.requests[0].prompt_ids),
                completion_tokens=sum(len(output.token_ids) for output in outputs),
                cached_tokens=self._samples[0].cached_tokens,
            ),
            finished=not self.unfinished,
            prompt_logprobs=self._samples[0].prompt_logprobs,
        )
