from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as reference
from gguf.quants import quantize

from tests import assets
from tests.weights.gguf_writing import random_blocks
from tokenspeed.weights.gguf import GGUFFile
from tokenspeed.weights.gguf_blocks import (
    BLOCK_FORMATS,
    QuantizedTensor,
    can_read,
    dequantize,
    row_bytes,
    unpack,
)

UNSIGNED = {"Q4_0": 15, "Q4_1": 15, "Q4_K": 15, "Q5_0": 31, "Q5_1": 31, "Q5_K": 31, "Q6_K": 63}


def restore(packed: QuantizedTensor) -> np.ndarray:
    weights = packed.values.reshape(*packed.scales.shape, packed.group_size) * packed.scales[..., None]
    if packed.offsets is not None:
        weights = weights + packed.offsets[..., None]
    assert weights.dtype == np.float32
    return weights.reshape(packed.values.shape)


@pytest.mark.parametrize("kind", BLOCK_FORMATS, ids=lambda kind: kind.name)
def test_random_blocks_come_out_as_the_reference_has_them(kind: GGMLQuantizationType) -> None:
    form = BLOCK_FORMATS[kind]
    assert (form.size, form.record.itemsize) == GGML_QUANT_SIZES[kind]
    # Rows enough to pass the internal chunk of 262,144 weights, and not a multiple of it.
    raw = random_blocks(kind, form.record, rows=150, blocks=2304 // form.size)
    expected = reference(raw, kind)
    packed = unpack(raw, kind)
    np.testing.assert_array_equal(dequantize(raw, kind), expected)
    np.testing.assert_array_equal(restore(packed), expected)
    assert packed.group_size == (16 if kind.name == "Q6_K" else 32)
    assert packed.values.dtype == np.int8
    assert packed.scales.shape == (150, 2304 // packed.group_size)
    if kind.name in UNSIGNED:
        assert packed.offsets is not None
        assert (packed.values.min(), packed.values.max()) == (0, UNSIGNED[kind.name])
    else:
        assert packed.offsets is None


def test_rows_take_another_order() -> None:
    raw = random_blocks(GGMLQuantizationType.Q4_1, BLOCK_FORMATS[GGMLQuantizationType.Q4_1].record, 6, 2)
    order = np.array([5, 0, 3, 1, 2, 4])
    moved = unpack(raw, GGMLQuantizationType.Q4_1).rows(order)
    np.testing.assert_array_equal(restore(moved), dequantize(raw, GGMLQuantizationType.Q4_1)[order])


@pytest.mark.parametrize("model", [assets.smollm2, assets.gemma3], ids=["smollm2", "gemma3"])
def test_real_tensors_come_out_as_the_reference_has_them(model: Callable[[], Path]) -> None:
    file = GGUFFile(model())
    seen: Counter[str] = Counter()
    for name, info in file.tensors.items():
        if info.kind not in BLOCK_FORMATS or seen[info.kind.name] == 8:
            continue
        raw = file.raw(name)[:512]
        expected = reference(raw, info.kind)
        np.testing.assert_array_equal(dequantize(raw, info.kind), expected, err_msg=name)
        np.testing.assert_array_equal(restore(unpack(raw, info.kind)), expected, err_msg=name)
        seen[info.kind.name] += 1
    assert set(seen) == ({"Q4_1", "Q8_0"} if model is assets.smollm2 else {"Q5_0", "Q8_0", "Q4_K", "Q6_K"})


def test_floats_are_not_copied() -> None:
    raw = np.arange(64, dtype=np.float32).view(np.uint8).reshape(2, -1)
    weights = dequantize(raw, GGMLQuantizationType.F32)
    assert np.shares_memory(raw, weights)
    np.testing.assert_array_equal(weights, np.arange(64, dtype=np.float32).reshape(2, 32))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.BF16, GGMLQuantizationType.F16])
def test_halves_keep_their_dtype(kind: GGMLQuantizationType) -> None:
    values = np.array([[1.5, -2.0, 0.125, 3e-3]], np.float32)
    raw = quantize(values, kind).view(np.uint8)
    found = dequantize(raw, kind)
    assert found.dtype.name == {"BF16": "bfloat16", "F16": "float16"}[kind.name]
    np.testing.assert_allclose(found.astype(np.float32), values, rtol=4e-3)


def test_other_types_are_read_through_the_reference() -> None:
    kind = GGMLQuantizationType.IQ4_NL
    nbytes = row_bytes(kind, 64)
    assert nbytes is not None
    raw = np.random.default_rng(1).integers(0, 60, (3, nbytes), dtype=np.uint8)
    assert can_read(kind)
    np.testing.assert_array_equal(dequantize(raw, kind), reference(raw, kind))


def test_what_cannot_be_read_is_known() -> None:
    assert not can_read(GGMLQuantizationType.Q8_K)
    assert not can_read(GGMLQuantizationType.I32)
    assert row_bytes(GGMLQuantizationType.Q4_K, 128) is None
    assert row_bytes(GGMLQuantizationType.Q4_K, 512) == 288
