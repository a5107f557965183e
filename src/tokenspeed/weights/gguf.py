"""GGUF files: the container (metadata and memory-mapped tensors), and the models in it under Hugging Face names."""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf.constants import GGMLQuantizationType

from tokenspeed.config import GenerationDefaults, ModelConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights.config_json import Fields, model_config
from tokenspeed.weights.gguf_blocks import (
    BLOCK_FORMATS,
    QuantizedTensor,
    can_read,
    dequantize,
    row_bytes,
    unpack,
)

MetadataValue = bool | int | float | str | list[str] | np.ndarray

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    kind: struct.Struct(f"<{code}")
    for kind, code in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where a tensor lies."""

    shape: tuple[int, ...]
    """Row-major: the last axis is contiguous (GGUF stores it reversed)."""
    kind: GGMLQuantizationType
    start: int
    """Of its first byte, from the file's beginning."""
    nbytes: int


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.at = 0

    def need(self, nbytes: int) -> int:
        """Steps over `nbytes` and returns where they begin."""
        start, self.at = self.at, self.at + nbytes
        if self.at > len(self.data):
            raise ConfigError(f"{self.name} is cut off inside its header; download it again")
        return start

    def number(self, form: struct.Struct) -> int:
        return form.unpack_from(self.data, self.need(form.size))[0]

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """`count` strings. A vocabulary has hundreds of thousands, so this loop holds nothing but locals."""
        data, at, length_of, found = self.data, self.at, _U64.unpack_from, list[str]()
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_of(data, at)[0]
                found.append(data[start:at].decode())
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ConfigError(
                f"{self.name} is damaged: a text in its header cannot be read; download it again"
            ) from error
        self.need(at - self.at)
        return found

    def value(self, key: str) -> MetadataValue:
        kind = self.number(_U32)
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(key)
        return self.number(self._scalar(key, kind))

    def _scalar(self, key: str, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise ConfigError(f"{self.name} is damaged: {key} is of the unknown type {kind}; download it again")
        return _SCALARS[kind]

    def _array(self, key: str) -> MetadataValue:
        kind, count = self.number(_U32), self.number(_U64)
        if kind == _STRING:
            return self.texts(count)
        form = self._scalar(key, kind)
        start = self.need(count * form.size)
        return np.frombuffer(self.data, np.dtype(form.format), count, start)


class GGUFFile:
    """An open GGUF container (version 2 or 3, little-endian). Tensors are memory-mapped and read when asked for.

    Args:
      path: the file.
      header_only: accept a file whose tensor data is missing or cut off.

    Raises:
      ConfigError: the file is missing, foreign, damaged or cut off; or of a version or tensor type that is not supported.
    """

    path: Path
    metadata: dict[str, MetadataValue]
    """Arrays of strings are lists; other arrays are numpy."""
    tensors: dict[str, TensorInfo]

    def __init__(self, path: Path, *, header_only: bool = False) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ConfigError(f"{path} cannot be read: {error}") from error
        cursor = _Cursor(self._data, str(path))
        num_tensors, num_keys = self._read_head(cursor)
        self.metadata = {(key := cursor.text()): cursor.value(key) for _ in range(num_keys)}
        self.tensors = self._read_tensors(cursor, num_tensors)
        if not header_only:
            self._check_extents()

    def _read_head(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != b"GGUF":
            raise ConfigError(f"{self.path} is not a GGUF file: it begins with {self._data[:4]!r} instead of b'GGUF'")
        cursor.need(4)
        version = cursor.number(_U32)
        if version not in (2, 3):
            big_endian = version in (2 << 24, 3 << 24)
            what = "big-endian" if big_endian else f"of version {version}"
            raise ConfigError(
                f"{self.path} is a GGUF file {what}; little-endian ones of versions 2 and 3 are supported"
            )
        return cursor.number(_U64), cursor.number(_U64)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, TensorInfo]:
        found = {(name := cursor.text()): self._read_tensor(cursor, name) for _ in range(count)}
        alignment = Fields(self.metadata, str(self.path)).get("general.alignment", int) or 32
        base = -(-cursor.at // alignment) * alignment
        return {name: info._replace(start=base + info.start) for name, info in found.items()}

    def _read_tensor(self, cursor: _Cursor, name: str) -> TensorInfo:
        rank = cursor.number(_U32)
        if rank > 4:
            raise ConfigError(f"{self.path} is damaged: {name} has {rank} dimensions; download it again")
        shape = tuple(reversed([cursor.number(_U64) for _ in range(rank)])) or (1,)
        kind_id = cursor.number(_U32)
        if kind_id not in set(GGMLQuantizationType):
            raise ConfigError(f"{self.path} stores {name} in the unknown tensor type {kind_id}, which is not supported")
        kind = GGMLQuantizationType(kind_id)
        nbytes = row_bytes(kind, shape[-1])
        if nbytes is None:
            raise ConfigError(
                f"{self.path} is damaged: rows of {name} ({shape[-1]}) are not whole blocks of {kind.name}"
            )
        for size in shape[:-1]:
            nbytes *= size
        return TensorInfo(shape, kind, cursor.number(_U64), nbytes)

    def _check_extents(self) -> None:
        for name, info in self.tensors.items():
            end = info.start + info.nbytes
            if end > len(self._data):
                raise ConfigError(
                    f"{self.path} is cut off: {name} ends at byte {end}, but the file has {len(self._data)}; download it again"
                )

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes, uint8 [rows, row bytes], mapped and read-only; rows are all axes but the last."""
        info = self.tensors[name]
        nbytes = row_bytes(info.kind, info.shape[-1])
        return np.frombuffer(self._data, np.uint8, info.nbytes, info.start).reshape(-1, nbytes or 1)


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
"""Tokens that end a turn in the chat templates of these families; files often name only the end of a document."""
_CONTROL = 3
"""In `tokenizer.ggml.token_type`."""


def _hf_name(name: str, layer_names: Mapping[str, str]) -> str:
    """The Hugging Face name of a GGUF tensor; its own name if it has none, so that a loader can call it unexpected."""
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in layer_names:
        return _TOP.get(name, name)
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _end_ids(fields: Fields) -> list[int]:
    """End-of-sequence ids: those the file names, and for a chat model the control tokens that end a turn."""
    named = (fields.get(f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom"))
    ids = [token_id for token_id in named if token_id is not None]
    tokens, kinds = fields.texts("tokenizer.ggml.tokens"), fields.raw("tokenizer.ggml.token_type")
    if fields.raw("tokenizer.chat_template") and tokens and isinstance(kinds, np.ndarray):
        found = (tokens.index(text) for text in _TURN_ENDS if text in tokens)
        ids += [token_id for token_id in found if kinds[token_id] == _CONTROL]
    return list(dict.fromkeys(ids))


def _llama3_scaling(factors: np.ndarray, theta: float, source: str) -> dict[str, object]:
    """The `llama3` scaling whose divisors of the frequencies are `factors`, float32 [head_dim / 2].

    llama.cpp stores the divisors and not the four numbers they were made from. Between the two cut-offs 1 / divisor is
    linear in the frequency, which gives the cut-offs back; only their ratios to the original context count, so
    low_freq_factor is taken as 1, as in every published model.

    Raises:
      ConfigError: the divisors are of another form.
    """
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    factor, original, high = float(factors.max()), 8192.0, 4.0
    between = (factors > 1.0 + 1e-6) & (factors < factor * (1 - 1e-6))
    if between.sum() >= 2:
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, intercept = np.polyfit(frequencies[between] / (2 * np.pi), smooth, 1)
        high = 1 - 1 / float(intercept)
        original = float(slope) * (high - 1)
    high, original = round(high, 3), round(original)
    smooth = np.clip((original * frequencies / (2 * np.pi) - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise ConfigError(
            f"{source} scales RoPE by {_ROPE_FACTORS} in a form other than llama3's, which is not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _yarn_scaling(fields: Fields, prefix: str, factor: float) -> dict[str, object]:
    fields.refuse(f"{prefix}.yarn_ext_factor", 1.0, -1.0)
    fields.refuse(f"{prefix}.yarn_log_multiplier", 0.0)
    attention = fields.get(f"{prefix}.attn_factor", float) or fields.get(f"{prefix}.yarn_attn_factor", float) or 1.0
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.get(f"{prefix}.original_context_length", int),
        "beta_fast": fields.get(f"{prefix}.yarn_beta_fast", float),
        "beta_slow": fields.get(f"{prefix}.yarn_beta_slow", float),
        "attention_factor": attention * (1 + 0.1 * float(np.log(max(factor, 1.0)))),
    }


class GGUFCheckpoint:
    """A model in a GGUF file; a `Checkpoint`.

    llama.cpp permutes the rows of llama's query and key projections and adds one to Gemma's norm weights; both are
    undone here.
    """

    def __init__(self, path: Path, overrides: Mapping[str, object], *, header_only: bool = False) -> None:
        self.path = path
        self.file = GGUFFile(path, header_only=header_only)
        self._fields = Fields(self.file.metadata, str(path))
        self._arch = self._fields.require("general.architecture", str)
        if self._arch not in _ARCHITECTURES:
            raise ConfigError(
                f"{path} holds a model of architecture {self._arch!r}, which is not supported; "
                f"supported are {', '.join(_ARCHITECTURES)}"
            )
        self._fields.refuse("split.count", 0, 1)
        layer_names = _GEMMA_LAYER if self._arch == "gemma3" else _LAYER
        self._stored = {_hf_name(name, layer_names): name for name in self.file.tensors if name != _ROPE_FACTORS}
        self._check_types()
        config = model_config(self._config_values(), source=str(path), overrides=overrides, name_or_path=str(path))
        self.config: ModelConfig = replace(config, attention_output_bias="blk.0.attn_output.bias" in self.file.tensors)
        self.generation: GenerationDefaults = self._generation_defaults()

    def _check_types(self) -> None:
        kinds = {info.kind: name for name, info in self.file.tensors.items()}
        for kind, name in kinds.items():
            if not can_read(kind):
                raise ConfigError(f"{self.path} stores {name} as {kind.name}, which is not supported")

    def _own(self, key: str) -> str:
        return f"{self._arch}.{key}"

    def _config_values(self) -> dict[str, object]:
        """What config.json would say of this model."""
        fields, own, tensors = self._fields, self._own, self.file.tensors
        fields.refuse(own("expert_count"), 0)
        embedding = tensors.get("token_embd.weight")
        if embedding is None:
            raise ConfigError(f"{self.path} has no tensor token_embd.weight; it is incomplete or not a language model")
        num_heads, hidden = (
            fields.require(own("attention.head_count"), int),
            fields.require(own("embedding_length"), int),
        )
        head_dim = fields.get(own("attention.key_length"), int) or hidden // max(num_heads, 1)
        for key in ("attention.value_length", "rope.dimension_count"):
            fields.refuse(own(key), head_dim)
        dtype = {"F16": "float16", "BF16": "bfloat16"}.get(embedding.kind.name, "float32")
        values: dict[str, object] = {
            "architectures": [_ARCHITECTURES[self._arch]],
            "vocab_size": embedding.shape[0],
            "hidden_size": hidden,
            "intermediate_size": fields.require(own("feed_forward_length"), int),
            "num_hidden_layers": fields.require(own("block_count"), int),
            "num_attention_heads": num_heads,
            "num_key_value_heads": fields.get(own("attention.head_count_kv"), int),
            "head_dim": head_dim,
            "max_position_embeddings": fields.require(own("context_length"), int),
            "rms_norm_eps": fields.require(own("attention.layer_norm_rms_epsilon"), float),
            "rope_theta": fields.get(own("rope.freq_base"), float) or 1e4,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "dtype": dtype,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": _end_ids(fields),
        }
        values["rope_scaling"] = self._rope_scaling(float(str(values["rope_theta"])))
        if self._arch == "gemma3":
            values |= self._gemma_values(num_heads, hidden, head_dim)
        elif self._arch == "llama" and (window := fields.get(own("attention.sliding_window"), int)):
            values |= {"architectures": ["MistralForCausalLM"], "sliding_window": window}
        return values

    def _gemma_values(self, num_heads: int, hidden: int, head_dim: int) -> dict[str, object]:
        fields, own = self._fields, self._own
        scale = fields.get(own("attention.scale"), float)
        # The 27B model, told by its 62 layers as in llama.cpp, scales by its width and not by its head size.
        is_27b = fields.get(own("block_count"), int) == 62
        pattern = fields.raw(own("attention.sliding_window_pattern"))
        values: dict[str, object] = {
            "sliding_window": fields.require(own("attention.sliding_window"), int),
            "rope_local_base_freq": fields.get(own("rope.freq_base_swa"), float) or 1e4,
            "query_pre_attn_scalar": scale**-2 if scale else hidden / num_heads if is_27b else head_dim,
            "final_logit_softcapping": fields.get(own("final_logit_softcapping"), float),
            "attn_logit_softcapping": fields.get(own("attn_logit_softcapping"), float),
        }
        if isinstance(pattern, np.ndarray):
            values["layer_types"] = ["sliding_attention" if local else "full_attention" for local in pattern]
        elif pattern is not None:
            values["sliding_window_pattern"] = pattern
        return values

    def _rope_scaling(self, theta: float) -> dict[str, object] | None:
        fields, prefix = self._fields, self._own("rope.scaling")
        kind = fields.get(f"{prefix}.type", str) or "none"
        factor = fields.get(f"{prefix}.factor", float) or 0.0
        linear = fields.get(self._own("rope.scale_linear"), float) or factor
        if kind == "none" and _ROPE_FACTORS in self.file.tensors:
            factors = self._floats(_ROPE_FACTORS).ravel()
            return None if (factors == 1).all() else _llama3_scaling(factors, theta, str(self.path))
        if kind == "yarn" and factor:
            return _yarn_scaling(fields, prefix, factor)
        if kind == "linear" or (kind == "none" and linear not in (0.0, 1.0)):
            return {"rope_type": "linear", "factor": linear} if linear else None
        return None if kind in ("none", "yarn") else {"rope_type": kind}

    def _generation_defaults(self) -> GenerationDefaults:
        def setting(name: str) -> float | None:
            return self._fields.get(f"general.sampling.{name}", float)

        return GenerationDefaults(
            temperature=setting("temp"),
            top_p=setting("top_p"),
            top_k=self._fields.get("general.sampling.top_k", int),
            min_p=setting("min_p"),
            repetition_penalty=setting("penalty_repeat"),
        )

    def names(self) -> frozenset[str]:
        """Hugging Face names of the tensors; one without such a name goes by its GGUF name."""
        return frozenset(self._stored)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._stored:
            raise ConfigError(f"{self.path} has no tensor {name}")
        return self.file.tensors[self._stored[name]]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, (out, in) for matrices."""
        return self._info(name).shape

    def _floats(self, stored: str) -> np.ndarray:
        info = self.file.tensors[stored]
        return dequantize(self.file.raw(stored), info.kind).reshape(info.shape)

    def _row_order(self, name: str) -> np.ndarray | None:
        """For each row of Hugging Face's layout the row of the file that holds it; None if they agree."""
        if self._arch != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return None
        # Rotary pairs are (2i, 2i + 1) in the file and (i, i + head_dim / 2) in Hugging Face's layout.
        pairs = np.arange(self.shape(name)[0]).reshape(-1, self.config.head_dim // 2, 2)
        return pairs.swapaxes(1, 2).ravel()

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats: in its stored dtype (mapped, read-only, no copy), or float32 if it is packed."""
        self._info(name)
        weights, order = self._floats(self._stored[name]), self._row_order(name)
        if self._arch == "gemma3" and name.endswith("norm.weight"):
            return weights - weights.dtype.type(1)
        return weights if order is None else weights[order]

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix as integers with scales; None if its type has no such form."""
        info = self._info(name)
        if info.kind not in BLOCK_FORMATS or len(info.shape) != 2:
            return None
        packed, order = unpack(self.file.raw(self._stored[name]), info.kind), self._row_order(name)
        return packed if order is None else packed.rows(order)
