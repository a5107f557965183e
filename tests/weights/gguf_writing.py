"""Writes small GGUF models for tests, with the `gguf` package and llama.cpp's conventions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

Tensors = dict[str, np.ndarray]

SIZES = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}


def tensors(seed: int = 0, *, head_dim: int = 16, tied: bool = True) -> Tensors:
    """Random float32 tensors of the sizes above, under GGUF names."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads, kv_heads = 64, 96, 4, 2
    layer = {
        "attn_norm": (hidden,),
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    top = {"token_embd": (50, hidden), "output_norm": (hidden,)} | ({} if tied else {"output": (50, hidden)})
    shapes = top | {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    return {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    architecture: str = "llama",
    settings: Mapping[str, object] | None = None,
    contents: Tensors | None = None,
    packed: Mapping[str, tuple[np.ndarray, GGMLQuantizationType]] | None = None,
    extra: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """A GGUF file.

    Args:
      settings: keys under the architecture's name, beside `SIZES`; None drops one.
      contents: float tensors.
      packed: tensors as rows of bytes, with their type.
      extra: adds more metadata.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in {**SIZES, "attention.layer_norm_rms_epsilon": 1e-5, **(settings or {})}.items():
        name = f"{architecture}.{key}"
        match value:
            case None:
                continue
            case str():
                writer.add_string(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
            case _:
                raise TypeError(f"{name}: {value!r}")
    if extra is not None:
        extra(writer)
    for name, array in (tensors() if contents is None else contents).items():
        writer.add_tensor(name, array)
    for name, (rows, kind) in (packed or {}).items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: GGMLQuantizationType, record: np.dtype, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    """Random packed bytes uint8 [rows, bytes] of a block type, whose half-precision fields are finite."""
    rng = np.random.default_rng((seed, int(kind)))
    raw = rng.integers(0, 256, (rows, blocks * record.itemsize), dtype=np.uint8)
    for field in ("d", "m", "dmin"):
        if field in (record.names or ()):
            raw.reshape(-1).view(record)[field] = rng.normal(size=rows * blocks).astype(np.float16)
    return raw
