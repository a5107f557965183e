"""Dense decoders: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 3. Differences are fields of `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp

from tokenspeed.config import ModelConfig
from tokenspeed.layers.attention import Cache, QKNorms, TokenBatch, attention
from tokenspeed.layers.linear import Weight, embed, linear
from tokenspeed.layers.norm import Norm, rms_norm
from tokenspeed.layers.rope import cos_sin
from tokenspeed.weights.param import Param

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
)
"""Hugging Face class names served by this file."""

Weights = Mapping[str, Weight]
"""Parameter name to its array or packed form."""


def _vector(weights: Weights, name: str) -> jax.Array:
    """A parameter that is never packed: a norm's weight or a bias."""
    weight = weights[name]
    assert isinstance(weight, jax.Array), name
    return weight


def _bias(weights: Weights, name: str) -> jax.Array | None:
    """The bias of a projection, if the family has one."""
    return _vector(weights, f"{name}_bias") if f"{name}_bias" in weights else None


def _input_norm(config: ModelConfig, weights: Weights, name: str) -> Norm:
    return Norm(_vector(weights, name), config.rms_norm_eps, config.norm_plus_one)


def _norm(config: ModelConfig, name: str, size: int, axis: str) -> Param:
    return Param(shape=(size,), axes=(axis,), checkpoint=(name,), mean=0.0 if config.norm_plus_one else 1.0)


def _layer_params(config: ModelConfig, layer: int) -> dict[str, Param]:
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    N, K = config.num_heads * H, config.num_kv_heads * H
    source = f"model.layers.{layer}."
    qkv = tuple(f"{source}self_attn.{part}_proj" for part in "qkv")
    gate_up = tuple(f"{source}mlp.{part}_proj" for part in ("gate", "up"))

    def matmul(shape: tuple[int, int], axes: tuple[str, str], parts: tuple[str, ...], *, gated: bool = False) -> Param:
        names = tuple(f"{part}.weight" for part in parts)
        return Param(shape=shape, axes=axes, checkpoint=names, matmul=True, gated=gated)

    def bias(size: int, axis: str, parts: tuple[str, ...]) -> Param:
        return Param(shape=(size,), axes=(axis,), checkpoint=tuple(f"{part}.bias" for part in parts))

    after_attention = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"
    params = {
        "attention_norm": _norm(config, f"{source}input_layernorm.weight", D, "D"),
        "qkv": matmul((N + 2 * K, D), ("N", "D"), qkv),
        "out": matmul((D, N), ("D", "N"), (f"{source}self_attn.o_proj",)),
        "mlp_norm": _norm(config, f"{source}{after_attention}.weight", D, "D"),
        "gate_up": matmul((2 * F, D), ("F", "D"), gate_up, gated=True),
        "down": matmul((D, F), ("D", "F"), (f"{source}mlp.down_proj",)),
    }
    if config.attention_bias:
        params["qkv_bias"] = bias(N + 2 * K, "N", qkv)
    if config.attention_output_bias:
        params["out_bias"] = bias(D, "D", (f"{source}self_attn.o_proj",))
    if config.mlp_bias:
        params["gate_up_bias"] = bias(2 * F, "F", gate_up)
        params["down_bias"] = bias(D, "D", (f"{source}mlp.down_proj",))
    if config.qk_norm:
        params["q_norm"] = _norm(config, f"{source}self_attn.q_norm.weight", H, "H")
        params["k_norm"] = _norm(config, f"{source}self_attn.k_norm.weight", H, "H")
    if config.sandwich_norms:
        params["attention_out_norm"] = _norm(config, f"{source}post_attention_layernorm.weight", D, "D")
        params["mlp_out_norm"] = _norm(config, f"{source}post_feedforward_layernorm.weight", D, "D")
    return params


