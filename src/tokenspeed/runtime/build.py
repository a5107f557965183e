"""Builds a model runner from what the user asked for: device, dtypes, weights, kernels, limits and the page pool's size."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from pallas_kernels import cpu, find, select
from tokenspeed.config import EngineConfig, ModelConfig, environment
from tokenspeed.layers.attention import AttentionKernels
from tokenspeed.layers.linear import PackedWeight, packed
from tokenspeed.layers.rope import shares_prefixes
from tokenspeed.models import dense
from tokenspeed.runtime.model_runner import ModelRunner, temporary_bytes
from tokenspeed.runtime.step import StepModel
from tokenspeed.types import ConfigError, RunnerLimits
from tokenspeed.weights import load
from tokenspeed.weights.checkpoint import Checkpoint, QuantizedTensor
from tokenspeed.weights.param import Param

log = logging.getLogger(__name__)


class _Defaults(NamedTuple):
    """What a platform gets where the user says nothing."""

    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    bucket_factor: int


_CPU = _Defaults(page_size=32, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=8192, bucket_factor=4)
_GPU = _Defaults(page_size=16, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=1 << 30, bucket_factor=2)

CPU_MEMORY_SHARE = 16
"""On a CPU the cache gets one part in this many of the machine's memory."""


def _compute_dtype(config: EngineConfig, model: ModelConfig, platform: str) -> jnp.dtype:
    if config.dtype == "auto":
        if platform == "cpu":
            return jnp.dtype("float32")
        return jnp.dtype("bfloat16" if model.checkpoint_dtype == "float32" else model.checkpoint_dtype)
    return jnp.dtype(config.dtype)


def _enable_compilation_cache() -> None:
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(environment().home / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def _coarse(pages: int) -> int:
    """Rounds down to three significant bits, so that a few free bytes more or less do not change every program."""
    shift = max(pages.bit_length() - 3, 0)
    return pages >> shift << shift


def _page_bytes(model: ModelConfig, page_size: int, cache_dtype: jnp.dtype) -> int:
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * page_size * cache_dtype.itemsize


def _cache_budget(config: EngineConfig, memory: Mapping[str, int] | None, largest_step: Callable[[], int]) -> int:
    """Bytes the cache may take; `memory` is what a device with its own tells of it."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if memory is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // CPU_MEMORY_SHARE
    return int(memory["bytes_limit"] * config.gpu_memory_utilization) - memory["bytes_in_use"] - largest_step()


def _max_model_len(config: EngineConfig, model: ModelConfig, defaults: _Defaults) -> int:
    own = model.max_position_embeddings
    if config.max_model_len is None:
        return min(own, defaults.max_model_len)
    if config.max_model_len > own:
        raise ConfigError(
            f"--max-model-len={config.max_model_len} is more than the {own} positions this model was made for; "
            f"lower it to {own} or less"
        )
    return config.max_model_len


def _sized(config: EngineConfig, limits: RunnerLimits, page_bytes: int, budget: int) -> RunnerLimits:
    """The limits with a page count that fits, and a context that fits in the pool."""
    size = limits.page_size
    useful = limits.max_num_seqs * -(-limits.max_model_len // size) + 1
    pages = config.num_pages if config.num_pages is not None else min(_coarse(max(budget, 0) // page_bytes), useful)
    longest = (pages - 1) * size
    if longest >= limits.max_model_len:
        return limits._replace(num_pages=pages)
    if config.max_model_len is not None or longest < size:
        raise ConfigError(
            f"the KV cache has room for {max(longest, 0)} tokens and --max-model-len is {limits.max_model_len}; lower it, "
            "or raise --gpu-memory-utilization, --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )
    log.warning(
        "--max-model-len lowered from %d to %d, the tokens the KV cache has room for", limits.max_model_len, longest
    )
    return limits._replace(num_pages=pages, max_model_len=longest)


def _pack(param: Param, tensor: QuantizedTensor) -> PackedWeight | None:
    return packed(*tensor, gated=param.gated)


def _load_cpu_kernels(platform: str) -> bool:
    """Whether the CPU's own kernels can be used, building them if need be; says why not."""
    if platform != "cpu":
        return False
    reason = cpu.load(environment().home / "kernels")
    if reason is not None:
        log.warning("slower than need be: the CPU kernels cannot be built: %s", reason)
    return reason is None


def build_runner(
    config: EngineConfig, checkpoint: Checkpoint, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> ModelRunner:
    """Loads the model and compiles its step. `on_progress(done, total)` is called after each program.

    Raises:
      ConfigError: the model, a flag or the memory does not allow it.
    """
    if config.compilation_cache:
        _enable_compilation_cache()
    model = checkpoint.config
    device = jax.local_devices()[0]
    defaults = _CPU if device.platform == "cpu" else _GPU
    dtype = _compute_dtype(config, model, device.platform)
    cache_dtype = jnp.dtype("float32") if device.platform == "cpu" else dtype
    page_size = config.page_size or defaults.page_size
    max_num_batched_tokens = config.max_num_batched_tokens or max(
        defaults.max_num_batched_tokens, config.max_num_seqs or 0
    )
    limits = RunnerLimits(
        num_pages=2,
        page_size=page_size,
        max_num_seqs=min(config.max_num_seqs or defaults.max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=_max_model_len(config, model, defaults),
        vocab_size=model.vocab_size,
    )
    has_cpu_kernels = _load_cpu_kernels(device.platform)
    case: dict[str, Any] = {
        "platform": device.platform,
        "dtype": str(dtype),
        "kv_dtype": str(cache_dtype),
        "head_dim": model.head_dim,
        "page_size": page_size,
    }
    fused = find("attend_qkv", **case)
    kernels = AttentionKernels(
        attend=select("paged_attention", **case).fn,
        write=select("write_kv", **case).fn,
        attend_qkv=None if fused is None else fused.fn,
    )
    declared = dense.params(model)
    sharding = SingleDeviceSharding(device)
    if config.load_format == "dummy":
        weights = load.random(declared, dtype, sharding, config.seed)
    else:
        # A dtype that was asked for is what matrices are unpacked to.
        pack = _pack if has_cpu_kernels and config.dtype == "auto" else None
        weights = load.load(declared, checkpoint, dtype, sharding, pack=pack, progress=config.progress)
    step_model = StepModel(config=model, dtype=dtype, kernels=kernels)
    budget = _cache_budget(
        config,
        None if device.platform == "cpu" else device.memory_stats(),
        lambda: temporary_bytes(step_model, weights, limits, cache_dtype, defaults.bucket_factor),
    )
    limits = _sized(config, limits, _page_bytes(model, page_size, cache_dtype), budget)
    if not shares_prefixes(model.rope, limits.max_model_len):
        log.info("prefixes are not shared: under dynamic rope scaling their keys depend on the whole prompt's length")
        limits = limits._replace(shares_prefixes=False)
    return ModelRunner(
        step_model,
        weights,
        limits,
        sharding,
        cache_dtype=cache_dtype,
        bucket_factor=defaults.bucket_factor,
        eager=config.enforce_eager,
        on_progress=on_progress,
    )
