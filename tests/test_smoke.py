"""One real model, end to end, as a newcomer uses it: the first thing to run on a new machine, Python or jax."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import assets
from tokenspeed import LLM, SamplingParams

REFERENCE = json.loads((Path(__file__).parent / "data" / "reference" / "smollm2.json").read_text())["prompts"]

pytestmark = pytest.mark.smoke


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        assets.smollm2(),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        enforce_eager=True,
        progress=False,
    ) as llm:
        yield llm


def test_greedy_ids_are_those_of_transformers(llm: LLM) -> None:
    names = ("raw_capital", "raw_code", "chat")
    prompts = [REFERENCE[name]["prompt_ids"] for name in names]
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    for name, output in zip(names, llm.generate(prompts, greedy), strict=True):
        assert list(output.token_ids) == REFERENCE[name]["output_ids"], name


def test_a_stream_adds_up_to_the_answer(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    [whole] = llm.chat(conversation, greedy)
    assert "Paris" in whole.text
    assert "".join(step.new_text for step in llm.stream(conversation, greedy)) == whole.text


def test_a_seed_decides_alone(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=12)
    [alone] = llm.generate("My favourite colour is", drawn)
    together = llm.generate(["The sea is", "My favourite colour is"], drawn)
    assert together[1].token_ids == alone.token_ids
    assert together[0].token_ids != alone.token_ids