def params(config: ModelConfig) -> dict[str, Param]:
    """The model's weights by name, in the order they are loaded."""
    V, D = config.vocab_size, config.hidden_size
    declared = {
        "embedding": Param(shape=(V, D), axes=("V", "D"), checkpoint=("model.embed_tokens.weight",), matmul=True)
    }
    for layer in range(config.num_layers):
        declared |= {f"layers.{layer}.{name}": param for name, param in _layer_params(config, layer).items()}
    declared["norm"] = _norm(config, "model.norm.weight", D, "D")
    if not config.tie_word_embeddings:
        declared["head"] = Param(shape=(V, D), axes=("V", "D"), checkpoint=("lm_head.weight",), matmul=True)
    return declared


@partial(jax.jit, static_argnames=("config", "window"))
def _layer(
    weights: dict[str, Weight],
    x: jax.Array,
    cache: tuple[jax.Array, jax.Array],
    cos_and_sin: tuple[jax.Array, jax.Array],
    batch: TokenBatch,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One decoder layer on x [T, D]. Jitted so that layers of one kind are traced once."""
    normed = partial(rms_norm, eps=config.rms_norm_eps, plus_one=config.norm_plus_one)

    def add(name: str, value: jax.Array) -> jax.Array:
        """x plus a projection of value, whose own norm comes between where the family has one."""
        weight, bias = weights[name], _bias(weights, name)
        if not config.sandwich_norms:
            return linear(value, weight, bias=bias, residual=x)
        after = "attention_out_norm" if name == "out" else "mlp_out_norm"
        return x + normed(linear(value, weight, bias=bias), _vector(weights, after))

    with jax.named_scope("attention"):
        before = _input_norm(config, weights, "attention_norm")
        qkv = linear(x, weights["qkv"], norm=before, bias=_bias(weights, "qkv"))
        norms = None
        if config.qk_norm:
            norms = QKNorms(*(_input_norm(config, weights, name) for name in ("q_norm", "k_norm")))
        attended, cache = attention(
            qkv,
            cos_and_sin,
            cache,
            batch,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            sliding_window=window,
            soft_cap=config.attention_soft_cap,
            norms=norms,
        )
        x = add("out", attended)

    with jax.named_scope("mlp"):
        before = _input_norm(config, weights, "mlp_norm")
        fed = linear(x, weights["gate_up"], norm=before, bias=_bias(weights, "gate_up"), gate=config.activation)
        x = add("down", fed)
    return x, cache


def forward(
    config: ModelConfig, weights: Weights, cache: Cache, batch: TokenBatch, dtype: jnp.dtype
) -> tuple[jax.Array, Cache]:
    """Runs the decoder on T tokens. Returns hidden states [T, D] before the final norm, and the cache."""
    with jax.named_scope("embedding"):
        x = embed(weights["embedding"], batch.token_ids, dtype)
        if config.embedding_scale != 1.0:
            x = x * jnp.asarray(config.embedding_scale, dtype)
    ropes = {
        rope: cos_sin(rope, config.head_dim, batch.positions, batch.prompt_lens)
        for rope in {config.layer_rope(layer) for layer in range(config.num_layers)}
    }
    layers: list[tuple[jax.Array, jax.Array]] = []
    for layer in range(config.num_layers):
        with jax.named_scope(f"layer_{layer}"):
            prefix = f"layers.{layer}."
            own = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
            x, layer_cache = _layer(
                own,
                x,
                cache[layer],
                ropes[config.layer_rope(layer)],
                batch,
                config=config,
                window=config.window(layer),
            )
        layers.append(layer_cache)
    return x, tuple(layers)


def logits(config: ModelConfig, weights: Weights, hidden: jax.Array) -> jax.Array:
    """Final norm and head: hidden [B, D] -> float32 logits [B, V]."""
    with jax.named_scope("head"):
        norm = _input_norm(config, weights, "norm")
        table = weights["embedding" if config.tie_word_embeddings else "head"]
        out = linear(hidden, table, norm=norm).astype(jnp.float32)
        cap = config.final_soft_cap
        return out if cap is None else cap * jnp.tanh(out / cap)
