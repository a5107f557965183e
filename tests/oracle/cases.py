"""Tiny checkpoints of every dense family with weights from a fixed seed, and transformers' answers to them.

A checkpoint is written anew by whoever needs it; only the answers are kept, in `data/<case>.npz`, made by `make.py`.
Each case names the features it is about and how to switch them off, so that a test can show that they matter.
Some configs are written as transformers 4 wrote them and some as transformers 5 does: both are on the hub.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"
DECODE_STEPS = 16
PROMPT_LENGTHS = (1, 6, 19, 45)
"""Tokens; the longest passes every window and every original context length, and several pages."""

Config = dict[str, Any]


class Answers(NamedTuple):
    """transformers' float32 answers to one case. P prompts, V vocabulary, S decode steps."""

    prompts: tuple[np.ndarray, ...]
    """int32 [length], P of them."""
    prefill_logits: tuple[np.ndarray, ...]
    """float32 [length, V] for each prompt."""
    decode_ids: np.ndarray
    """int32 [P, S]: the greedy token fed at each step; the first is the argmax of the last prefill row."""
    decode_logits: np.ndarray
    """float32 [P, S, V]: what followed each of them, with a cache."""


class Case(NamedTuple):
    """One checkpoint."""

    config: Config
    """What is in config.json."""
    features: Mapping[str, Config]
    """Feature to the changes of `config` that switch it off (a None value removes the key)."""
    oracle_kwargs: Mapping[str, float] = {}
    """Arguments of transformers' forward, for what its config alone does not switch on."""
    seed: int = 0
    """Of the prompts; chosen so that no greedy choice is a near tie."""


LLAMA: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA_5: Config = {k: v for k, v in LLAMA.items() if k not in ("torch_dtype", "rope_theta", "rope_scaling")} | {
    "dtype": "float32",
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MISTRAL: Config = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias", "rope_scaling")} | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "head_dim": 16,
    "sliding_window": 8,
}
QWEN2: Config = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias", "rope_scaling")} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 8,
    "max_window_layers": 1,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}
