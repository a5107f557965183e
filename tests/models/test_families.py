"""Every family against transformers' answers: prefill, chunked prefill and decode, rows of mixed lengths together."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from pallas_kernels import cpu, find, select
from tests.oracle.cases import CASES, Answers, answers, write_checkpoint
from tokenspeed.config import EngineConfig, ModelConfig, environment
from tokenspeed.layers.attention import AttentionKernels, Cache, TokenBatch
from tokenspeed.models import dense
from tokenspeed.weights import load
from tokenspeed.weights.checkpoint import open_checkpoint

PAGE = 16
PAGES_PER_ROW = 5
TOKENS = 80
TOLERANCE = 1e-4


KERNELS = ("xla", "reference", *(("cpu",) if jax.default_backend() == "cpu" else ()))


def _kernels(name: str, head_dim: int) -> AttentionKernels:
    if name == "cpu":
        assert cpu.load(environment().home / "kernels") is None
    case = {
        "platform": jax.default_backend(),
        "dtype": "float32",
        "kv_dtype": "float32",
        "head_dim": head_dim,
        "page_size": PAGE,
    }
    fused = find("attend_qkv", name=name, **case)
    return AttentionKernels(
        attend=select("paged_attention", name="reference" if name == "reference" else "xla", **case).fn,
        write=select("write_kv", name="xla", **case).fn,
        attend_qkv=None if fused is None else fused.fn,
    )


class Forward:
    """Runs rows through the pure forward, each row with pages of its own in a scattered order."""

    def __init__(self, config: ModelConfig, weights: dict[str, jax.Array], kernel: str, rows: int) -> None:
        self.config, self.weights = config, weights
        self.kernels = _kernels(kernel, config.head_dim)
        pages = 1 + rows * PAGES_PER_ROW
        self.table = 1 + np.random.default_rng(0).permutation(pages - 1).reshape(rows, PAGES_PER_ROW).astype(np.int32)
        K, H = config.num_kv_heads, config.head_dim
        # Memory nobody wrote is poison: reading it shows.
        self.cache: Cache = tuple(
            (jnp.full((pages, K, H, PAGE), jnp.nan), jnp.full((pages, K, PAGE, H), jnp.nan))
            for _ in range(config.num_layers)
        )

    def __call__(self, rows: list[tuple[int, np.ndarray, int, int]]) -> list[np.ndarray]:
        """Rows of (row, ids, start position, prompt length) -> each row's logits [len(ids), V]. Two shapes in all."""
        lengths = [len(ids) for _, ids, _, _ in rows]
        decode = all(length == 1 for length in lengths)
        T = B = len(self.table) + 1
        if not decode:
            T = TOKENS

        def flat(parts: list[np.ndarray], size: int) -> np.ndarray:
            joined = np.concatenate(parts).astype(np.int32)
            return np.concatenate([joined, np.zeros(size - len(joined), np.int32)])

        positions = flat([start + np.arange(len(ids)) for _, ids, start, _ in rows], T)
        owners = flat([np.full(len(ids), row) for row, ids, _, _ in rows], T)
        pages = np.where(np.arange(T) < sum(lengths), self.table[owners, positions // PAGE], 0)
        table = np.zeros((B, PAGES_PER_ROW), np.int32)
        table[: len(rows)] = [self.table[row] for row, *_ in rows]
        cu_q_lens = np.full(B + 1, sum(lengths), np.int32)
        cu_q_lens[: len(rows) + 1] = np.cumsum([0, *lengths])
        batch = TokenBatch(
            token_ids=flat([ids for _, ids, _, _ in rows], T),
            positions=positions,
            prompt_lens=flat([np.full(len(ids), prompt) for _, ids, _, prompt in rows], T),
            pages=pages,
            offsets=positions % PAGE,
            page_table=table,
            kv_lens=flat([np.asarray([start + len(ids)]) for _, ids, start, _ in rows], B),
            cu_q_lens=np.arange(B + 1, dtype=np.int32) if decode else cu_q_lens,
            num_seqs=np.asarray([len(rows)], np.int32),
            max_q_len=1 if decode else T,
            kernels=self.kernels,
        )
        logits, self.cache = _run(self.config, self.weights, self.cache, batch)
        return np.split(np.asarray(logits)[: sum(lengths)], np.cumsum(lengths)[:-1])


@partial(jax.jit, static_argnums=0)
def _run(
    config: ModelConfig, weights: dict[str, jax.Array], cache: Cache, batch: TokenBatch
) -> tuple[jax.Array, Cache]:
    hidden, cache = dense.forward(config, weights, cache, batch, jnp.dtype("float32"))
    return dense.logits(config, weights, hidden), cache


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, folder)
    checkpoint = open_checkpoint(folder, EngineConfig(model=str(folder)))
    weights = load.load(
        dense.params(checkpoint.config),
        checkpoint,
        jnp.dtype("float32"),
        SingleDeviceSharding(jax.devices()[0]),
        pack=None,
        progress=False,
    )
    return checkpoint.config, weights, answers(request.param)


def _check_decode(forward: Forward, expected: Answers) -> None:
    prompts = expected.prompts
    for step in range(expected.decode_ids.shape[1]):
        got = forward(
            [
                (row, expected.decode_ids[row, step : step + 1], len(prompt) + step, len(prompt))
                for row, prompt in enumerate(prompts)
            ]
        )
        np.testing.assert_allclose(np.concatenate(got), expected.decode_logits[:, step], atol=TOLERANCE, rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("kernel", KERNELS)
def test_prefill_then_decode_equals_transformers(model: tuple[ModelConfig, dict, Answers], kernel: str) -> None:
    config, weights, expected = model
    forward = Forward(config, weights, kernel, len(expected.prompts))
    got = forward([(row, prompt, 0, len(prompt)) for row, prompt in enumerate(expected.prompts)])
    for logits, wanted in zip(got, expected.prefill_logits, strict=True):
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)
    _check_decode(forward, expected)


def test_chunked_prefill_mixed_with_decode_equals_transformers(model: tuple[ModelConfig, dict, Answers]) -> None:
    """Prompts enter in uneven chunks, one after another, while rows that are through go on decoding."""
    config, weights, expected = model
    forward = Forward(config, weights, "xla", len(expected.prompts))
    steps = [0] * len(expected.prompts)
    for row, prompt in enumerate(expected.prompts):
        for start in range(0, len(prompt), 7):
            chunk = prompt[start : start + 7]
            through = [other for other in range(row) if steps[other] < expected.decode_ids.shape[1]]
            work = [
                (
                    other,
                    expected.decode_ids[other, steps[other] : steps[other] + 1],
                    len(expected.prompts[other]) + steps[other],
                    len(expected.prompts[other]),
                )
                for other in through
            ]
            *decoded, logits = forward([*work, (row, chunk, start, len(prompt))])
            np.testing.assert_allclose(logits, expected.prefill_logits[row][start : start + 7], atol=TOLERANCE, rtol=0)
            for other, got in zip(through, decoded, strict=True):
                np.testing.assert_allclose(got[0], expected.decode_logits[other, steps[other]], atol=TOLERANCE, rtol=0)
                steps[other] += 1
