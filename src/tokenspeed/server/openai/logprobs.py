"""Log-probabilities in OpenAI's two shapes, and vLLM's shape for the prompt's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenspeed.server.openai.protocol import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import TokenLogprobs

LEAST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenNames:
    """How tokens are named in logprobs.

    Args:
      as_ids: name them `token_id:123`, which survives tokens that are no text by themselves.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], count: int, names: TokenNames
) -> ChatLogprobs:
    """One entry a token, each with exactly the `count` most likely alternatives."""
    return ChatLogprobs(
        [
            TokenLogprob(
                names.name(token_id),
                max(entry.logprob, LEAST),
                list(names.bytes(token_id)),
                [
                    TopLogprob(names.name(other), max(logprob, LEAST), list(names.bytes(other)))
                    for other, logprob in _top(entry, count)
                ],
            )
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


class CompletionLogprobsWriter:
    """Writes the parallel lists of /v1/completions for one choice, piece by piece; offsets go on where the last ended."""

    def __init__(self, count: int, names: TokenNames) -> None:
        self._count = count
        self._names = names
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """The lists of these tokens. `top_logprobs` holds the chosen token beside the most likely ones."""
        lists = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            name = self._names.name(token_id)
            lists.text_offset.append(self._offset)
            lists.tokens.append(name)
            lists.token_logprobs.append(None if entry is None else max(entry.logprob, LEAST))
            lists.top_logprobs.append(None if entry is None else self._alternatives(name, entry))
            self._offset += len(name)
        return lists

    def _alternatives(self, name: str, entry: TokenLogprobs) -> dict[str, float]:
        alternatives: dict[str, float] = {}
        for other, logprob in _top(entry, self._count):
            # Two ids may share a name; the likelier one, which comes first, keeps it.
            alternatives.setdefault(self._names.name(other), max(logprob, LEAST))
        alternatives.setdefault(name, max(entry.logprob, LEAST))
        return alternatives


def prompt_logprobs(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int, names: TokenNames
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token beside the most likely ones."""
    return [
        None if entry is None else _by_id(token_id, entry, count, names)
        for token_id, entry in zip(prompt_ids, logprobs, strict=True)
    ]


def _by_id(token_id: int, entry: TokenLogprobs, count: int, names: TokenNames) -> dict[str, PromptLogprob]:
    by_id = {str(token_id): PromptLogprob(max(entry.logprob, LEAST), entry.rank, names.name(token_id))}
    for place, (other, logprob) in enumerate(_top(entry, count)):
        by_id.setdefault(str(other), PromptLogprob(max(logprob, LEAST), place + 1, names.name(other)))
    return by_id


def _top(entry: TokenLogprobs, count: int) -> Iterable[tuple[int, float]]:
    return zip(entry.top_ids[:count], entry.top_logprobs[:count], strict=True)
