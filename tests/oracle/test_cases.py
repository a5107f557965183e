"""The kept answers are worth comparing with: complete, in the vocabulary, and no greedy choice a near tie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from tests.oracle import cases

MARGIN = 1e-3
"""Least distance between the two largest logits of a greedy choice; engines agree within 1e-4."""


@pytest.mark.parametrize("case", cases.CASES)
def test_answers_are_greedy_and_never_a_near_tie(case: str) -> None:
    kept = cases.answers(case)
    vocab_size = cases.case_of(case).config["vocab_size"]
    assert kept.decode_logits.shape == (len(kept.prompts), cases.DECODE_STEPS, vocab_size)
    assert kept.decode_ids.shape == kept.decode_logits.shape[:2]
    for prompt, prefill, ids, decode in zip(
        kept.prompts, kept.prefill_logits, kept.decode_ids, kept.decode_logits, strict=True
    ):
        assert prefill.shape == (len(prompt), vocab_size)
        assert 0 <= prompt.min() <= prompt.max() < vocab_size
        rows = np.concatenate([prefill[-1:], decode])
        np.testing.assert_array_equal(rows[:-1].argmax(axis=-1), ids)
        second, first = np.sort(rows, axis=-1)[:, -2:].T
        assert (first - second).min() > MARGIN


def test_every_kept_file_is_a_case() -> None:
    assert {path.stem for path in cases.DATA.iterdir()} == set(cases.CASES)


@pytest.mark.parametrize("case", cases.CASES)
def test_prompts_pass_windows_and_original_contexts(case: str) -> None:
    config = cases.case_of(case).config
    scaling = config.get("rope_scaling") or {}
    longest = max(cases.PROMPT_LENGTHS)
    assert longest > (config.get("sliding_window") or 0)
    if scaling.get("rope_type") == "dynamic":
        assert longest > config["max_position_embeddings"]
    if "yarn" in (scaling.get("rope_type"), scaling.get("type")):
        assert longest > scaling["original_max_position_embeddings"]


def test_a_checkpoint_is_in_hugging_face_layout_and_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        cases.write_checkpoint("qwen2", tmp_path / folder)
    first, second = ((tmp_path / folder / "model.safetensors").read_bytes() for folder in ("a", "b"))
    assert first == second
    assert json.loads((tmp_path / "a" / "config.json").read_text())["model_type"] == "qwen2"
    with safe_open(tmp_path / "a" / "model.safetensors", framework="numpy") as file:
        names = set(file.keys())
        np.testing.assert_allclose(file.get_tensor("model.norm.weight")[:3], [1.214694, 0.526405, 1.226072], atol=1e-6)
    assert "model.layers.1.self_attn.v_proj.bias" in names
    assert "lm_head.weight" not in names
