"""The kept answers are those that transformers gives today, and every feature of a case shows in them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.oracle import cases

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """tests.oracle.make; imported late, since most runs of the tests have no torch."""
    return importlib.import_module("tests.oracle.make")


@pytest.mark.parametrize("case", cases.CASES)
def test_kept_answers_are_those_of_transformers(make: ModuleType, case: str) -> None:
    kept, live = cases.answers(case), make.make(case)
    np.testing.assert_array_equal(kept.decode_ids, live.decode_ids)
    np.testing.assert_allclose(kept.decode_logits, live.decode_logits, atol=5e-5, rtol=0)
    np.testing.assert_allclose(
        np.concatenate(kept.prefill_logits), np.concatenate(live.prefill_logits), atol=5e-5, rtol=0
    )


FEATURES = [(case, feature) for case in cases.CASES for feature in cases.case_of(case).features]


@pytest.mark.parametrize(("case", "feature"), FEATURES)
def test_a_feature_switched_off_shows(make: ModuleType, tmp_path: Path, case: str, feature: str) -> None:
    definition = cases.case_of(case)
    config = cases.changed(definition.config, definition.features[feature])
    cases.write_config(config, tmp_path)
    kept = cases.answers(case)
    without = make.Session(tmp_path, definition).feed(kept.prompts[-1])
    assert np.abs(without - kept.prefill_logits[-1]).max() > 0.1


def test_the_attention_soft_cap_shows(make: ModuleType, tmp_path: Path) -> None:
    definition = cases.case_of("gemma3_attention_soft_cap")
    cases.write_checkpoint("gemma3_attention_soft_cap", tmp_path)
    kept = cases.answers("gemma3_attention_soft_cap")
    without = make.Session(tmp_path, definition._replace(oracle_kwargs={})).feed(kept.prompts[-1])
    assert np.abs(without - kept.prefill_logits[-1]).max() > 0.1
