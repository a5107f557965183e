"""A response that is generated: streamed or whole, from the same pieces, in the JSON of one route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.server.endpoint import Call, json_response
from tokenspeed.server.generation import Generation, Piece
from tokenspeed.server.openai.protocol import GenerateOptions, UsageObject
from tokenspeed.server.sse import EventStream, event
from tokenspeed.server.state import ServerState
from tokenspeed.types import InvalidRequest, Request

FINGERPRINT = f"tokenspeed-{__version__}"

_BYTES_A_LOGPROB = 32
"""About what one prompt log-probability takes in the answer."""


class Head(NamedTuple):
    """What all chunks of a response have in common."""

    id: str
    created: int
    model: str

    @classmethod
    def of(cls, prefix: str, state: ServerState, call: Call, options: GenerateOptions) -> Head:
        """Names a response after the client's own id, if it gave one."""
        name = call.client_id or options.request_id or call.own_id
        return cls(f"{prefix}-{name}", int(call.arrival_time), state.names[0])


class UsageReport(NamedTuple):
    """When a stream tells its token counts: in a chunk at the end, and in every chunk."""

    at_end: bool
    in_chunks: bool

    @classmethod
    def of(cls, state: ServerState, options: GenerateOptions) -> UsageReport:
        """What the request asks for. Raises InvalidRequest if it is not for a stream."""
        asked = options.stream_options
        if asked is not None and not options.stream:
            raise InvalidRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
        at_end = state.config.enable_force_include_usage or (asked is not None and asked.include_usage)
        return cls(at_end, at_end and asked is not None and asked.continuous_usage_stats)


class Writer(ABC):
    """Writes the pieces of one generation as JSON: either `chunks` of a stream, or `add` and then `whole`."""

    @abstractmethod
    def chunks(self, piece: Piece, usage: UsageObject | msgspec.UnsetType | None) -> list[msgspec.Struct]:
        """The chunks that a piece becomes, with this for their usage."""

    @abstractmethod
    def usage_chunk(self, usage: UsageObject) -> msgspec.Struct:
        """The chunk that only tells the usage."""

    @abstractmethod
    def add(self, piece: Piece) -> None:
        """Keeps a piece for `whole`."""

    @abstractmethod
    def whole(self, usage: UsageObject) -> msgspec.Struct:
        """The response, once all pieces have come."""


class GenerationResponse:
    """Generates, and sends what comes, as an ASGI application. Nothing is sent before the engine's first output.

    Args:
      prompts: for each prompt the engine's requests that serve its samples.
      report: None for a whole response.
    """

    def __init__(
        self,
        state: ServerState,
        prompts: Sequence[Sequence[Request]],
        n: int,
        writer: Writer,
        report: UsageReport | None,
    ) -> None:
        self._state = state
        self._prompts = prompts
        self._n = n
        self._writer = writer
        self._report = report

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._state.start(self._prompts, self._n, bounded=self._report is not None)
        if self._report is None:
            await (await self._whole(generation))(scope, receive, send)
        else:
            events = self._events(generation, self._report)
            await EventStream(events, self._state.config.sse_keep_alive_interval)(scope, receive, send)

    async def _whole(self, generation: Generation) -> Response:
        with generation:
            while pieces := await generation.pieces():
                await self._state.run_text(_size(pieces), partial(self._add, pieces))
        return json_response(self._writer.whole(UsageObject.of(generation.usage)))

    def _add(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            self._writer.add(piece)

    async def _events(self, generation: Generation, report: UsageReport) -> AsyncGenerator[bytes]:
        with generation:
            while pieces := await generation.pieces():
                usage = self._chunk_usage(generation, report)
                yield await self._state.run_text(_size(pieces), partial(self._encode, pieces, usage))
        if report.at_end:
            yield event(msgspec.json.encode(self._writer.usage_chunk(UsageObject.of(generation.usage))))

    def _chunk_usage(self, generation: Generation, report: UsageReport) -> UsageObject | msgspec.UnsetType | None:
        if report.in_chunks:
            return UsageObject.of(generation.usage)
        return None if report.at_end else msgspec.UNSET

    def _encode(self, pieces: list[Piece], usage: UsageObject | msgspec.UnsetType | None) -> bytes:
        chunks = (chunk for piece in pieces for chunk in self._writer.chunks(piece, usage))
        return b"".join(event(msgspec.json.encode(chunk)) for chunk in chunks)


def _size(pieces: list[Piece]) -> int:
    """About how many bytes of JSON the prompts' log-probabilities become; all else is small."""
    scores = (entry for piece in pieces for entry in piece.prompt_logprobs or () if entry is not None)
    return sum(_BYTES_A_LOGPROB * (1 + len(entry.top_ids)) for entry in scores)
