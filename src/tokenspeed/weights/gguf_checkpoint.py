"""Models in GGUF files as Hugging Face has them: configuration, names and layout of tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from tokenspeed.config import GenerationDefaults, ModelConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights.config_json import model_config
from tokenspeed.weights.fields import Fields
from tokenspeed.weights.gguf import GGUFFile, TensorInfo
from tokenspeed.weights.gguf_blocks import BLOCK_FORMATS, FLOAT_DTYPES, QuantizedTensor, can_read, dequantize, unpack

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
        ids += [token_id for token_id in found if token_id < len(kinds) and kinds[token_id] == _CONTROL]
    return list(dict.fromkeys(ids))


def _llama3_cutoffs(factors: np.ndarray, frequencies: np.ndarray) -> tuple[float, float]:
    """(original context, high_freq_factor) where low_freq_factor is 1: only their ratios count."""
    factor = float(factors.max())
    between = (factors > 1 + 1e-6) & (factors < factor * (1 - 1e-6))
    if between.sum() < 2:  # too few to tell: those of every published model
        return 8192.0, 4.0
    # Between the cut-offs 1 / divisor is linear in the frequency.
    smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(frequencies[between] / (2 * np.pi), smooth, 1)
    if intercept > -1e-6:
        return 8192.0, 4.0
    high = 1 - 1 / float(intercept)
    return float(round(float(slope) * (high - 1))), round(high, 3)


def _llama3_scaling(divisors: np.ndarray, theta: float, head_dim: int, source: str) -> dict[str, object] | None:
    """The `llama3` scaling that divides the frequencies by `divisors`, float32 [head_dim / 2]; None if they are all 1.

    llama.cpp stores the divisors and not the four numbers they were made from.

    Raises:
      ConfigError: the divisors are of another form.
    """
    if (divisors == 1).all():
        return None
    refusal = ConfigError(
        f"{source} scales RoPE by {_ROPE_FACTORS} in a form other than llama3's, which is not supported"
    )
    factors = divisors.astype(np.float64)
    if len(factors) != head_dim // 2 or not (np.isfinite(factors) & (factors >= 1)).all():
        raise refusal
    frequencies = theta ** -(np.arange(len(factors)) / len(factors))
    factor = float(factors.max())
    original, high = _llama3_cutoffs(factors, frequencies)
    smooth = np.clip((original * frequencies / (2 * np.pi) - 1) / (high - 1), 0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-4):
        raise refusal
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
        theta = fields.get(own("rope.freq_base"), float) or 1e4
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
            "rope_theta": theta,
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
            "dtype": dtype,
            "bos_token_id": fields.get("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": _end_ids(fields),
        }
        values["rope_scaling"] = self._rope_scaling(theta, head_dim)
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

    def _rope_scaling(self, theta: float, head_dim: int) -> dict[str, object] | None:
        fields, prefix = self._fields, self._own("rope.scaling")
        kind = fields.get(f"{prefix}.type", str) or "none"
        factor = fields.get(f"{prefix}.factor", float) or 0.0
        linear = fields.get(self._own("rope.scale_linear"), float) or factor
        if kind == "none" and _ROPE_FACTORS in self.file.tensors:
            return _llama3_scaling(self._floats(_ROPE_FACTORS).ravel(), theta, head_dim, str(self.path))
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
        weights = dequantize(self.file.raw(stored), info.kind).reshape(info.shape)
        if info.kind not in FLOAT_DTYPES:
            self.file.release(stored)
        return weights

    def _row_order(self, name: str) -> np.ndarray | None:
        """For each row of Hugging Face's layout the row of the file that holds it; None if they agree."""
        if self._arch != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            return None
        rows = self.shape(name)[0]
        if rows % self.config.head_dim:  # not the shape it should have, which is for the loader to say
            return None
        # Rotary pairs are (2i, 2i + 1) in the file and (i, i + head_dim / 2) in Hugging Face's layout.
        pairs = np.arange(rows).reshape(-1, self.config.head_dim // 2, 2)
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
        self.file.release(self._stored[name])
        return packed if order is None else packed.rows(order)
