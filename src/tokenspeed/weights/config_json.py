"""config.json and generation_config.json of the supported families to `ModelConfig` and `GenerationDefaults`.

Names, defaults and meanings are those of transformers 5.24, in its old style (`rope_theta`, `rope_scaling`,
`torch_dtype`) and its new one (`rope_parameters`, `layer_types`, `dtype`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, cast

from tokenspeed.config import Activation, GenerationDefaults, ModelConfig, Rope, RopeType
from tokenspeed.types import ConfigError
from tokenspeed.weights.fields import Fields

_MAX_LAYERS = 10_000
"""More than this is damage, and would fill the memory with lists of layers."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "dynamic", "llama3", "yarn")
_SLIDING, _FULL = "sliding_attention", "full_attention"


class Family(NamedTuple):
    """What one architecture takes for granted."""

    architecture: str
    model_type: str
    defaults: Mapping[str, object]
    """Values of keys that config.json may leave out."""
    windows: Callable[[Fields, int], tuple[int | None, ...]]
    qkv_bias: bool | None = None
    """None: `attention_bias` says, and holds for the output projection too."""
    mlp_bias: bool = False
    """Whether `mlp_bias` is read."""
    qk_norm: bool = False
    gemma: bool = False


def _no_windows(_: Fields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    fields.refuse("layer_types")
    return (fields.get("sliding_window", int),) * num_layers


def _typed_windows(fields: Fields, window: int | None, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    for kind in layer_types:
        if kind not in (_SLIDING, _FULL):
            raise ConfigError(f"{fields.source} has a layer of type {kind!r}; supported are {_FULL} and {_SLIDING}")
    return tuple(window if kind == _SLIDING else None for kind in layer_types)


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.get("sliding_window", int) if fields.get("use_sliding_window", bool) else None
    first = fields.require("max_window_layers", int)
    by_depth = tuple(_FULL if layer < first else _SLIDING for layer in range(num_layers))
    return _typed_windows(fields, window, fields.texts("layer_types") or by_depth)


def _gemma_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = fields.get("sliding_window", int)
    pattern = fields.positive("sliding_window_pattern", int)
    by_pattern = tuple(_SLIDING if (layer + 1) % pattern else _FULL for layer in range(num_layers))
    return _typed_windows(fields, window, fields.texts("layer_types") or by_pattern)


_QWEN: dict[str, object] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, object] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
_LLAMA: dict[str, object] = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_MISTRAL: dict[str, object] = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_COMMON: dict[str, object] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

_FAMILIES = (
    Family("LlamaForCausalLM", "llama", _LLAMA, _no_windows, mlp_bias=True),
    Family("MistralForCausalLM", "mistral", _MISTRAL, _mistral_windows, qkv_bias=False),
    Family("Qwen2ForCausalLM", "qwen2", _QWEN, _qwen_windows, qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", {**_QWEN, "head_dim": 128}, _qwen_windows, qk_norm=True),
    Family("Gemma3ForCausalLM", "gemma3_text", _GEMMA, _gemma_windows, qk_norm=True, gemma=True),
    Family("Gemma3ForConditionalGeneration", "gemma3", _GEMMA, _gemma_windows, qk_norm=True, gemma=True),
)
SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in _FAMILIES)


def _family(fields: Fields) -> Family:
    named = fields.texts("architectures") or ()
    model_type = fields.get("model_type", str)
    for family in _FAMILIES:
        if family.architecture in named or (not named and family.model_type == model_type):
            return family
    raise ConfigError(
        f"{fields.source} describes the architecture {', '.join(named) or model_type or 'unknown'}, which is not supported; "
        f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _rope(fields: Fields, theta: float, max_positions: int) -> Rope:
    """The rope that a `rope_scaling` or `rope_parameters` object describes; `theta` serves where it names none."""
    kind = fields.get("rope_type", str) or fields.get("type", str) or "default"
    fields.refuse("partial_rotary_factor", 1.0)
    fields.refuse("mrope_section")
    theta = theta if fields.get("rope_theta", float) is None else fields.positive("rope_theta", float)
    if kind not in _ROPE_TYPES:
        raise ConfigError(f"{fields.source} asks for RoPE scaling {kind!r}; supported are {', '.join(_ROPE_TYPES)}")
    if kind == "default":
        return Rope(theta=theta)
    if kind == "dynamic":
        return Rope(theta=theta, type=kind, factor=_factor(fields), original_max_position_embeddings=max_positions)
    if kind == "linear":
        return Rope(theta=theta, type=kind, factor=_factor(fields))
    known = fields.get("original_max_position_embeddings", int) is not None
    original = fields.positive("original_max_position_embeddings", int) if known else max_positions
    if kind == "llama3":
        return Rope(
            theta=theta,
            type=kind,
            factor=_factor(fields),
            original_max_position_embeddings=original,
            low_freq_factor=fields.require("low_freq_factor", float),
            high_freq_factor=fields.require("high_freq_factor", float),
        )
    return Rope(
        theta=theta,
        type=kind,
        factor=_factor(fields, max_positions / original),
        original_max_position_embeddings=original,
        beta_fast=fields.get("beta_fast", float) or 32.0,
        beta_slow=fields.get("beta_slow", float) or 1.0,
        attention_factor=fields.get("attention_factor", float),
        mscale=fields.get("mscale", float),
        mscale_all_dim=fields.get("mscale_all_dim", float),
        truncate=fields.get("truncate", bool) is not False,
    )


def _factor(fields: Fields, default: float | None = None) -> float:
    if default is not None and fields.get("factor", float) is None:
        return default
    return fields.positive("factor", float)


def _ropes(fields: Fields, family: Family, max_positions: int) -> tuple[Rope, Rope | None]:
    """The rope of all layers, and that of sliding-window layers where the family has two."""
    new_style = fields.section("rope_parameters")
    scaling = fields.section("rope_scaling")
    empty = Fields({}, fields.source)
    theta = fields.positive("rope_theta", float)
    if not family.gemma:
        return _rope(scaling or new_style or empty, theta, max_positions), None
    new_style = new_style or empty
    for key in new_style.values:
        if key not in (_FULL, _SLIDING):
            raise ConfigError(
                f"{new_style.source} has {key}; {family.architecture} keeps it under {_FULL} and {_SLIDING}"
            )
    full, local = scaling or new_style.section(_FULL) or empty, new_style.section(_SLIDING) or empty
    local_theta = fields.positive("rope_local_base_freq", float)
    return _rope(full, theta, max_positions), _rope(local, local_theta, max_positions)


def _checkpoint_dtype(fields: Fields) -> Literal["float32", "bfloat16", "float16"]:
    dtype = fields.get("dtype", str) or fields.get("torch_dtype", str) or "bfloat16"
    match dtype.removeprefix("torch."):
        case "float32" | "bfloat16" | "float16" as known:
            return known
        case _:
            raise ConfigError(f"{fields.source} has dtype={dtype!r}; supported are float32, bfloat16 and float16")


def _activation(fields: Fields, family: Family) -> Activation:
    name = fields.require("hidden_activation" if family.gemma else "hidden_act", str)
    if name not in _ACTIVATIONS:
        raise ConfigError(f"{fields.source} asks for activation {name!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


_OUTER = ("architectures", "eos_token_id", "bos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
"""Keys that a multimodal model's config has for all of it; they go before those of its `text_config`."""


def _merged(values: Mapping[str, object], overrides: Mapping[str, object]) -> dict[str, object]:
    """The language model's config with `overrides` in place; a multimodal model's `text_config` is lifted to the top."""
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        return {**values, **overrides}
    outer = {key: values[key] for key in (*_OUTER, "quantization_config") if values.get(key) is not None}
    named = overrides.get("text_config")
    own = cast(Mapping[str, object], named) if isinstance(named, Mapping) else {}
    return {**cast(Mapping[str, object], text), **own, **outer, **overrides}


def model_config(
    values: Mapping[str, object], *, source: str, overrides: Mapping[str, object], name_or_path: str
) -> ModelConfig:
    """`ModelConfig` of a config.json.

    Args:
      values: what config.json holds.
      source: the file's name, for errors.
      overrides: keys to replace (`--hf-overrides`).
      name_or_path: kept in the result.

    Raises:
      ConfigError: the architecture, a setting or a value is not supported, or an override names a key that this
        architecture does not read.
    """
    merged = _merged(values, overrides)
    family = _family(Fields(merged, source))
    fields = Fields({**_COMMON, **family.defaults, **merged}, source)
    try:
        config = _dense_decoder(fields, family, name_or_path)
    except ConfigError as error:
        if source in str(error):
            raise
        raise ConfigError(f"{source}: {error}") from error
    known = fields.used | {"text_config", "architectures", "model_type"}
    for key in overrides:
        if key not in known:
            raise ConfigError(f"--hf-overrides names {key!r}, which {family.architecture} does not read from {source}")
    return config


def _dense_decoder(fields: Fields, family: Family, name_or_path: str) -> ModelConfig:
    for key, harmless in (
        ("quantization_config", ()),
        ("use_bidirectional_attention", (False,)),
        ("partial_rotary_factor", (1.0,)),
    ):
        fields.refuse(key, *harmless)
    num_layers = fields.positive("num_hidden_layers", int)
    if num_layers > _MAX_LAYERS:
        raise ConfigError(f"{fields.source} has {num_layers} layers; it is damaged")
    num_heads = fields.positive("num_attention_heads", int)
    hidden_size = fields.positive("hidden_size", int)
    max_positions = fields.positive("max_position_embeddings", int)
    rope, rope_local = _ropes(fields, family, max_positions)
    if rope.type in ("yarn", "dynamic") and rope.original_max_position_embeddings is not None:
        # These stretch past the trained length. Qwen's model cards add YaRN to a config that still names that length.
        max_positions = max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    head_dim = fields.get("head_dim", int) or hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(
            f"{fields.source} has head_dim={head_dim}, which rotary embeddings cannot halve; it is damaged"
        )
    windows = family.windows(fields, num_layers)
    bias = family.qkv_bias if family.qkv_bias is not None else fields.get("attention_bias", bool) or False
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.require("vocab_size", int),
        hidden_size=hidden_size,
        intermediate_size=fields.require("intermediate_size", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", int) or num_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.require("rms_norm_eps", float),
        rope=rope,
        rope_local=rope_local,
        activation=_activation(fields, family),
        sliding_windows=windows if any(window is not None for window in windows) else (),
        tie_word_embeddings=fields.require("tie_word_embeddings", bool),
        attention_bias=bias,
        attention_output_bias=bias and family.qkv_bias is None,
        mlp_bias=family.mlp_bias and (fields.get("mlp_bias", bool) or False),
        qk_norm=family.qk_norm,
        norm_plus_one=family.gemma,
        sandwich_norms=family.gemma,
        embedding_scale=hidden_size**0.5 if family.gemma else 1.0,
        attention_scale=fields.positive("query_pre_attn_scalar", float) ** -0.5 if family.gemma else None,
        attention_soft_cap=fields.get("attn_logit_softcapping", float) if family.gemma else None,
        final_soft_cap=fields.get("final_logit_softcapping", float) if family.gemma else None,
        checkpoint_dtype=_checkpoint_dtype(fields),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        eos_token_ids=fields.ids("eos_token_id"),
        name_or_path=name_or_path,
    )


def generation_defaults(values: Mapping[str, object], source: str) -> tuple[GenerationDefaults, tuple[int, ...]]:
    """Sampling defaults and end-of-sequence ids of a generation_config.json."""
    fields = Fields(values, source)
    defaults = GenerationDefaults(
        temperature=0.0 if fields.get("do_sample", bool) is False else fields.get("temperature", float),
        top_p=fields.get("top_p", float),
        top_k=fields.get("top_k", int),
        min_p=fields.get("min_p", float),
        repetition_penalty=fields.get("repetition_penalty", float),
        max_new_tokens=fields.get("max_new_tokens", int),
    )
    return defaults, fields.ids("eos_token_id")
