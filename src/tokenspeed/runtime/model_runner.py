"""The only owner of device arrays: loads weights, sizes the page pool, compiles the step, and runs schedules."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring
from jax.sharding import Sharding

from tokenspeed.layers.linear import PackedWeight
from tokenspeed.runtime import state as device_state
from tokenspeed.runtime import step
from tokenspeed.runtime.batch import Bucket, pack
from tokenspeed.runtime.state import SlotRow, SlotRows
from tokenspeed.runtime.step import SCORE_ROWS, StepModel
from tokenspeed.types import MAX_LOGPROBS, RunnerLimits, Schedule, ScoreArrays, StepResult

log = logging.getLogger(__name__)

PAGE_UPDATES = 1024
"""Page-table entries the separate update program carries."""

MIN_TOKENS = 16
"""Smallest token bucket."""


class CompileCounter:
    """Counts backend compilations in this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1

    def close(self) -> None:
        """Stops counting."""
        monitoring.unregister_event_duration_listener(self._listen)


def ladder(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Sizes from smallest, each `factor` times the last, and largest itself."""
    sizes: list[int] = []
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= factor
    return (*sizes, largest)


def _fit(sizes: Sequence[int], wanted: int) -> int:
    return next(size for size in sizes if size >= wanted)


def score_arrays(packed: np.ndarray) -> ScoreArrays:
    """Reads step.pack_scores' int32 [R, 42]."""
    n = MAX_LOGPROBS
    return ScoreArrays(
        logprobs=packed[:, 0].copy().view(np.float32),
        ranks=packed[:, 1],
        top_ids=packed[:, 2 : 2 + n],
        top_logprobs=np.ascontiguousarray(packed[:, 2 + n : 2 + 2 * n]).view(np.float32),
    )


class PendingStep(NamedTuple):
    """A dispatched step whose results are on their way to the host."""

    schedule: Schedule
    rows: jax.Array | None
    """int32 [bucket rows, 43]; None if no row samples."""
    prompt_scores: tuple[tuple[jax.Array, ...], ...]

    def result(self) -> StepResult:
        """Blocks until the device is done."""
        num_rows = self.schedule.num_rows
        token_ids, scores = np.full(num_rows, -1, np.int32), None
        if self.rows is not None:
            rows = np.asarray(self.rows)[:num_rows]
            token_ids = rows[:, 0]
            scores = score_arrays(rows[:, 1:]) if self.schedule.wants_logprobs else None
        return StepResult(
            step_id=self.schedule.step_id,
            token_ids=token_ids,
            scores=scores,
            prompt_scores=tuple(
                score_arrays(np.concatenate([np.asarray(part) for part in parts])[: len(asked.target_ids)])
                for asked, parts in zip(self.schedule.prompt_scores, self.prompt_scores, strict=True)
            ),
        )


@dataclass(frozen=True)
class Buckets:
    """The compiled shapes."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, limits: RunnerLimits, factor: int) -> Buckets:
        """Sizes that grow by `factor`: fewer to compile, or less padding."""
        tokens = limits.max_num_batched_tokens
        return cls(rows=ladder(1, limits.max_num_seqs, factor), tokens=ladder(min(MIN_TOKENS, tokens), tokens, factor))


class Programs:
    """The step's programs, compiled ahead of time for every bucket, or at first use.

    Weights and state cross the jit border as flat tuples of arrays; the state is donated.
    """

    def __init__(
        self,
        model: StepModel,
        limits: RunnerLimits,
        buckets: Buckets,
        weights: dict[str, Any],
        state_shapes: device_state.DeviceState,
    ) -> None:
        self._model, self._limits, self._buckets = model, limits, buckets
        leaves, self._weights_tree = jax.tree.flatten(weights)
        self._weights = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        state_leaves, self._state_tree = jax.tree.flatten(state_shapes)
        self._state = tuple(state_leaves)
        self._compiled: dict[tuple[str, int], Any] = {}

    def decode_bucket(self, rows: int) -> Bucket:
        return Bucket(0, rows, rows)

    def backbone_bucket(self, tokens: int) -> Bucket:
        rows = self._limits.max_num_seqs
        return Bucket(tokens, rows, rows + tokens // self._limits.page_size)

    def head_bucket(self, rows: int) -> Bucket:
        return Bucket(0, rows, 0)

    def _jit(self, fn: Callable[..., Any], *, weights: bool, state: bool) -> Any:
        """fn over records -> jitted fn over flat leaves: (weights?, state?, rest) -> (state leaves?, rest)."""

        def flat(*args: Any) -> Any:
            rest = list(args)
            records: list[Any] = []
            if weights:
                records.append(self._weights_tree.unflatten(rest.pop(0)))
            if state:
                records.append(self._state_tree.unflatten(rest.pop(0)))
            out = fn(*records, *rest)
            if not state:
                return out
            if isinstance(out, device_state.DeviceState):
                return tuple(jax.tree.leaves(out))
            return tuple(jax.tree.leaves(out[0])), *out[1:]

        donate = (1,) if weights and state else (0,) if state else ()
        return jax.jit(flat, donate_argnums=donate)

    def _lower(self, kind: str, size: int) -> Any:
        model, limits = self._model, self._limits
        packed = lambda bucket: jax.ShapeDtypeStruct((sum(bucket.sizes),), jnp.int32)  # noqa: E731
        hidden = lambda rows: jax.ShapeDtypeStruct((rows, model.config.hidden_size), model.dtype)  # noqa: E731
        if kind == "decode":
            bucket = self.decode_bucket(size)
            fn = self._jit(partial(step.decode, model, bucket), weights=True, state=True)
            return fn.lower(self._weights, self._state, packed(bucket))
        if kind == "backbone":
            bucket = self.backbone_bucket(size)
            fn = self._jit(partial(step.backbone, model, bucket), weights=True, state=True)
            return fn.lower(self._weights, self._state, packed(bucket))
        if kind == "head":
            bucket = self.head_bucket(size)
            fn = self._jit(partial(step.head, model, bucket, size), weights=True, state=True)
            return fn.lower(self._weights, self._state, hidden(limits.max_num_seqs), packed(bucket))
        if kind == "prompt_scores":
            fn = self._jit(partial(step.prompt_scores, model), weights=True, state=False)
            targets = jax.ShapeDtypeStruct((SCORE_ROWS,), jnp.int32)
            return fn.lower(self._weights, hidden(size), jax.ShapeDtypeStruct((), jnp.int32), targets)
        if kind == "admit":
            fn = self._jit(device_state.admit, weights=False, state=True)
            return fn.lower(self._state, self._slot_row())
        assert kind == "update_pages", kind
        fn = self._jit(device_state.update_pages, weights=False, state=True)
        return fn.lower(self._state, jax.ShapeDtypeStruct((PAGE_UPDATES, 3), jnp.int32))

    def _slot_row(self) -> SlotRow:
        sampling = self._state_tree.unflatten(self._state).sampling
        return jax.eval_shape(lambda s: device_state.row_of(s, jnp.int32(0)), sampling)

    def keys(self) -> list[tuple[str, int]]:
        """Every program, largest first."""
        rows, tokens = self._buckets.rows[::-1], self._buckets.tokens[::-1]
        return [
            *(("backbone", size) for size in tokens),
            *(("decode", size) for size in rows),
            *(("head", size) for size in rows),
            *(("prompt_scores", size) for size in tokens),
            ("admit", 0),
            ("update_pages", 0),
        ]

    def compile_all(self, on_progress: Callable[[int, int], None]) -> None:
        """Lowers one after another, compiles in parallel threads."""
        keys = self.keys()
        with ThreadPoolExecutor(4) as pool:
            futures = {key: pool.submit(self._lower(*key).compile) for key in keys}
            for done, (key, future) in enumerate(futures.items(), 1):
                self._compiled[key] = future.result()
                on_progress(done, len(keys))

    def get(self, kind: str, size: int = 0) -> Any:
        """The compiled program; compiles it now if it was not ahead of time."""
        key = (kind, size)
        if key not in self._compiled:
            self._compiled[key] = self._lower(kind, size).compile()
        return self._compiled[key]


def temporary_bytes(
    model: StepModel, weights: dict[str, Any], limits: RunnerLimits, cache_dtype: jnp.dtype, bucket_factor: int
) -> int:
    """Device memory the largest programs need beside weights and state, found by compiling them with a tiny pool."""
    shapes = jax.eval_shape(partial(device_state.zeros, model.config, limits, cache_dtype))
    programs = Programs(model, limits, Buckets.of(limits, bucket_factor), weights, shapes)
    largest = (("backbone", limits.max_num_batched_tokens), ("decode", limits.max_num_seqs))
    analyses = [programs.get(kind, size).memory_analysis() for kind, size in largest]
    fixed = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    return fixed + max(a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in analyses)


class ModelRunner:
    """Runs schedules on one device. `dispatch` returns at once; results come through `PendingStep.result`."""

    def __init__(
        self,
        model: StepModel,
        weights: dict[str, Any],
        limits: RunnerLimits,
        sharding: Sharding,
        *,
        cache_dtype: jnp.dtype,
        bucket_factor: int,
        eager: bool,
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.limits = limits
        self._buckets = Buckets.of(limits, bucket_factor)
        zeros = partial(device_state.zeros, model.config, limits, cache_dtype)
        self._programs = Programs(model, limits, self._buckets, weights, jax.eval_shape(zeros))
        if not eager:
            self._programs.compile_all(on_progress)
        self._weights = tuple(jax.tree.leaves(weights))
        self._state = tuple(jax.tree.leaves(jax.jit(zeros, out_shardings=sharding)()))
        self._slot_rows = SlotRows(model.config.vocab_size)
        self._compiles = CompileCounter()
        packed = any(isinstance(weight, PackedWeight) for weight in weights.values())
        self.facts: dict[str, str] = {
            "device": ", ".join(f"{device.platform} {device.device_kind}" for device in sharding.device_set),
            "dtype": f"{model.dtype}{', packed weights' if packed else ''}",
            "kv_cache": f"{limits.num_pages} pages of {limits.page_size} tokens, {cache_dtype}",
            "attention": (model.kernels.attend_qkv or model.kernels.attend).__module__,
        }

    @property
    def num_compiles(self) -> int:
        """Backend compilations in this process since the runner was ready."""
        return self._compiles.count

    def padded_tokens(self, schedule: Schedule) -> int:
        """Tokens of the bucket this schedule runs in."""
        if schedule.decode_only:
            return _fit(self._buckets.rows, schedule.num_rows)
        return _fit(self._buckets.tokens, schedule.num_tokens)

    def _send_pages(self, updates: np.ndarray) -> None:
        for start in range(0, len(updates), PAGE_UPDATES):
            part = np.zeros((PAGE_UPDATES, 3), np.int32)
            part[:, 0] = self.limits.max_num_seqs
            chunk = updates[start : start + PAGE_UPDATES]
            part[: len(chunk)] = chunk
            self._state = self._programs.get("update_pages")(self._state, part)

    def dispatch(self, schedule: Schedule) -> PendingStep:
        """Starts a step; nothing here waits for the device."""
        for params in schedule.new_slots:
            self._state = self._programs.get("admit")(self._state, self._slot_rows.row(params))
        size = self.padded_tokens(schedule)
        programs = self._programs
        bucket = programs.decode_bucket(size) if schedule.decode_only else programs.backbone_bucket(size)
        if len(schedule.page_updates) > bucket.updates:
            self._send_pages(schedule.page_updates)
            schedule = schedule._replace(page_updates=schedule.page_updates[:0])
        packed = pack(schedule, bucket, self.limits.max_num_seqs)
        if schedule.decode_only:
            self._state, rows = programs.get("decode", size)(self._weights, self._state, packed)
            rows.copy_to_host_async()
            return PendingStep(schedule, rows, ())
        return self._dispatch_mixed(schedule, size, packed)

    def _dispatch_mixed(self, schedule: Schedule, size: int, packed: np.ndarray) -> PendingStep:
        programs = self._programs
        self._state, last_hidden, hidden = programs.get("backbone", size)(self._weights, self._state, packed)
        rows = None
        if schedule.samples.any():
            num_rows = _fit(self._buckets.rows, schedule.num_rows)
            packed_rows = pack(schedule, programs.head_bucket(num_rows), self.limits.max_num_seqs)
            self._state, rows = programs.get("head", num_rows)(self._weights, self._state, last_hidden, packed_rows)
            rows.copy_to_host_async()
        scores: list[tuple[jax.Array, ...]] = []
        for asked in schedule.prompt_scores:
            parts: list[jax.Array] = []
            for begin in range(0, len(asked.target_ids), SCORE_ROWS):
                targets = np.zeros(SCORE_ROWS, np.int32)
                chunk = asked.target_ids[begin : begin + SCORE_ROWS]
                targets[: len(chunk)] = chunk
                part = programs.get("prompt_scores", size)(
                    self._weights, hidden, np.int32(asked.start + begin), targets
                )
                part.copy_to_host_async()
                parts.append(part)
            scores.append(tuple(parts))
        return PendingStep(schedule, rows, tuple(scores))

    def close(self) -> None:
        """Frees the weights and the cache on the device."""
        self._compiles.close()
        for array in (*self._weights, *self._state):
            array.delete()
        self._weights, self._state = (), ()
