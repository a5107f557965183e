"""The library's front door: a model in this process, to generate, chat and stream with, from plain code and from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from dataclasses import asdict, fields
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Self, Unpack, cast

import msgspec
from tqdm.auto import tqdm

from tokenspeed.config import DEFAULT_MODEL, EngineConfig
from tokenspeed.engine.client import EngineClient, ThreadEngine
from tokenspeed.loading import ModelText, open_model
from tokenspeed.text.outputs import Growth, PromptOutputs
from tokenspeed.text.prompts import (
    ChatOptions,
    Conversation,
    Prompt,
    PromptReader,
    conversation_list,
    is_conversation,
    prompt_list,
)
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    RequestOutput,
    RunnerLimits,
    SamplingParams,
    StepStats,
    TokenDelta,
)

GENERATE_MAX_TOKENS = 16
"""Longest output of a plain prompt where neither the call nor the model says otherwise, as in vLLM."""


class StreamOutput(RequestOutput, frozen=True, kw_only=True):
    """One step of a stream: all output so far, and what is new in it."""

    index: int
    """The sample that grew; 0 unless `n` is more than 1."""
    new_text: str
    """What its text has grown by; the pieces of a sample make up its whole text."""
    new_token_ids: tuple[int, ...]


class _Job:
    """Prompts that run together: starts their requests, sorts what comes back, and ends what is left.

    It knows the engine and not the `LLM`: nothing that the engine holds may keep an `LLM` alive.
    """

    def __init__(self, engine: EngineClient, prompts: Sequence[PromptOutputs]) -> None:
        self._engine = engine
        self._prompts = prompts
        self._owner = {request.request_id: prompt for prompt in prompts for request in prompt.requests}
        self._num_unfinished = len(self._owner)

    @property
    def finished(self) -> bool:
        return self._num_unfinished == 0

    def start(self, sink: Callable[[TokenDelta], None]) -> None:
        """Queues all requests; if one is refused, or this is interrupted, none goes on."""
        try:
            for prompt in self._prompts:
                for request in prompt.requests:
                    self._engine.add(request, sink)
        except BaseException:
            self.abort()
            raise

    def take(self, delta: TokenDelta) -> tuple[PromptOutputs, Growth] | None:
        """Adds a delta to its prompt; None if it came after the end of its sample.

        Raises:
          EngineDead: the engine stopped.
        """
        if delta.finish_reason == "error":
            raise self._engine.error or EngineDead("the engine stopped and gave no reason")
        prompt = self._owner[delta.request_id]
        growth = prompt.take(delta)
        if growth is None:
            return None
        if growth.added.finish_reason is not None:
            self._num_unfinished -= 1
            if delta.finish_reason is None:  # a stop string, which the engine does not see
                self._engine.abort(delta.request_id)
        return prompt, growth

    def abort(self) -> None:
        """Ends what has not finished."""
        for prompt in self._prompts:
            for request_id in prompt.unfinished:
                self._engine.abort(request_id)

    @contextlib.contextmanager
    def running(self, sink: Callable[[TokenDelta], None]) -> Generator[None]:
        """Starts the requests; whatever ends the block, an interrupt too, ends them."""
        self.start(sink)
        try:
            yield
        finally:
            self.abort()


class Stream(Iterator[StreamOutput]):
    """A running prompt, as an iterator of its growing output. It runs whether it is read or not.

    What leaves it ends the prompt: `break`, `close`, the end of a `with` block, an interrupt, no reference left.
    """

    def __init__(self, llm: LLM, prompt: PromptOutputs) -> None:
        self._llm = llm  # stays open as long as its streams
        self._inbox: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        self._job = _Job(llm.engine, [prompt])
        self._abort = _at_the_end_of(self, self._job)
        self._job.start(self._inbox.put)

    def __next__(self) -> StreamOutput:
        try:
            while self._abort.alive and not self._job.finished:
                if (grown := self._job.take(self._inbox.get())) is not None:
                    return _stream_output(*grown)
        except BaseException:
            self.close()
            raise
        raise StopIteration

    def close(self) -> None:
        """Ends the prompt, if it has not finished."""
        self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncStream(AsyncIterator[StreamOutput]):
    """`Stream` for asyncio. It starts with its first step; its prompt is tokenised in a thread."""

    def __init__(self, llm: LLM, prepare: Callable[[], PromptOutputs]) -> None:
        self._llm = llm
        self._prepare = prepare
        self._inbox: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self._job: _Job | None = None
        self._closed = False

    async def __anext__(self) -> StreamOutput:
        try:
            while not self._closed:
                job = self._job or await self._start()
                if job.finished:
                    break
                if (grown := job.take(await self._inbox.get())) is not None:
                    return _stream_output(*grown)
        except BaseException:
            await self.aclose()
            raise
        raise StopAsyncIteration

    async def _start(self) -> _Job:
        prompt = await asyncio.to_thread(self._prepare)
        self._job = _Job(self._llm.engine, [prompt])
        _at_the_end_of(self, self._job)
        self._job.start(_from_thread(self._inbox))
        return self._job

    async def aclose(self) -> None:
        """Ends the prompt, if it has not finished."""
        self._closed = True
        if self._job is not None:
            self._job.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


class LLM:
    """A model in this process, its engine in a thread. Threads may share it; it works inside a running event loop.

    It holds the device's memory until `close`, the end of a `with` block, or the last reference is gone. A notebook
    cell that makes an `LLM` anew holds both until the name is bound again: call `close` on the first before.

    Args:
      model: a name of the catalog, a folder, a .gguf file or a Hugging Face hub id.
      config: fields of `EngineConfig`.

    Attributes:
      config: what was asked for.
      engine: runs the requests.

    Raises:
      ConfigError: the model or a value cannot be used.
    """

    config: EngineConfig
    engine: EngineClient

    def __init__(self, model: str | os.PathLike[str] = DEFAULT_MODEL, **config: Any) -> None:
        asked = _engine_config({"model": os.fspath(model), **config})
        text, runner = open_model(asked)
        self._use(text, ThreadEngine(runner, asked), asked)

    @classmethod
    def over(cls, text: ModelText, engine: EngineClient, config: EngineConfig | None = None) -> Self:
        """An `LLM` over an engine that runs already, and that its `close` closes."""
        llm = cls.__new__(cls)
        llm._use(text, engine, config or EngineConfig())
        return llm

    def _use(self, text: ModelText, engine: EngineClient, config: EngineConfig) -> None:
        self.config = config
        self.engine = engine
        self._text = text
        self._reader = PromptReader(text.tokenizer, text.chat_template, text.eos_ids, engine.limits)
        self._end = weakref.finalize(self, engine.close)

    def close(self) -> None:
        """Ends what runs and frees the memory. A closed `LLM` raises EngineDead when it is asked something."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to token ids and back."""
        return self._text.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """`tokenizer`, under vLLM's name."""
        return self._text.tokenizer

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._text.chat_template is not None

    @property
    def limits(self) -> RunnerLimits:
        """What the engine can hold: context length, sequences at once, vocabulary."""
        return self.engine.limits

    def stats(self) -> StepStats:
        """The engine's state after its latest step."""
        return self.engine.stats()

    def default_sampling(self, *, chat: bool = False) -> SamplingParams:
        """How calls that bring no sampling sample: by what the model ships, else SamplingParams' own defaults.

        Where the model ships no `max_new_tokens`, plain prompts get GENERATE_MAX_TOKENS and chats what the context has
        room for. To change one value: `msgspec.structs.replace(llm.default_sampling(), temperature=0.0)`.
        """
        shipped = {name: value for name, value in asdict(self._text.defaults).items() if value is not None}
        max_tokens = shipped.pop("max_new_tokens", None if chat else GENERATE_MAX_TOKENS)
        return SamplingParams(**shipped, max_tokens=max_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, all at once. An interrupt ends them and leaves the `LLM` usable.

        Args:
          prompts: one or several; text gets the special tokens the model expects around it, token ids are used as given.
          sampling: for all, or one each; None: `default_sampling()`. `max_tokens` is lowered to what the context has
            room for.
          use_tqdm: show a progress bar; None: for several prompts, unless the `LLM` was made with `progress=False`.

        Returns:
          One output a prompt, in order.

        Raises:
          InvalidRequest: a prompt is empty, too long (code `context_length_exceeded`) or names an id outside the
            vocabulary, or the sampling does; nothing has been started then.
          EngineDead: the engine stopped.
        """
        return self._run(self._plain(prompts, sampling), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Answers conversations, all at once; as `generate`, but for what `default_sampling(chat=True)` says.

        Args:
          messages: a list of messages (`{"role": "user", "content": "Hello"}`), or several such lists.
          options: `add_generation_prompt`, `continue_final_message`, `tools`, `chat_template_kwargs`; see ChatOptions.

        Raises:
          InvalidRequest: as in `generate`, or the model has no chat template, or the template refuses the messages.
        """
        return self._run(self._conversations(messages, sampling, options), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Stream:
        """Continues one prompt, or answers one conversation, step by step.

            for step in llm.stream("Once upon a time"):
                print(step.new_text, end="", flush=True)

        Raises:
          InvalidRequest: as in `generate` and `chat`, at once.
        """
        return Stream(self, self._one(prompt, sampling, options))

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """`generate` for asyncio. To cancel it ends its prompts."""
        return await self._arun(await asyncio.to_thread(self._plain, prompts, sampling))

    async def achat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """`chat` for asyncio. To cancel it ends its prompts."""
        return await self._arun(await asyncio.to_thread(self._conversations, messages, sampling, options))

    def astream(
        self,
        prompt: Prompt | Conversation,
        sampling: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncStream:
        """`stream` for asyncio; errors come with the first step."""
        return AsyncStream(self, lambda: self._one(prompt, sampling, options))

    def _one(
        self, prompt: Prompt | Conversation, sampling: SamplingParams | None, options: ChatOptions
    ) -> PromptOutputs:
        if is_conversation(prompt):
            [outputs] = self._conversations(prompt, sampling, options)
        elif options:
            raise InvalidRequest(f"{next(iter(options))} is for conversations; give a list of messages", param="prompt")
        else:
            [outputs] = self._plain(cast(Prompt, prompt), sampling)
        return outputs

    def _plain(
        self, prompts: Prompt | Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[PromptOutputs]:
        return self._reader.plain(prompt_list(prompts), sampling or self.default_sampling())

    def _conversations(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: ChatOptions,
    ) -> list[PromptOutputs]:
        default = self.default_sampling(chat=True)
        return self._reader.conversations(conversation_list(messages), sampling or default, options)

    def _run(self, prompts: list[PromptOutputs], use_tqdm: bool | None) -> list[RequestOutput]:
        shown = use_tqdm if use_tqdm is not None else self.config.progress and len(prompts) > 1
        inbox: queue.SimpleQueue[TokenDelta] = queue.SimpleQueue()
        job = _Job(self.engine, prompts)
        with (
            tqdm(total=len(prompts), desc="Generating", unit="prompt", disable=not shown) as bar,
            job.running(inbox.put),
        ):
            while not job.finished:
                grown = job.take(inbox.get())
                if grown is not None and not grown[0].unfinished:
                    bar.update()
        return [prompt.output() for prompt in prompts]

    async def _arun(self, prompts: list[PromptOutputs]) -> list[RequestOutput]:
        inbox: asyncio.Queue[TokenDelta] = asyncio.Queue()
        job = _Job(self.engine, prompts)
        with job.running(_from_thread(inbox)):
            while not job.finished:
                job.take(await inbox.get())
        return [prompt.output() for prompt in prompts]


def _engine_config(values: dict[str, Any]) -> EngineConfig:
    """The configuration of these values. Raises ConfigError if a name is unknown or a value has the wrong type."""
    known = [field.name for field in fields(EngineConfig)]
    for name in values:
        if name not in known:
            close = get_close_matches(name, known)
            raise ConfigError(
                f"LLM knows no {name!r}; {'did you mean' if close else 'it knows'} {', '.join(close or known)}"
            )
    try:
        return msgspec.convert(values, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"a value for LLM has the wrong type: {error}") from None


def _at_the_end_of(stream: object, job: _Job) -> weakref.finalize[..., Any]:
    """Ends a job when nobody holds its stream any more."""
    end = weakref.finalize(stream, job.abort)
    end.atexit = False
    return end


def _from_thread(inbox: asyncio.Queue[TokenDelta]) -> Callable[[TokenDelta], None]:
    """A sink for the engine's thread that fills a queue of the running loop."""
    loop = asyncio.get_running_loop()

    def sink(delta: TokenDelta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(inbox.put_nowait, delta)

    return sink


def _stream_output(prompt: PromptOutputs, growth: Growth) -> StreamOutput:
    output = prompt.output()
    return StreamOutput(
        **msgspec.structs.asdict(output),
        index=growth.sample,
        new_text=growth.added.text,
        new_token_ids=growth.added.token_ids,
    )
