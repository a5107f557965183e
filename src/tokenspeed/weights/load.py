"""Puts a model's weights on the device, tensor by tensor: from a checkpoint, or random ones of the true shapes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from tqdm.auto import tqdm

from tokenspeed.types import ConfigError
from tokenspeed.weights.checkpoint import Checkpoint, QuantizedTensor
from tokenspeed.weights.param import Param

log = logging.getLogger(__name__)

Stored = TypeVar("Stored")
"""A packed weight: a pytree of arrays."""

IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
"""Buffers some checkpoints carry that are not weights."""


def _check_names(params: Mapping[str, Param], checkpoint: Checkpoint) -> None:
    wanted = {name for param in params.values() for name in param.checkpoint}
    present = checkpoint.names()
    missing = sorted(wanted - present)
    if missing:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ConfigError(
            f"{checkpoint.path} lacks {len(missing)} of {len(wanted)} weights: {listed}; "
            "the download may be incomplete, or its config.json belongs to another model"
        )
    unexpected = sorted(name for name in present - wanted if not name.endswith(IGNORED_SUFFIXES))
    # A checkpoint of tied weights may carry the head as well.
    unexpected = [name for name in unexpected if name != "lm_head.weight"]
    if unexpected:
        log.warning("%s has %d weights this model does not use: %s", checkpoint.path, len(unexpected), unexpected[:5])


def _check_shape(param: Param, checkpoint: Checkpoint, parts: list[np.ndarray], shape: tuple[int, ...]) -> None:
    if shape != param.shape:
        found = ", ".join(f"{name} {part.shape}" for name, part in zip(param.checkpoint, parts, strict=True))
        raise ConfigError(
            f"{checkpoint.path}: {found} should make {param.shape}; its config.json belongs to another model"
        )


def _read(param: Param, checkpoint: Checkpoint) -> np.ndarray:
    parts = [checkpoint.read(name) for name in param.checkpoint]
    if len({part.shape[1:] for part in parts}) > 1:
        _check_shape(param, checkpoint, parts, ())
    value = parts[0] if len(parts) == 1 else np.concatenate(parts)
    _check_shape(param, checkpoint, parts, value.shape)
    return value


def _joined(parts: list[QuantizedTensor]) -> QuantizedTensor:
    """Parts stacked; where their groups differ, the finer ones serve all."""
    group = min(part.group_size for part in parts)

    def parameters(part: QuantizedTensor, values: np.ndarray | None) -> np.ndarray:
        filled = np.zeros_like(part.scales) if values is None else values
        return np.repeat(filled, part.group_size // group, axis=1)

    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = np.concatenate([parameters(part, part.offsets) for part in parts])
    return QuantizedTensor(
        values=np.concatenate([part.values for part in parts]),
        scales=np.concatenate([parameters(part, part.scales) for part in parts]),
        offsets=offsets,
        group_size=group,
    )


def _read_quantized(param: Param, checkpoint: Checkpoint) -> QuantizedTensor | None:
    """The parameter as its checkpoint stores it in few bits; None if it does not."""
    parts: list[QuantizedTensor] = []
    for name in param.checkpoint:
        part = checkpoint.read_quantized(name)
        if part is None:
            return None
        parts.append(part)
    joined = _joined(parts)
    _check_shape(param, checkpoint, [part.values for part in parts], joined.values.shape)
    return joined


def load(
    params: Mapping[str, Param],
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    sharding: Sharding,
    *,
    pack: Callable[[Param, QuantizedTensor], Stored | None] | None,
    progress: bool,
) -> dict[str, jax.Array | Stored]:
    """Reads each parameter and places it on the device; one tensor is on the host at a time.

    Args:
      dtype: of what is not kept packed.
      pack: makes the packed form, on the host, of a matrix that the checkpoint stores in few bits, or returns None if
        that one cannot be; None: all become dense.

    Raises:
      ConfigError: a weight is missing or has the wrong shape; the text names it as the checkpoint does.
    """
    _check_names(params, checkpoint)
    weights: dict[str, jax.Array | Stored] = {}
    for name, param in tqdm(params.items(), desc="Loading weights", unit="tensor", disable=not progress, leave=False):
        few_bits = _read_quantized(param, checkpoint) if pack is not None and param.matmul else None
        packed = None if pack is None or few_bits is None else pack(param, few_bits)
        del few_bits
        weights[name] = jax.device_put(_read(param, checkpoint).astype(dtype) if packed is None else packed, sharding)
    return weights


def random(params: Mapping[str, Param], dtype: jnp.dtype, sharding: Sharding, seed: int) -> dict[str, jax.Array]:
    """Random weights of the true shapes, made on the device."""

    @partial(jax.jit, static_argnums=0, out_shardings=sharding)
    def one(param: Param, key: jax.Array) -> jax.Array:
        return (param.mean + param.scale * jax.random.normal(key, param.shape, jnp.float32)).astype(dtype)

    key = jax.random.key(seed)
    return {name: one(param, jax.random.fold_in(key, i)) for i, (name, param) in enumerate(params.items())}
