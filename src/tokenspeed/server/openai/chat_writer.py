"""The model's output as chat messages: whole ones, and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.server.generation import Piece
from tokenspeed.server.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from tokenspeed.server.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    PromptLogprobs,
    TokenLogprob,
    UsageObject,
)
from tokenspeed.server.openai.response import FINGERPRINT, Head, Writer
from tokenspeed.text.assembler import TextDelta


class ChatStyle(NamedTuple):
    """What a chat response contains beside the output's text.

    Attributes:
      role: of the answers.
      echo: text each answer begins with.
      top_logprobs: alternatives a token; None: no log-probabilities.
      prompt_logprobs: alternatives a prompt token; None: no log-probabilities of the prompt.
      token_ids: whether the ids of prompt and output are told.
    """

    role: str
    echo: str
    top_logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool


class _Message:
    """One choice as it grows. What streams and whole responses show of it is the same."""

    def __init__(self, echo: str) -> None:
        self.started = False
        self.content = [echo]
        self.logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def split(self, text: str) -> Delta | None:
        """The part of the message that `text` adds to. All is content; a parser of reasoning or tool calls sits here."""
        return Delta(content=text) if text else None


class ChatWriter(Writer):
    """Writes chat messages."""

    def __init__(self, head: Head, style: ChatStyle, names: TokenNames, prompt_ids: Sequence[int], n: int) -> None:
        self._head = head
        self._style = style
        self._names = names
        self._prompt_ids = prompt_ids
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._messages = [_Message(style.echo) for _ in range(n)]

    def chunks(self, piece: Piece, usage: UsageObject | UnsetType | None) -> list[msgspec.Struct]:
        index, text = piece.choice, piece.text
        choices = (*self._body(index, text), *_closing(index, text))
        return [*self._opening(index, usage), *(self._chunk(choice, usage) for choice in choices)]

    def _opening(self, index: int, usage: UsageObject | UnsetType | None) -> list[ChatChunk]:
        """What comes before a choice's first text: its role, and the echo."""
        message = self._messages[index]
        if message.started:
            return []
        message.started = True
        ids = list(self._prompt_ids) if self._style.token_ids and index == 0 else UNSET
        role = ChunkChoice(index=index, delta=Delta(role=self._style.role, content=""))
        chunks = [self._chunk(role, usage, prompt_token_ids=ids)]
        if self._style.echo:
            chunks.append(self._chunk(ChunkChoice(index=index, delta=Delta(content=self._style.echo)), usage))
        return chunks

    def _body(self, index: int, text: TextDelta) -> list[ChunkChoice]:
        delta = self._messages[index].split(text.text)
        logprobs = self._logprobs(text)
        ids = list(text.token_ids) if self._style.token_ids and text.token_ids else UNSET
        if delta is None and logprobs is None and ids is UNSET:
            return []
        return [ChunkChoice(index=index, delta=delta or Delta(content=""), logprobs=logprobs, token_ids=ids)]

    def _logprobs(self, text: TextDelta) -> ChatLogprobs | None:
        if self._style.top_logprobs is None or not text.logprobs:
            return None
        return chat_logprobs(text.token_ids, text.logprobs, self._style.top_logprobs, self._names)

    def usage_chunk(self, usage: UsageObject) -> msgspec.Struct:
        return self._chunk(None, usage)

    def _chunk(
        self,
        choice: ChunkChoice | None,
        usage: UsageObject | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[] if choice is None else [choice],
            system_fingerprint=FINGERPRINT,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def add(self, piece: Piece) -> None:
        message, text = self._messages[piece.choice], piece.text
        if self._style.prompt_logprobs is not None and piece.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(
                self._prompt_ids, piece.prompt_logprobs, self._style.prompt_logprobs, self._names
            )
        delta = message.split(text.text)
        if delta is not None and delta.content is not UNSET:
            message.content.append(delta.content)
        logprobs = self._logprobs(text)
        if logprobs is not None:
            message.logprobs += logprobs.content
        message.token_ids += text.token_ids
        if text.finish_reason is not None:
            message.finish_reason, message.stop_reason = text.finish_reason, text.stop_reason

    def whole(self, usage: UsageObject) -> msgspec.Struct:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(index, message) for index, message in enumerate(self._messages)],
            usage=usage,
            system_fingerprint=FINGERPRINT,
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=list(self._prompt_ids) if self._style.token_ids else UNSET,
        )

    def _choice(self, index: int, message: _Message) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(self._style.role, "".join(message.content)),
            logprobs=None if self._style.top_logprobs is None else ChatLogprobs(message.logprobs),
            finish_reason=message.finish_reason,
            stop_reason=message.stop_reason,
            token_ids=message.token_ids if self._style.token_ids else UNSET,
        )


def _closing(index: int, text: TextDelta) -> list[ChunkChoice]:
    """The chunk that ends a choice: it holds nothing else, so that no client can miss what it would hold."""
    if text.finish_reason is None:
        return []
    return [ChunkChoice(index=index, delta=Delta(), finish_reason=text.finish_reason, stop_reason=text.stop_reason)]
