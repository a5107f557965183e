"""Configs as they are on the hub (sizes cut where they do not matter), and what the families make of them."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tokenspeed.config import GenerationDefaults, ModelConfig, Rope
from tokenspeed.types import ConfigError
from tokenspeed.weights.config_json import SUPPORTED_ARCHITECTURES, generation_defaults, model_config

Json = dict[str, object]

LLAMA_31_8B: Json = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B: Json = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN2_05B: Json = {
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: Json = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GEMMA3_4B: Json = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GEMMA3_270M: Json = {
    "architectures": ["Gemma3ForCausalLM"],
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
    "vocab_size": 262144,
}


def parse(values: Json, **overrides: object) -> ModelConfig:
    return model_config(values, source="m/config.json", overrides=overrides, name_or_path="m")


def without(values: Json, *names: str) -> Json:
    return {name: value for name, value in values.items() if name not in names}


def test_llama() -> None:
    assert parse(LLAMA_31_8B) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=Rope(
            theta=5e5,
            type="llama3",
            factor=8.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        checkpoint_dtype="bfloat16",
        bos_token_id=128000,
        eos_token_ids=(128001, 128008, 128009),
        name_or_path="m",
    )
    biased = parse(LLAMA_31_8B, attention_bias=True, mlp_bias=True)
    assert (biased.attention_bias, biased.attention_output_bias, biased.mlp_bias) == (True, True, True)
    first = parse(without(LLAMA_31_8B, "num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings"))
    assert (first.num_kv_heads, first.rope, first.tie_word_embeddings) == (32, Rope(theta=1e4), False)


def test_mistral() -> None:
    config = parse(MISTRAL_7B)
    assert config.sliding_windows == (4096,) * 32
    assert (config.head_dim, config.num_kv_heads, config.attention_bias) == (128, 8, False)
    assert parse(MISTRAL_7B, sliding_window=None).sliding_windows == ()
    assert parse(MISTRAL_7B, head_dim=64).head_dim == 64
    assert parse(without(MISTRAL_7B, "sliding_window")).sliding_windows == (4096,) * 32, "transformers' default"


def test_qwen2() -> None:
    config = parse(QWEN2_05B)
    assert (config.attention_bias, config.attention_output_bias, config.qk_norm) == (True, False, False)
    assert (config.tie_word_embeddings, config.sliding_windows) == (True, ())
    windowed = parse(QWEN2_05B, use_sliding_window=True)
    assert windowed.sliding_windows == (None,) * 21 + (32768,) * 3
    assert not parse(without(QWEN2_05B, "tie_word_embeddings")).tie_word_embeddings


def test_qwen3() -> None:
    config = parse(QWEN3_06B)
    assert (config.qk_norm, config.head_dim, config.attention_bias) == (True, 128, False)
    assert parse(without(QWEN3_06B, "head_dim")).head_dim == 128, "not hidden_size / num_attention_heads"
    types = ["full_attention", "sliding_attention"] * 14
    assert (
        parse(QWEN3_06B, layer_types=types, use_sliding_window=True, sliding_window=64).sliding_windows
        == (None, 64) * 14
    )
    assert parse(QWEN3_06B, attention_bias=True).attention_output_bias


def test_gemma3() -> None:
    config = parse(GEMMA3_270M)
    assert config.sliding_windows == (512, 512, 512, 512, 512, None) * 3
    assert (config.rope, config.rope_local) == (Rope(theta=1e6), Rope(theta=1e4))
    assert (config.activation, config.tie_word_embeddings) == ("gelu_tanh", True)
    assert (config.qk_norm, config.norm_plus_one, config.sandwich_norms) == (True, True, True)
    assert (config.attention_scale, config.embedding_scale) == (1 / 16, math.sqrt(640))
    capped = parse(GEMMA3_270M, attn_logit_softcapping=50.0, final_logit_softcapping=30)
    assert (capped.attention_soft_cap, capped.final_soft_cap) == (50.0, 30.0)
    assert parse(GEMMA3_270M, query_pre_attn_scalar=168).attention_scale == 168**-0.5


def test_gemma3_with_vision_leaves_out_what_is_default() -> None:
    config = parse(GEMMA3_4B)
    assert config.architecture == "Gemma3ForConditionalGeneration"
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (262208, 2560, 34)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.rope == Rope(theta=1e6, type="linear", factor=8.0)
    assert config.rope_local == Rope(theta=1e4)
    assert config.sliding_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert (config.eos_token_ids, config.bos_token_id) == ((1, 106), 2)
    assert (config.tie_word_embeddings, config.max_position_embeddings) == (True, 131072)
    assert parse(GEMMA3_4B, text_config={"sliding_window": 64}).window(0) == 64
    assert parse(GEMMA3_4B, sliding_window=64, num_attention_heads=16, dtype="float16") == dataclasses.replace(
        config, sliding_windows=((64,) * 5 + (None,)) * 5 + (64,) * 4, num_heads=16, checkpoint_dtype="float16"
    )


def test_the_style_of_transformers_5_means_the_same() -> None:
    new_llama = without(LLAMA_31_8B, "rope_theta", "rope_scaling", "torch_dtype") | {
        "dtype": "bfloat16",
        "rope_parameters": {**LLAMA_31_8B["rope_scaling"], "rope_theta": 500000.0},  # pyright: ignore[reportGeneralTypeIssues]
    }
    assert parse(new_llama) == parse(LLAMA_31_8B)
    new_gemma = without(GEMMA3_270M, "rope_theta", "rope_local_base_freq", "rope_scaling", "torch_dtype") | {
        "dtype": "bfloat16",
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    }
    assert parse(new_gemma) == parse(GEMMA3_270M)
    assert parse(without(LLAMA_31_8B, "architectures")) == parse(LLAMA_31_8B), "model_type is enough"


def test_rope_scalings() -> None:
    def rope(**scaling: object) -> Rope:
        return parse(QWEN2_05B, rope_scaling=scaling).rope

    assert rope(type="linear", factor=2) == Rope(theta=1e6, type="linear", factor=2.0)
    assert rope(rope_type="dynamic", factor=2.0) == Rope(
        theta=1e6, type="dynamic", factor=2.0, original_max_position_embeddings=32768
    )
    assert rope(type="yarn", factor=4.0, original_max_position_embeddings=8192) == Rope(
        theta=1e6, type="yarn", factor=4.0, original_max_position_embeddings=8192, beta_fast=32.0, beta_slow=1.0
    )
    every = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "mscale": 1.0, "mscale_all_dim": 0.5}
    full = rope(type="yarn", factor=4.0, original_max_position_embeddings=8192, truncate=False, **every)
    assert full == Rope(
        theta=1e6,
        type="yarn",
        factor=4.0,
        original_max_position_embeddings=8192,
        truncate=False,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.2,
        mscale=1.0,
        mscale_all_dim=0.5,
    )


def test_scalings_that_stretch_past_the_trained_length_say_so() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert parse(QWEN2_05B, rope_scaling=yarn).max_position_embeddings == 131072
    assert parse(QWEN2_05B, rope_scaling=yarn | {"factor": 0.5}).max_position_embeddings == 32768
    assert parse(QWEN2_05B, rope_scaling={"type": "dynamic", "factor": 2.0}).max_position_embeddings == 65536
    assert parse(QWEN2_05B, rope_scaling={"type": "linear", "factor": 2.0}).max_position_embeddings == 32768


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM, which is not supported; supported are Llama",
        ),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "many"}, "hidden_size='many', which is not a whole number"),
        ({"hidden_size": 0}, "hidden_size=0, which is not above 0"),
        ({"num_hidden_layers": 10**9}, "1000000000 layers; it is damaged"),
        ({"num_key_value_heads": 5}, r"m/config\.json: .*num_heads=32 is not a multiple of num_kv_heads=5"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps=nan, which is not a finite number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no', which is not true or false"),
        ({"hidden_act": "relu"}, "activation 'relu'; supported are silu"),
        ({"torch_dtype": "float64"}, "dtype='float64'; supported are float32, bfloat16 and float16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*, which is not supported"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5, which is not supported"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "RoPE scaling 'longrope'; supported are default, linear",
        ),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling of m/config\.json lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, r"factor=-1\.0, which is not above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear', which is not an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>', which is not a token id or a list"),
        ({"rope_thta": 1e5}, "--hf-overrides names 'rope_thta', which LlamaForCausalLM does not read"),
        ({"sliding_window": 5}, "--hf-overrides names 'sliding_window', which LlamaForCausalLM does not read"),
    ],
)
def test_what_cannot_be_used_is_named(overrides: Json, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(LLAMA_31_8B, **overrides)


def test_what_cannot_be_used_of_other_families_is_named() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention=True, which is not supported"):
        parse(GEMMA3_270M, use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="19 attention windows for 18 layers"):
        parse(GEMMA3_270M, layer_types=["full_attention"] * 18 + ["sliding_attention"])
    with pytest.raises(ConfigError, match="a layer of type 'chunked_attention'; supported are"):
        parse(GEMMA3_270M, layer_types=["chunked_attention"] * 18)
    with pytest.raises(ConfigError, match="keeps it under full_attention and sliding_attention"):
        parse(GEMMA3_270M, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(ConfigError, match=r"layer_types=.*, which is not supported"):
        parse(MISTRAL_7B, layer_types=["sliding_attention"] * 32)


def test_an_override_names_the_families_that_are_supported() -> None:
    with pytest.raises(ConfigError, match=", ".join(SUPPORTED_ARCHITECTURES)):
        parse({"model_type": "gpt2"})


def test_generation_config() -> None:
    values: Json = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "max_new_tokens": 512,
        "transformers_version": "4.37.0",
    }
    defaults, eos_ids = generation_defaults(values, "g")
    assert defaults == GenerationDefaults(
        temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1, max_new_tokens=512
    )
    assert eos_ids == (151645, 151643)
    assert generation_defaults({"do_sample": False}, "g") == (GenerationDefaults(temperature=0.0), ())
    assert generation_defaults({"eos_token_id": 2}, "g") == (GenerationDefaults(), (2,))
    with pytest.raises(ConfigError, match="g has temperature='hot', which is not a number"):
        generation_defaults({"temperature": "hot"}, "g")
