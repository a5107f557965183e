"""The model's output as plain completions: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.server.generation import Piece
from tokenspeed.server.openai.logprobs import CompletionLogprobsWriter, TokenNames, prompt_logprobs
from tokenspeed.server.openai.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    UsageObject,
)
from tokenspeed.server.openai.response import FINGERPRINT, Head, Writer
from tokenspeed.types import TokenLogprobs


class CompletionStyle(NamedTuple):
    """What a completion contains beside the output's text.

    Attributes:
      echoes: for each prompt the text its completions begin with; None: they do not repeat it.
      logprobs: alternatives a token; None: no log-probabilities.
      prompt_logprobs: alternatives a prompt token; None: no log-probabilities of the prompt beside the echo's.
      token_ids: whether the ids of prompt and output are told.
    """

    echoes: Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool


class _Choice:
    """One choice as it grows."""

    def __init__(self, logprobs: CompletionLogprobsWriter | None) -> None:
        self.started = False
        self.logprobs = logprobs
        self.parts: list[CompletionChoice] = []


class CompletionWriter(Writer):
    """Writes completions. A whole one is the parts of a streamed one put together."""

    def __init__(
        self, head: Head, style: CompletionStyle, names: TokenNames, prompts: Sequence[Sequence[int]], n: int
    ) -> None:
        self._head = head
        self._style = style
        self._names = names
        self._prompts = prompts
        self._n = n
        self._choices = [
            _Choice(None if style.logprobs is None else CompletionLogprobsWriter(style.logprobs, names))
            for _ in range(len(prompts) * n)
        ]

    def chunks(self, piece: Piece, usage: UsageObject | UnsetType | None) -> list[msgspec.Struct]:
        part = self._part(piece)
        if part.text or part.logprobs is not None or part.finish_reason is not None or part.token_ids:
            return [self._completion([part], usage)]
        return []

    def usage_chunk(self, usage: UsageObject) -> msgspec.Struct:
        return self._completion([], usage)

    def add(self, piece: Piece) -> None:
        self._choices[piece.choice].parts.append(self._part(piece))

    def whole(self, usage: UsageObject) -> msgspec.Struct:
        return self._completion(
            [self._joined(index, choice.parts) for index, choice in enumerate(self._choices)], usage
        )

    def _completion(self, choices: list[CompletionChoice], usage: UsageObject | UnsetType | None) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            system_fingerprint=FINGERPRINT,
        )

    def _part(self, piece: Piece) -> CompletionChoice:
        """What a piece adds to its choice. The first one brings the prompt, as far as it is asked for."""
        choice, text, prompt = self._choices[piece.choice], piece.text, piece.choice // self._n
        first, choice.started = not choice.started, True
        echo = self._style.echoes[prompt] if first and self._style.echoes is not None else ""
        return CompletionChoice(
            index=piece.choice,
            text=echo + text.text,
            logprobs=self._logprobs(choice, piece, first),
            finish_reason=text.finish_reason,
            stop_reason=text.stop_reason,
            prompt_logprobs=self._prompt_scores(piece),
            token_ids=list(text.token_ids) if self._style.token_ids else UNSET,
            prompt_token_ids=list(self._prompts[prompt]) if first and self._style.token_ids else UNSET,
        )

    def _logprobs(self, choice: _Choice, piece: Piece, first: bool) -> CompletionLogprobs | None:
        if choice.logprobs is None:
            return None
        ids: Sequence[int] = piece.text.token_ids
        scores: Sequence[TokenLogprobs | None] = piece.text.logprobs or ()
        if first and self._style.echoes is not None:
            ids = [*self._prompts[piece.choice // self._n], *ids]
            scores = [*(piece.prompt_logprobs or ()), *scores]
        return choice.logprobs.write(ids, scores) if ids else None

    def _prompt_scores(self, piece: Piece) -> PromptLogprobs | UnsetType:
        if self._style.prompt_logprobs is None or piece.prompt_logprobs is None:
            return UNSET
        ids = self._prompts[piece.choice // self._n]
        return prompt_logprobs(ids, piece.prompt_logprobs, self._style.prompt_logprobs, self._names)

    def _joined(self, index: int, parts: Sequence[CompletionChoice]) -> CompletionChoice:
        first, last = parts[0], parts[-1]
        return CompletionChoice(
            index=index,
            text="".join(part.text for part in parts),
            logprobs=None if self._style.logprobs is None else _concatenated(parts),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            prompt_logprobs=first.prompt_logprobs,
            token_ids=[id_ for part in parts for id_ in part.token_ids or ()] if self._style.token_ids else UNSET,
            prompt_token_ids=first.prompt_token_ids,
        )


def _concatenated(parts: Sequence[CompletionChoice]) -> CompletionLogprobs:
    whole = CompletionLogprobs([], [], [], [])
    for logprobs in (part.logprobs for part in parts if part.logprobs is not None):
        whole.text_offset += logprobs.text_offset
        whole.token_logprobs += logprobs.token_logprobs
        whole.tokens += logprobs.tokens
        whole.top_logprobs += logprobs.top_logprobs
    return whole
