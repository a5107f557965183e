"""Asks transformers for its answers to every case and keeps them: `python -m tests.oracle.make [case ...]`.

Needs the `oracle` extra. The answers kept here were made by transformers 5.24 on torch 2.13 (CPU, float32, eager).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.oracle import cases
from tests.oracle.cases import DECODE_STEPS, Answers, Case, case_of

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def load(folder: Path) -> Any:
    """The model of a checkpoint, float32.

    Raises:
      ValueError: the checkpoint's names are not exactly those that transformers expects.
    """
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"{folder} does not load as it should: {wrong}")
    return model.eval()


class Session:
    """One sequence in one fresh model: logits of the tokens fed so far, with a cache."""

    def __init__(self, folder: Path, case: Case) -> None:
        self._model = load(folder)
        self._kwargs = dict(case.oracle_kwargs)
        self._cache = None

    def feed(self, ids: np.ndarray) -> np.ndarray:
        """float32 [len(ids), V]: the logits after each of the next tokens."""
        with torch.inference_mode():
            out = self._model(
                torch.tensor(ids[None], dtype=torch.long), cache=self._cache, use_cache=True, **self._kwargs
            )
        self._cache = out.cache
        return out.logits[0].numpy()


def ask(case: Case, folder: Path, prompts: tuple[np.ndarray, ...]) -> Answers:
    """transformers' answers to the prompts from the checkpoint in the folder, one prompt at a time.

    Dynamic NTK scaling takes its base from the length of the sequence: transformers recomputes it in every forward from
    the last position there, and keys already in the cache keep the rotation of their own forward. So the length that
    counts for a token is its prompt's, or that of the sequence up to itself where that is more; an engine that cuts
    a prompt into chunks gets these answers by going by the whole prompt's length in each of them.
    """
    prefill_logits, decode_ids, decode_logits = [], [], []
    for prompt in prompts:
        # A fresh model each: with dynamic rope the model itself remembers the longest length it has seen.
        session = Session(folder, case)
        prefill_logits.append(session.feed(prompt))
        rows, ids = [prefill_logits[-1][-1]], []
        for _ in range(DECODE_STEPS):
            ids.append(rows[-1].argmax())
            rows.append(session.feed(np.array([ids[-1]]))[0])
        decode_ids.append(ids)
        decode_logits.append(rows[1:])
    return Answers(prompts, tuple(prefill_logits), np.array(decode_ids, np.int32), np.array(decode_logits))


def make(name: str) -> Answers:
    """transformers' answers to a case, now."""
    with tempfile.TemporaryDirectory() as folder:
        cases.write_checkpoint(name, Path(folder))
        return ask(case_of(name), Path(folder), cases.prompts(name))


if __name__ == "__main__":
    for name in sys.argv[1:] or cases.CASES:
        cases.save_answers(name, make(name))
        print(f"{name}: {(cases.DATA / f'{name}.npz').stat().st_size / 1024:.0f} KiB")
