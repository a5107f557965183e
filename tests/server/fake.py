"""An engine that says what a script tells it to, a tokenizer of bytes, and a server of both on a real socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.engine.client import EngineClient, Sink, check_request
from tokenspeed.types import (
    EngineOutput,
    FinishReason,
    InvalidRequest,
    Request,
    RunnerLimits,
    StepStats,
    TokenDelta,
    TokenLogprobs,
)

BOS = 257
EOS = 256
VOCAB = 1000

LIMITS = RunnerLimits(
    num_pages=4097, page_size=16, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1024, vocab_size=VOCAB
)


class ScriptTokenizer:
    """Each byte is a token, and so is what a script says at once. As `text.tokenizer.Tokenizer` in all that is used."""

    def __init__(self) -> None:
        self.vocab_size = VOCAB
        self.special_ids = frozenset({EOS, BOS})
        self.eos_ids = (EOS,)
        self._bytes: dict[int, bytes] = {EOS: b"<|im_end|>", BOS: b"<s>"} | {k: bytes([k]) for k in range(256)}
        self._ids = {token: token_id for token_id, token in self._bytes.items()}

    def id_of(self, token: bytes) -> int:
        """The id of a token, which becomes one if it is none."""
        if token not in self._ids:
            self._ids[token] = 300 + len(self._ids)
            self._bytes[self._ids[token]] = token
        return self._ids[token]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            ids = list(text.encode())
        except UnicodeEncodeError as error:
            raise InvalidRequest(str(error)) from None
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        for token_id in ids:
            if not 0 <= token_id < VOCAB:
                raise InvalidRequest(f"token id {token_id} is not in the vocabulary [0, {VOCAB})")
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes.get(token_id, b"")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def spelling(self, token_id: int) -> str:
        return self.token_text(token_id)


Script = Callable[[Request], Iterable[int]]
"""The ids a model would say to a request if nobody stopped it."""


@dataclass
class Running:
    """A request in the engine."""

    request: Request
    ids: Iterator[int]
    said: int = 0
    started: bool = False


def scored(token_id: int, count: int) -> TokenLogprobs:
    """A token's log-probabilities: it is the second most likely, after its neighbour."""
    top_ids = (token_id ^ 1, token_id, *range(258, 256 + count))[:count]
    return TokenLogprobs(-0.5 - token_id / 1024, 2, top_ids, tuple(-0.25 * (k + 1) for k in range(count)))


class ScriptEngine(EngineClient):
    """Says the script, `group` tokens a step, as long as the request's own limits allow. Steps take `delay` seconds.

    Attributes:
      requests: all that came, in order.
      aborted: ids that were aborted.
      open: while clear, no request is started: all wait.
    """

    def __init__(self, script: Script, *, group: int = 1, delay: float = 0.0, limits: RunnerLimits = LIMITS) -> None:
        super().__init__()
        self.script = script
        self.group = group
        self.delay = delay
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self._limits = limits
        self._live: dict[str, Running] = {}
        self._commands: list[Running | str] = []
        self._changed = threading.Condition()
        self._closed = False
        self._steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def limits(self) -> RunnerLimits:
        return self._limits

    @property
    def facts(self) -> Mapping[str, str]:
        return {"device": "script"}

    @property
    def healthy(self) -> bool:
        return self.error is None

    def add(self, request: Request, sink: Sink) -> None:
        check_request(request, self._limits)
        self.streams.open(request.request_id, sink)
        self.requests.append(request)
        self._tell(Running(request, iter(self.script(request))))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self._tell(request_id)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _tell(self, command: Running | str) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._commands or self._closed or (self._live and self.open.is_set()), 0.02
                )
                commands, self._commands = self._commands, []
            if self._closed:
                self._deliver([TokenDelta(request_id=name, token_ids=(), finish_reason="abort") for name in self._live])
                return
            deltas = [delta for command in commands for delta in self._obey(command)]
            if self.open.is_set():
                time.sleep(self.delay)
                deltas += [self._step(running) for running in list(self._live.values())]
            if deltas:
                self._deliver(deltas)

    def _obey(self, command: Running | str) -> list[TokenDelta]:
        if isinstance(command, Running):
            self._live[command.request.request_id] = command
            return []
        gone = self._live.pop(command, None)
        return [] if gone is None else [TokenDelta(request_id=command, token_ids=(), finish_reason="abort")]

    def _deliver(self, deltas: list[TokenDelta]) -> None:
        self._steps += 1
        self.streams.deliver(EngineOutput(deltas, self.state(deltas)))

    def state(self, deltas: Sequence[TokenDelta]) -> StepStats:
        running = sum(one.started for one in self._live.values())
        tokens = sum(len(delta.token_ids) for delta in deltas)
        return StepStats(
            time=time.time(),
            num_running=running,
            num_waiting=len(self._live) - running,
            num_pages=self._limits.num_pages,
            num_pages_used=running,
            prefix_queries=7,
            prefix_hits=3,
            num_preemptions=0,
            num_steps=self._steps,
            step_tokens=tokens,
            step_padding=tokens,
            step_seconds=self.delay,
            num_compiles=0,
        )

    def _step(self, running: Running) -> TokenDelta:
        """What the engine of a real model would send: it knows ids and limits, and no stop strings."""
        request, sampling, first = running.request, running.request.sampling, not running.started
        running.started = True
        ends = (() if sampling.ignore_eos else request.eos_ids) + sampling.stop_token_ids
        ids: list[int] = []
        reason: FinishReason | None = None
        assert sampling.max_tokens is not None
        while len(ids) < self.group and reason is None:
            if running.said == sampling.max_tokens:
                reason = "length"
                break
            token_id = self._next(running, ends)
            ids.append(token_id)
            running.said += 1
            if token_id in ends:
                reason = "stop"
            elif running.said == sampling.max_tokens:
                reason = "length"
        if reason is not None:
            del self._live[request.request_id]
        return TokenDelta(
            request_id=request.request_id,
            token_ids=tuple(ids),
            logprobs=None if sampling.logprobs is None else tuple(scored(i, sampling.logprobs) for i in ids),
            prompt_logprobs=self._prompt_scores(request) if first else None,
            finish_reason=reason,
            stop_token_id=ids[-1] if reason == "stop" and ids[-1] in sampling.stop_token_ids else None,
            num_cached_tokens=len(request.prompt_ids) // 2,
            scheduled_time=time.time(),
        )

    def _next(self, running: Running, ends: tuple[int, ...]) -> int:
        for token_id in running.ids:
            if token_id not in ends or running.said >= running.request.sampling.min_tokens:
                return token_id
        return ord("z")

    def _prompt_scores(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        count = request.sampling.prompt_logprobs
        return None if count is None else (None, *(scored(i, count) for i in request.prompt_ids[1:]))


def says(tokenizer: ScriptTokenizer, *tokens: bytes | int) -> Script:
    """A script of these tokens."""
    ids = [tokenizer.id_of(token) if isinstance(token, bytes) else token for token in tokens]
    return lambda request: ids
