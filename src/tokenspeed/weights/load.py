"""Puts a model's weights on the device, tensor by tensor: from a checkpoint, or random ones of the true shapes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from tokenspeed.types import ConfigError
from tokenspeed.weights.checkpoint import Checkpoint
from tokenspeed.weights.param import Param

log = logging.getLogger(__name__)

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


def _read(param: Param, checkpoint: Checkpoint) -> np.ndarray:
    parts = [checkpoint.read(name) for name in param.checkpoint]
    value = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if value.shape != param.shape:
        shapes = ", ".join(f"{name} {tuple(part.shape)}" for name, part in zip(param.checkpoint, parts, strict=True))
        raise ConfigError(
            f"{checkpoint.path}: {shapes} should make {param.shape}; its config.json belongs to another model"
        )
    return value


def load(
    params: Mapping[str, Param], checkpoint: Checkpoint, dtype: jnp.dtype, device: jax.Device, *, progress: bool
) -> dict[str, jax.Array]:
    """Reads each parameter, casts it to dtype and places it on the device; one tensor is on the host at a time.

    Raises:
      ConfigError: a weight is missing or has the wrong shape; the text names it as the checkpoint does.
    """
    _check_names(params, checkpoint)
    weights: dict[str, jax.Array] = {}
    for name, param in tqdm(params.items(), desc="Loading weights", unit="tensor", disable=not progress, leave=False):
        weights[name] = jax.device_put(_read(param, checkpoint).astype(dtype), device)
    return weights


@partial(jax.jit, static_argnames=("param", "dtype"))
def _random(param: Param, dtype: jnp.dtype, key: jax.Array) -> jax.Array:
    return (param.mean + param.scale * jax.random.normal(key, param.shape, jnp.float32)).astype(dtype)


def random(params: Mapping[str, Param], dtype: jnp.dtype, device: jax.Device, seed: int) -> dict[str, jax.Array]:
    """Random weights of the true shapes, made on the device."""
    with jax.default_device(device):
        key = jax.random.key(seed)
        return {
            name: _random(param, dtype, jax.random.fold_in(key, i)) for i, (name, param) in enumerate(params.items())
        }