QWEN3: Config = QWEN2 | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "attention_bias": False,
    "rope_scaling": None,
    "sliding_window": None,
    "max_window_layers": 2,
}
GEMMA3: Config = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "float32",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "pad_token_id": 0,
}
GEMMA3_5: Config = {
    k: v
    for k, v in GEMMA3.items()
    if k not in ("torch_dtype", "rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
} | {
    "dtype": "float32",
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "tie_word_embeddings": False,
}


def _without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


def _scaled(base: Config, **scaling: object) -> Case:
    return Case(base | {"rope_scaling": scaling}, {"rope scaling": {"rope_scaling": None}})


_ALL: dict[str, Case] = {
    # Llama 2's first configs have neither num_key_value_heads nor head_dim.
    "llama2": Case(_without(LLAMA, "num_key_value_heads", "attention_bias", "mlp_bias"), {}, seed=1),
    "llama_5": Case(
        LLAMA_5 | {"vocab_size": 131},
        {"theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}},
    ),
    "smollm2": Case(
        LLAMA
        | {"num_attention_heads": 3, "num_key_value_heads": 1, "rope_theta": 100000.0, "tie_word_embeddings": True},
        {"theta": {"rope_theta": 10000.0}},
    ),
    "llama_head_dim": Case(LLAMA | {"head_dim": 24, "num_key_value_heads": 1}, {}),
    "llama_attention_bias": Case(LLAMA | {"attention_bias": True}, {"attention bias": {"attention_bias": False}}),
    "llama_mlp_bias": Case(LLAMA | {"mlp_bias": True, "head_dim": None}, {"mlp bias": {"mlp_bias": False}}),
    "llama_linear": _scaled(LLAMA, type="linear", factor=4.0),
    # The context is 24 tokens; `make.ask` says which length counts beyond it.
    "llama_dynamic": _scaled(LLAMA | {"max_position_embeddings": 24}, rope_type="dynamic", factor=2.0),
    # Of the 6 wavelengths here (6 to 353,000 tokens) one is kept, one blended and the rest divided.
    "llama3": _scaled(
        LLAMA | {"rope_theta": 500000.0, "max_position_embeddings": 640},
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=80,
    ),
    "llama_yarn": _scaled(
        LLAMA | {"max_position_embeddings": 64}, rope_type="yarn", factor=4.0, original_max_position_embeddings=16
    ),
    "llama_yarn_mscale": Case(
        LLAMA_5
        | {
            "max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
                "beta_slow": 0.25,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
        {"rope scaling": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}},
    ),
    "mistral": Case(MISTRAL, {"window": {"sliding_window": None}}),
    "mistral_no_window": Case(
        MISTRAL | {"sliding_window": None, "head_dim": None, "num_key_value_heads": 1}, {}, seed=1
    ),
    # Names a window, but does not use it, as every Qwen2.5 on the hub.
    "qwen2": Case(QWEN2, {}),
    "qwen2_window": Case(
        QWEN2 | {"num_hidden_layers": 3, "use_sliding_window": True, "tie_word_embeddings": False},
        {
            "window": {"use_sliding_window": False},
            "full layers": {"max_window_layers": 0},
        },
    ),
    "qwen2_yarn": _scaled(
        QWEN2 | {"rope_theta": 10000.0, "max_position_embeddings": 64},
        type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        attention_factor=1.3,
    ),
    "qwen3": Case(QWEN3, {}),
    "qwen3_window": Case(
        _without(QWEN3, "torch_dtype", "rope_theta", "rope_scaling")
        | {
            "dtype": "float32",
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
        {
            "window": {"layer_types": ["full_attention"] * 3},
            "full layers": {"layer_types": ["sliding_attention"] * 3},
            "attention bias": {"attention_bias": False},
        },
    ),
    "gemma3": Case(
        GEMMA3,
        {
            "window": {"sliding_window": 512},
            "full layers": {"sliding_window_pattern": 8},
            "local theta": {"rope_local_base_freq": 1000000.0},
            "global theta": {"rope_theta": 10000.0},
            "attention scale": {"query_pre_attn_scalar": 16},
        },
    ),
    # No pattern and no list of layers: every sixth layer is full.
    "gemma3_default_pattern": Case(
        _without(GEMMA3, "sliding_window_pattern") | {"hidden_size": 32, "num_hidden_layers": 7},
        {"window": {"sliding_window": 512}, "full layers": {"sliding_window_pattern": 8}},
    ),
    "gemma3_layer_types": Case(
        GEMMA3_5 | {"num_key_value_heads": 2, "attention_bias": True},
        {
            "window": {"layer_types": ["full_attention"] * 4},
            "full layers": {"layer_types": ["sliding_attention"] * 4},
            "attention bias": {"attention_bias": False},
        },
        seed=4,
    ),
    "gemma3_linear": _scaled(GEMMA3, rope_type="linear", factor=8.0),
    "gemma3_final_soft_cap": Case(
        GEMMA3 | {"final_logit_softcapping": 1.0}, {"final soft cap": {"final_logit_softcapping": None}}, seed=9
    ),
    # transformers (5.24) stores attn_logit_softcapping but does not hand it to Gemma 3's attention, which does take a
    # `softcap`; passed by hand it means what it means in Gemma 2.
    "gemma3_attention_soft_cap": Case(GEMMA3 | {"attn_logit_softcapping": 0.5}, {}, {"softcap": 0.5}),
}

CASES: tuple[str, ...] = tuple(_ALL)


def case_of(name: str) -> Case:
    """The definition of a case.

    Raises:
      KeyError: there is none of that name.
    """
    return _ALL[name]


def changed(config: Config, changes: Config) -> Config:
    """The config with keys replaced, and those changed to None removed."""
    return {name: value for name, value in (config | changes).items() if value is not None}


def _uniform(name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
    # RandomState's stream is frozen for good, and uniform draws are exact on every platform.
    draw = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape)
    return ((2.0 * draw - 1.0) * math.sqrt(3.0) * std).astype(np.float32)


def weights(config: Config) -> dict[str, np.ndarray]:
    """Random float32 weights of a checkpoint by its Hugging Face names, a pure function of the config's shapes.

    Wide enough that attention is sharp, logits are spread and every norm and bias tells.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    family = config["model_type"]
    gemma = family == "gemma3_text"
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    out_bias = config.get("attention_bias", False)
    mlp_bias = config.get("mlp_bias", False)
    tensors: dict[str, np.ndarray] = {}

    def linear(name: str, out: int, into: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = _uniform(f"{name}.weight", (out, into), 1.2 / math.sqrt(into))
        if bias:
            tensors[f"{name}.bias"] = _uniform(f"{name}.bias", (out,), 0.4)

    def norm(name: str, size: int) -> None:
        tensors[f"{name}.weight"] = _uniform(f"{name}.weight", (size,), 0.3) + np.float32(0.0 if gemma else 1.0)

    def embedding(name: str) -> None:
        tensors[name] = _uniform(name, (config["vocab_size"], hidden), 0.08 if gemma else 0.3)

    embedding("model.embed_tokens.weight")
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        linear(f"{layer}.self_attn.q_proj", heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_heads * head_dim, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, heads * head_dim, out_bias)
        if gemma or family == "qwen3":
            norm(f"{layer}.self_attn.q_norm", head_dim)
            norm(f"{layer}.self_attn.k_norm", head_dim)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, mlp_bias)
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if gemma:
            norm(f"{layer}.pre_feedforward_layernorm", hidden)
            norm(f"{layer}.post_feedforward_layernorm", hidden)
    norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", gemma):
        embedding("lm_head.weight")
    return tensors


def write_config(config: Config, folder: Path) -> None:
    """Writes config.json and model.safetensors of a config, as a checkpoint in Hugging Face layout."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(weights(config), folder / "model.safetensors", metadata={"format": "pt"})


def write_checkpoint(case: str, folder: Path) -> None:
    """Writes the checkpoint of a case; the folder is made if need be."""
    write_config(case_of(case).config, folder)


def prompts(case: str) -> tuple[np.ndarray, ...]:
    """The token ids of a case's prompts, int32, of PROMPT_LENGTHS."""
    definition = case_of(case)
    draw = np.random.RandomState(zlib.crc32(case.encode()) + definition.seed)
    vocab_size = definition.config["vocab_size"]
    return tuple((draw.random_sample(length) * vocab_size).astype(np.int32) for length in PROMPT_LENGTHS)


def answers(case: str) -> Answers:
    """The kept answers of a case.

    Raises:
      FileNotFoundError: `make.py` has not been run for it.
    """
    with np.load(DATA / f"{case}.npz") as file:
        logits = np.split(file["prefill_logits"], np.cumsum(PROMPT_LENGTHS)[:-1])
        return Answers(prompts(case), tuple(logits), file["decode_ids"], file["decode_logits"])


def save_answers(case: str, made: Answers) -> None:
    """Keeps the answers of a case."""
    DATA.mkdir(exist_ok=True)
    np.savez_compressed(
        DATA / f"{case}.npz",
        prefill_logits=np.concatenate(made.prefill_logits),
        decode_ids=made.decode_ids,
        decode_logits=made.decode_logits,
    )
