"""Real models in float32, through the whole library, against transformers' stored answers, token by token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import assets
from tokenspeed import LLM, SamplingParams

REFERENCE = Path(__file__).parent / "data" / "reference"
TOLERANCE = 2e-3
MODELS: dict[str, Callable[[], Path]] = {
    "smollm2": assets.smollm2,
    "gemma3": assets.gemma3,
    "qwen25c05": assets.qwen25_coder_05b,
    "qwen25c15": assets.qwen25_coder_15b,
}


@pytest.fixture(
    scope="module",
    params=[
        "smollm2",
        "gemma3",
        pytest.param("qwen25c05", marks=pytest.mark.slow),
        pytest.param("qwen25c15", marks=pytest.mark.slow),
    ],
)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, dict[str, Any]]]:
    expected = json.loads((REFERENCE / f"{request.param}.json").read_text())["prompts"]
    # Compiled at first use: of the ladder only what the prompts need.
    with LLM(
        MODELS[request.param](),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enforce_eager=True,
        progress=False,
    ) as llm:
        yield llm, expected


def test_prompts_are_encoded_as_transformers_encodes_them(model: tuple[LLM, dict[str, Any]]) -> None:
    llm, expected = model
    for name, answer in expected.items():
        special = not name.startswith("chat")
        assert llm.tokenizer.encode(answer["text"], add_special_tokens=special) == answer["prompt_ids"], name


def test_greedy_ids_and_log_probabilities(model: tuple[LLM, dict[str, Any]]) -> None:
    """All prompts at once: 32 ids each, past the end of sequence; five best log-probabilities of the first 8 steps."""
    llm, expected = model
    greedy = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
    outputs = llm.generate([answer["prompt_ids"] for answer in expected.values()], greedy)
    for (name, answer), output in zip(expected.items(), outputs, strict=True):
        assert list(output.token_ids) == answer["output_ids"], name
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        for step, (wanted, got) in enumerate(zip(answer["top5_logprobs_first8"], logprobs, strict=False)):
            told = dict(zip(got.top_ids, got.top_logprobs, strict=True))
            for token_id, logprob in wanted:
                # Two that are as good as equal may change places at the end of the list.
                if token_id in told:
                    assert told[token_id] == pytest.approx(logprob, abs=TOLERANCE), (name, step, token_id)
                else:
                    assert min(told.values()) == pytest.approx(logprob, abs=TOLERANCE), (name, step, token_id)
