"""The library's front door, over a real engine whose device is a fake."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tests.engine.fake import EOS, VOCAB, FakeRunner, continuation, limits
from tests.fake_llm import TOKENIZER, Made, make
from tokenspeed import LLM, SamplingParams
from tokenspeed.config import GenerationDefaults
from tokenspeed.engine.client import ThreadEngine
from tokenspeed.llm import StreamOutput
from tokenspeed.loading import ModelText
from tokenspeed.text.requests import make_requests
from tokenspeed.types import ConfigError, EngineDead, InvalidRequest, RequestOutput

SEEDED = SamplingParams(seed=5, max_tokens=12)
LONG = SamplingParams(seed=5, max_tokens=80, ignore_eos=True)


@pytest.fixture
def made() -> Iterator[Made]:
    made = make()
    with made.llm:
        yield made


@pytest.fixture
def slow() -> Iterator[Made]:
    made = make(slow=True)
    with made.llm:
        yield made


def expected(prompt: str | Sequence[int], sampling: SamplingParams) -> list[list[int]]:
    """The ids of each sample, by the fake model alone."""
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else list(prompt)
    made = make_requests("r", ids, sampling, limits=limits(), eos_ids=(EOS,))
    return [continuation(request, limits().max_model_len)[0] for request in made]


def ids_of(output: RequestOutput) -> list[list[int]]:
    return [list(sample.token_ids) for sample in output.outputs]


def settled(engine: ThreadEngine) -> bool:
    """Whether the engine comes to rest soon."""
    end = time.monotonic() + 5
    while engine.num_unfinished and time.monotonic() < end:
        time.sleep(0.002)
    return engine.num_unfinished == 0


def longest(runner: FakeRunner) -> int:
    """The longest context that was computed, in tokens."""
    return max((int(schedule.kv_lens.max()) for schedule in runner.schedules), default=0)


# Generate


@pytest.mark.parametrize("prompt", ["hello", [5, 6, 7], (5, 6, 7), np.array([5, 6, 7])])
def test_one_prompt_in_any_form(made: Made, prompt: str | Sequence[int]) -> None:
    [output] = made.llm.generate(prompt, SEEDED)
    ids = expected(prompt, SEEDED)
    assert ids_of(output) == ids
    assert output.finished
    assert output.prompt == (prompt if isinstance(prompt, str) else None)
    assert output.text == TOKENIZER.decode(ids[0])
    assert output.usage.prompt_tokens == len(prompt)
    assert output.usage.completion_tokens == len(ids[0])
    assert output.outputs[0].finish_reason == ("stop" if ids[0][-1] == EOS else "length")


def test_many_prompts_keep_their_order_and_their_own_sampling(made: Made) -> None:
    prompts = [*(f"prompt {k}" for k in range(20)), [3, 4], "last"]
    sampling = [SamplingParams(seed=k, max_tokens=1 + k % 15) for k in range(22)]
    outputs = made.llm.generate(prompts, sampling)
    assert [ids_of(output) for output in outputs] == [
        expected(prompt, how) for prompt, how in zip(prompts, sampling, strict=True)
    ]


def test_no_prompts_no_outputs(made: Made) -> None:
    assert made.llm.generate([]) == []
    assert made.llm.chat([]) == []


def test_samples_differ_by_their_seed(made: Made) -> None:
    sampling = SamplingParams(seed=5, n=3, max_tokens=12)
    [output] = made.llm.generate("hello", sampling)
    assert ids_of(output) == expected("hello", sampling)
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert len({sample.token_ids for sample in output.outputs}) == 3
    assert output.usage.completion_tokens == sum(map(len, ids_of(output)))
    assert output.usage.prompt_tokens == 5


def test_greedy_samples_run_once(made: Made) -> None:
    [output] = made.llm.generate("hello", SamplingParams(temperature=0.0, n=3, max_tokens=4, ignore_eos=True))
    first, *others = output.outputs
    assert [(other.index, other.token_ids, other.text) for other in others] == [
        (k, first.token_ids, first.text) for k in (1, 2)
    ]
    assert output.usage.completion_tokens == 12
    assert max(schedule.num_rows for schedule in made.runner.schedules) == 1


def test_logprobs_of_output_and_prompt(made: Made) -> None:
    [output] = made.llm.generate("hello", SamplingParams(seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1))
    [sample] = output.outputs
    assert sample.logprobs is not None
    assert [len(entry.top_ids) for entry in sample.logprobs] == [2] * len(sample.token_ids)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [entry is not None and len(entry.top_ids) for entry in output.prompt_logprobs[1:]] == [1] * 4
    [plain] = made.llm.generate("hello", SEEDED)
    assert (plain.outputs[0].logprobs, plain.prompt_logprobs) == (None, None)


def test_a_prompt_can_be_scored_alone(made: Made) -> None:
    [output] = made.llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (output.text, output.outputs[0].finish_reason) == ("", "length")
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 5


def test_cached_tokens_are_told(made: Made) -> None:
    prompt = "a prompt of some length"
    [first], [second] = made.llm.generate(prompt, SEEDED), made.llm.generate(prompt, SEEDED)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, len(prompt) // 4 * 4)
    assert first.token_ids == second.token_ids


def test_a_stop_string_ends_the_text_and_the_request(made: Made, slow: Made) -> None:
    [whole] = made.llm.generate("hello", LONG)
    stop = whole.text[4:6]
    [output] = slow.llm.generate("hello", SamplingParams(seed=5, max_tokens=80, ignore_eos=True, stop=(stop,)))
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert settled(slow.engine)
    assert int(slow.runner.schedules[-1].kv_lens[0]) < 60


# Defaults and validation


def test_defaults_are_the_models_and_then_ours() -> None:
    with make(defaults=GenerationDefaults(temperature=0.25, top_k=7)).llm as llm:
        assert llm.default_sampling() == SamplingParams(temperature=0.25, top_k=7, max_tokens=16)
        assert llm.default_sampling(chat=True) == SamplingParams(temperature=0.25, top_k=7, max_tokens=None)
    with make(defaults=GenerationDefaults(max_new_tokens=9)).llm as llm:
        assert {llm.default_sampling(chat=chat).max_tokens for chat in (False, True)} == {9}


def test_calls_without_sampling_use_the_defaults() -> None:
    with make(defaults=GenerationDefaults(temperature=0.0)).llm as llm:
        [plain] = llm.generate([2] * 30)
        assert len(plain.token_ids) == 16 or plain.token_ids[-1] == EOS
        [answer] = llm.chat([{"role": "user", "content": "hi"}])
        assert answer.outputs[0].finish_reason == "stop" or answer.usage.total_tokens == limits().max_model_len


def test_max_tokens_is_clamped_to_the_context(made: Made) -> None:
    [output] = made.llm.generate([3] * 90, SamplingParams(seed=1, max_tokens=1000, ignore_eos=True))
    assert (output.usage.total_tokens, output.outputs[0].finish_reason) == (limits().max_model_len, "length")


@pytest.mark.parametrize(
    ("bad", "message", "code"),
    [
        ("", "must not be empty", None),
        ([], "must not be empty", None),
        ([3, VOCAB], f"token id {VOCAB}", None),
        ([3, -1], "token id -1", None),
        ([3, 4.5], "text or a list of token ids", None),
        ([3] * 96, "maximum context length is 96 tokens", "context_length_exceeded"),
    ],
)
def test_nothing_starts_if_one_prompt_is_wrong(made: Made, bad: Any, message: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        made.llm.generate(["good", bad], SEEDED)
    assert caught.value.code == code
    assert made.runner.schedules == []
    assert made.engine.num_unfinished == 0


def test_sampling_must_be_one_or_one_each(made: Made) -> None:
    with pytest.raises(InvalidRequest, match="2 SamplingParams were given for 3 prompts"):
        made.llm.generate(["a", "b", "c"], [SEEDED, SEEDED])
    with pytest.raises(InvalidRequest, match="logit_bias names token id 61"):
        made.llm.generate("a", SamplingParams(logit_bias={VOCAB: 1.0}))


def test_unknown_settings_are_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="LLM knows no 'max_modle_len'; did you mean max_model_len"):
        LLM("nowhere", max_modle_len=8)
    with pytest.raises(ConfigError, match="LLM knows no 'quux'; it knows model, tokenizer, "):
        LLM("nowhere", quux=8)
    with pytest.raises(ConfigError, match=r"wrong type: Expected `int \| null`, got `str` - at `\$.max_model_len`"):
        LLM("nowhere", max_model_len="8k")
    with pytest.raises(ConfigError, match="--block-size must be"):
        LLM("nowhere", page_size=8)


def test_what_is_no_model_is_named() -> None:
    with pytest.raises(ConfigError, match="--model nowhere is none of the things"):
        LLM("nowhere")


# Chat


def test_conversations_are_rendered(made: Made) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "yo"}]
    [output] = made.llm.chat(messages, SEEDED, tools=tools, chat_template_kwargs={"thinks": 1})
    assert output.prompt == "u hi b yo T1 K1 A "
    assert ids_of(output) == expected("u hi b yo T1 K1 A ", SEEDED)
    [output] = made.llm.chat(messages, SEEDED, continue_final_message=True)
    assert output.prompt == "u hi b yo"
    with pytest.raises(InvalidRequest, match="cannot both be true"):
        made.llm.chat(messages, SEEDED, continue_final_message=True, add_generation_prompt=True)


def test_many_conversations(made: Made) -> None:
    conversations = [[{"role": "user", "content": f"number {k}"}] for k in range(5)]
    outputs = made.llm.chat(conversations, SEEDED)
    assert [output.prompt for output in outputs] == [f"u number {k} A " for k in range(5)]


def test_a_model_without_template_cannot_chat() -> None:
    made = make()
    text = ModelText(TOKENIZER, None, GenerationDefaults(), (EOS,))
    with LLM.over(text, made.engine) as llm:
        assert not llm.can_chat
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat([{"role": "user", "content": "hi"}])


# Streams


def test_a_stream_is_the_output_in_pieces(made: Made) -> None:
    [whole] = made.llm.generate("hello", SEEDED)
    steps = list(made.llm.stream("hello", SEEDED))
    assert "".join(step.new_text for step in steps) == steps[-1].text == whole.text
    assert [i for step in steps for i in step.new_token_ids] == list(whole.token_ids)
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    assert all(step.text == "".join(s.new_text for s in steps[: k + 1]) for k, step in enumerate(steps))
    assert steps[-1].outputs == whole.outputs


def test_a_stream_of_samples_says_which_grew(made: Made) -> None:
    sampling = SamplingParams(seed=5, n=3, max_tokens=12)
    texts, last = ["", "", ""], None
    for step in made.llm.stream("hello", sampling):
        texts[step.index] += step.new_text
        last = step
    assert last is not None
    assert texts == [sample.text for sample in last.outputs]
    assert ids_of(last) == expected("hello", sampling)


def test_a_conversation_can_be_streamed(made: Made) -> None:
    *_, last = made.llm.stream([{"role": "user", "content": "hi"}], SEEDED, add_generation_prompt=False)
    assert last.prompt == "u hi "
    with pytest.raises(InvalidRequest, match="add_generation_prompt is for conversations"):
        made.llm.stream("hi", SEEDED, add_generation_prompt=False)


def test_a_stream_fails_when_it_is_made(made: Made) -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        made.llm.stream("")


def leave_by_break(llm: LLM) -> None:
    for _ in llm.stream("hello", LONG):
        break


def leave_by_close(llm: LLM) -> None:
    stream = llm.stream("hello", LONG)
    next(stream)
    stream.close()
    assert list(stream) == []


def leave_by_with(llm: LLM) -> None:
    with llm.stream("hello", LONG) as stream:
        next(stream)


def leave_by_error(llm: LLM) -> None:
    def fail() -> None:
        for step in llm.stream("hello", LONG):
            raise ZeroDivisionError(step.text)

    with pytest.raises(ZeroDivisionError):
        fail()


def leave_before_the_first_step(llm: LLM) -> None:
    llm.stream("hello", LONG)


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_close, leave_by_with, leave_by_error, leave_before_the_first_step]
)
def test_who_leaves_a_stream_ends_its_request(slow: Made, leave: Any) -> None:
    leave(slow.llm)
    assert settled(slow.engine)
    assert longest(slow.runner) < 60


def test_several_streams_at_once(made: Made) -> None:
    streams = [made.llm.stream(f"prompt {k}", SEEDED) for k in range(4)]
    last = [list(stream)[-1] for stream in streams]
    assert [ids_of(step) for step in last] == [expected(f"prompt {k}", SEEDED) for k in range(4)]


# Interrupts


def interrupt_soon(after: float = 0.05) -> None:
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()


def test_an_interrupt_ends_generate_and_leaves_the_llm(slow: Made) -> None:
    interrupt_soon()
    with pytest.raises(KeyboardInterrupt):
        slow.llm.generate(["one", "two", "three"], LONG)
    assert settled(slow.engine)
    assert longest(slow.runner) < 60
    [output] = slow.llm.generate("hello", SEEDED)
    assert ids_of(output) == expected("hello", SEEDED)


def test_an_interrupt_ends_a_stream_and_leaves_the_llm(slow: Made) -> None:
    interrupt_soon()
    steps: list[StreamOutput] = []
    with pytest.raises(KeyboardInterrupt):
        steps.extend(slow.llm.stream("hello", LONG))
    assert settled(slow.engine)
    assert longest(slow.runner) < 60
    [output] = slow.llm.generate("hello", SEEDED)
    assert ids_of(output) == expected("hello", SEEDED)


# asyncio


def test_async_twins_give_the_same(made: Made) -> None:
    async def main() -> None:
        outputs = await made.llm.agenerate(["one", "two"], SEEDED)
        assert [ids_of(output) for output in outputs] == [expected("one", SEEDED), expected("two", SEEDED)]
        [answer] = await made.llm.achat([{"role": "user", "content": "hi"}], SEEDED, tools=[{"function": {}}])
        assert answer.prompt == "u hi T1 A "
        steps = [step async for step in made.llm.astream("one", SEEDED)]
        assert ids_of(steps[-1]) == expected("one", SEEDED)
        assert "".join(step.new_text for step in steps) == steps[-1].text

    asyncio.run(main())


def test_many_tasks_at_once(made: Made) -> None:
    async def main() -> None:
        outputs = await asyncio.gather(*(made.llm.agenerate(f"task {k}", SEEDED) for k in range(30)))
        assert [ids_of(output) for [output] in outputs] == [expected(f"task {k}", SEEDED) for k in range(30)]

    asyncio.run(main())


def test_plain_calls_work_inside_a_running_loop(made: Made) -> None:
    async def main() -> None:
        [output] = made.llm.generate("hello", SEEDED)
        assert ids_of(output) == expected("hello", SEEDED)
        *_, last = made.llm.stream("hello", SEEDED)
        assert ids_of(last) == expected("hello", SEEDED)

    asyncio.run(main())


def test_a_cancelled_task_ends_its_requests(slow: Made) -> None:
    async def main() -> None:
        task = asyncio.create_task(slow.llm.agenerate(["one", "two"], LONG))
        await asyncio.sleep(0.05)
        assert slow.engine.num_unfinished == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert settled(slow.engine)

    asyncio.run(main())
    assert longest(slow.runner) < 60


def test_who_leaves_an_async_stream_ends_its_request(slow: Made) -> None:
    async def main() -> None:
        async for _ in slow.llm.astream("hello", LONG):
            break
        assert settled(slow.engine)
        async with slow.llm.astream("hello", LONG) as stream:
            await anext(stream)
        assert settled(slow.engine)
        assert [step async for step in stream] == []

    asyncio.run(main())
    assert longest(slow.runner) < 60


def test_an_async_stream_fails_with_its_first_step(made: Made) -> None:
    async def main() -> None:
        stream = made.llm.astream("")
        with pytest.raises(InvalidRequest, match="must not be empty"):
            await anext(stream)

    asyncio.run(main())


# Life and death


def test_a_closed_llm_says_so(made: Made) -> None:
    made.llm.close()
    made.llm.close()
    with pytest.raises(EngineDead, match="closed"):
        made.llm.generate("hello", SEEDED)


def test_to_close_ends_what_runs(slow: Made) -> None:
    stream = slow.llm.stream("hello", LONG)
    next(stream)
    slow.llm.close()
    *_, last = stream
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
    assert last.text == "".join(TOKENIZER.decode(last.token_ids))


@pytest.mark.parametrize("use", ["close", "forget", "with", "stream"])
def test_what_it_holds_is_freed_without_a_garbage_collection(use: str) -> None:
    made = make()
    llm, runner, thread = made.llm, weakref.ref(made.runner), made.engine._thread  # pyright: ignore[reportPrivateUsage]
    del made
    gc.collect()
    gc.disable()
    try:
        llm.generate("hello", SEEDED)
        if use == "close":
            llm.close()
        elif use == "with":
            with llm:
                pass
        elif use == "stream":
            next(llm.stream("hello", LONG))
        if use in ("forget", "stream"):
            del llm
        assert not thread.is_alive()
        assert runner() is None
    finally:
        gc.enable()


def test_a_stream_keeps_its_model_open() -> None:
    stream = make().llm.stream("hello", SEEDED)
    assert ids_of(list(stream)[-1]) == expected("hello", SEEDED)


def test_the_death_of_the_engine_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    made = make(fail_at=3)
    with pytest.raises(EngineDead, match="on fire"):
        made.llm.generate(["one", "two"], LONG)
    with pytest.raises(EngineDead, match="on fire"):
        made.llm.generate("again", SEEDED)


def test_threads_may_share_it(made: Made) -> None:
    results: dict[int, list[list[int]]] = {}

    def work(k: int) -> None:
        [output] = made.llm.generate(f"thread {k}", SEEDED)
        results[k] = ids_of(output)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {k: expected(f"thread {k}", SEEDED) for k in range(12)}


# What else it tells


def test_progress_is_shown_for_several_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with make(progress=True).llm as llm:
        llm.generate("one", SEEDED)
        assert capsys.readouterr().err == ""
        llm.generate(["one", "two"], SEEDED)
        assert "2/2" in capsys.readouterr().err
        llm.generate(["one", "two"], SEEDED, use_tqdm=False)
        assert capsys.readouterr().err == ""
        llm.generate("one", SEEDED, use_tqdm=True)
        assert "1/1" in capsys.readouterr().err


def test_it_shows_its_parts(made: Made) -> None:
    assert made.llm.tokenizer is made.llm.get_tokenizer() is TOKENIZER
    assert made.llm.limits == limits()
    assert made.llm.can_chat
    made.llm.generate("hello", SEEDED)
    assert made.llm.stats().num_steps > 0
