"""How near are the C++ kernels to the machine's limits, and how far ahead of XLA, on the shapes of a served model?

Weights and caches are rotated, so that they come from memory and not from a cache. Two of the models' shapes are known:
SmolLM2-135M (4-bit groups with offsets, 8-bit head) and Qwen2.5-1.5B (4-bit, 6-bit head).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cpu
from pallas_kernels.attention import xla as xla_attention
from tokenspeed.config import environment

PAGE_SIZE = 32
ROTATE_BYTES = 96 << 20
"""More than any cache holds."""


class Model(NamedTuple):
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    head_bits: int

    def shapes(self) -> dict[str, tuple[int, int, int, bool]]:
        """Rows, columns, bits and whether gated, of each projection."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (q + 2 * kv, self.hidden, 4, False),
            "out": (self.hidden, q, 4, False),
            "gate_up": (2 * self.feed_forward, self.hidden, 4, True),
            "down": (self.hidden, self.feed_forward, 4, False),
            "head": (self.vocabulary, self.hidden, self.head_bits, False),
        }


MODELS = {
    "smollm2": Model(30, 576, 1536, 9, 3, 64, 49152, 8),
    "qwen2.5-1.5b": Model(28, 1536, 8960, 12, 2, 128, 151936, 6),
}


@contextlib.contextmanager
def scheduling(realtime: bool) -> Iterator[None]:
    """All threads of this process before all others, for a moment, if asked."""

    def set_policy(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    if realtime:
        set_policy(os.SCHED_FIFO, 1)
    try:
        yield
    finally:
        if realtime:
            set_policy(os.SCHED_OTHER, 0)
            time.sleep(0.3)


class Clock(NamedTuple):
    seconds: float
    realtime: bool

    def median(self, run: Callable[..., Any], *arguments: Any) -> float:
        """Median seconds of a call, after one that is not counted."""
        jax.block_until_ready(run(*arguments))
        times: list[float] = []
        with scheduling(self.realtime):
            end = time.perf_counter() + self.seconds
            while len(times) < 3 or time.perf_counter() < end:
                start = time.perf_counter()
                jax.block_until_ready(run(*arguments))
                times.append(time.perf_counter() - start)
        return float(np.median(times))


def weight(rng: np.random.Generator, rows: int, columns: int, bits: int, gated: bool) -> cpu.PackedWeight:
    """A random weight of small entries; 4 bits with offsets of their own, as Q4_1 and Q4_K have."""
    low, high = (-127, 127) if bits == 8 else (0, (1 << bits) - 1)
    values = rng.integers(low, high, (rows, columns), np.int8, endpoint=True)
    group = 16 if bits == 6 else 32
    scales = np.full((rows, columns // group), 2.0 ** -(bits + 3), np.float32)
    offsets = -scales * (rng.integers(7, 10, scales.shape) if bits == 4 else 1 << (bits - 1)) if bits < 8 else None
    return cpu.pack(values, scales, offsets, group, gated=gated)


def rotated(rng: np.random.Generator, first: np.ndarray) -> list[jax.Array]:
    """Enough copies that no cache holds them; the same values will do."""
    return [jnp.array(first, copy=True) + first.dtype.type(0) for _ in range(max(1, ROTATE_BYTES // first.nbytes))]


def chained(product: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array, list[jax.Array]], jax.Array]:
    """All products one after the other (each input depends on the result before it)."""

    def run(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = x.at[0, 0].add(1e-9 * product(x, w)[0, 0])
        return x

    return jax.jit(run)


def matmuls(model: Model, rows: list[int], clock: Clock, with_xla: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    results: list[dict[str, Any]] = []
    for name, (n, k, bits, gated) in model.shapes().items():
        packed = weight(rng, n, k, bits, gated)
        blocks, layout = rotated(rng, packed.arrays[0]), packed.layout
        gate = "silu" if gated else None
        ours = chained(lambda x, b, layout=layout, gate=gate: cpu.quantized_matmul(x, b, layout, gate=gate))
        dense = rotated(rng, np.zeros((n, k), np.float32)) if with_xla else []
        theirs = chained(lambda x, w: jnp.einsum("mk,nk->mn", x, w))
        for m in rows:
            x = jnp.asarray(rng.standard_normal((m, k)).astype(np.float32))
            seconds = clock.median(ours, x, blocks) / len(blocks)
            row = {"op": name, "m": m, "n": n, "k": k, "bits": bits, "us": seconds * 1e6}
            row |= {"gb_s": packed.arrays[0].nbytes / seconds / 1e9, "gop_s": 2e-9 * m * n * k / seconds}
            if dense:
                row["xla_f32_us"] = clock.median(theirs, x, dense) / len(dense) * 1e6
            results.append(row)
    return results


def paged_case(rng: np.random.Generator, model: Model, lens: list[tuple[int, int]], dtype: type) -> tuple[Any, ...]:
    """Queries, caches of as many layers as it takes, and the batch; lens are (queries, context) a sequence."""
    pages = [-(-context // PAGE_SIZE) for _, context in lens]
    table, order = np.zeros((len(lens), max(pages)), np.int32), iter(rng.permutation(np.arange(1, sum(pages) + 1)))
    for row, count in zip(table, pages, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    shape = (sum(pages) + 1, model.kv_heads, model.head_dim, PAGE_SIZE)
    keys = rotated(rng, rng.standard_normal(shape).astype(dtype))
    values = [jnp.swapaxes(k, 2, 3) + dtype(0) for k in keys]
    lengths = np.array(lens, np.int32)
    cu_q_lens = np.concatenate([[0], np.cumsum(lengths[:, 0])]).astype(np.int32)
    q = rng.standard_normal((cu_q_lens[-1], model.heads, model.head_dim)).astype(np.float32)
    batch = (table, lengths[:, 1], cu_q_lens, np.array([len(lens)], np.int32))
    return jnp.asarray(q), list(zip(keys, values, strict=True)), tuple(map(jnp.asarray, batch))


def in_layers(kernel: Callable[..., jax.Array], batch: tuple[jax.Array, ...], options: dict[str, Any]):
    """Attention over one cache after the other, each layer's result the next one's queries."""

    def run(q: jax.Array, caches: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
        for keys, values in caches:
            q = kernel(q, keys, values, *batch, **options)
        return q

    return jax.jit(run)


def attention(model: Model, clock: Clock, with_xla: bool) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    cases = {
        "decode 1 x 512": [(1, 512)],
        "decode 1 x 4096": [(1, 4096)],
        "decode 16 x 512": [(1, 512)] * 16,
        "prefill 256": [(256, 256)],
        "prefill 256 over 4096": [(256, 4096)],
    }
    results: list[dict[str, Any]] = []
    for name, lens in cases.items():
        for dtype in (np.float32, np.float16):
            q, caches, batch = paged_case(rng, model, lens, dtype)
            options = {"max_q_len": max(queries for queries, _ in lens), "scale": 0.125}

            ours, theirs = (in_layers(kernel, batch, options) for kernel in (cpu.paged_attention, xla_attention))
            seconds = clock.median(ours, q, caches) / len(caches)
            seen = sum(sum(range(context - queries + 1, context + 1)) for queries, context in lens)
            read = sum(context for _, context in lens) * 2 * model.kv_heads * model.head_dim * dtype().itemsize
            row = {"op": name, "dtype": dtype.__name__, "us": seconds * 1e6, "gb_s": read / seconds / 1e9}
            row["gflop_s"] = 4e-9 * seen * model.heads * model.head_dim / seconds
            if with_xla and dtype is np.float32:
                row["xla_us"] = clock.median(theirs, q, caches) / len(caches) * 1e6
            results.append(row)
    return results


def steps(model: Model, rows: list[int], context: int, dtype: type, clock: Clock) -> list[dict[str, Any]]:
    """A whole decode step but for the embedding and sampling: five calls a layer, and the head."""
    rng = np.random.default_rng(2)
    shapes = model.shapes()
    packed = {name: weight(rng, *shape) for name, shape in shapes.items()}
    layers = [
        {name: jnp.array(w.arrays[0], copy=True) for name, w in packed.items() if name != "head"}
        for _ in range(model.layers)
    ]
    head = jnp.asarray(packed["head"].arrays[0])
    norm = cpu.Norm(jnp.ones(model.hidden), 1e-5)
    results: list[dict[str, Any]] = []
    for m in rows:
        _, caches, batch = paged_case(rng, model, [(1, context)] * m, dtype)
        caches = [tuple(part + dtype(0) for part in caches[0]) for _ in range(model.layers)]
        last, places = batch[0][:, (context - 1) // PAGE_SIZE], jnp.full(m, (context - 1) % PAGE_SIZE, jnp.int32)
        angles = jnp.ones((m, model.head_dim // 2))

        def step(
            h: jax.Array,
            caches: Any,
            layers: Any,
            head: jax.Array,
            batch=batch,
            last=last,
            places=places,
            angles=angles,
        ):
            def linear(name: str, x: jax.Array, blocks: jax.Array, **fused: Any) -> jax.Array:
                return cpu.quantized_matmul(x, blocks, packed[name].layout, **fused)

            written = []
            for (keys, values), w in zip(caches, layers, strict=True):
                qkv = linear("qkv", h, w["qkv"], norm=norm)
                where = (jnp.cos(angles), jnp.sin(angles), keys, values, last, places)
                attended, *cache = cpu.attend_qkv(qkv, *where, *batch, max_q_len=1, scale=0.125)
                written.append(tuple(cache))
                h = linear("out", attended, w["out"], residual=h)
                fed = linear("gate_up", h, w["gate_up"], norm=norm, gate="silu")
                h = linear("down", fed, w["down"], residual=h)
            return linear("head", h, head, norm=norm), written

        compiled = jax.jit(step, donate_argnums=1)
        h = jnp.asarray(rng.standard_normal((m, model.hidden)).astype(np.float32))
        state = {"caches": caches}

        def run(compiled=compiled, h=h, state=state) -> jax.Array:
            logits, state["caches"] = compiled(h, state["caches"], layers, head)
            return logits

        seconds = clock.median(run)
        results.append(
            {
                "op": "step",
                "m": m,
                "context": context,
                "dtype": dtype.__name__,
                "ms": seconds * 1e3,
                "tokens_s": m / seconds,
            }
        )
    return results


def read_bandwidth(clock: Clock) -> float:
    """GB/s of a sum over 256 MiB, by XLA on all threads."""
    x = jnp.ones((64, 1 << 20), jnp.float32)
    total = jax.jit(jnp.sum)
    return x.nbytes / clock.median(total, x) / 1e9


def show(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print("  ".join(f"{key} {value:.1f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 256])
    parser.add_argument("--context", type=int, default=512, help="of the whole steps")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-xla", action="store_true", help="leave out XLA's figures")
    parser.add_argument("--realtime", action="store_true", help="measure before all other processes (Linux, root)")
    arguments = parser.parse_args()
    reason = cpu.load(environment().home / "kernels", threads=arguments.threads)
    if reason is not None:
        raise SystemExit(f"the kernels cannot be built: {reason}")
    model, clock = MODELS[arguments.model], Clock(arguments.seconds, arguments.realtime)
    load = os.getloadavg()[0]
    bandwidth = read_bandwidth(clock)
    print(f"reading memory: {bandwidth:.1f} GB/s; load average {load:.1f}")
    tables: dict[str, list[dict[str, Any]]] = {}
    decoded = [m for m in arguments.rows if m <= 64]
    tables["steps"] = [
        row for dtype in (np.float32, np.float16) for row in steps(model, decoded, arguments.context, dtype, clock)
    ]
    show(tables["steps"])
    tables["matmuls"] = matmuls(model, arguments.rows, clock, not arguments.no_xla)
    show(tables["matmuls"])
    tables["attention"] = attention(model, clock, not arguments.no_xla)
    show(tables["attention"])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    about = {
        "benchmark": "cpu_kernels",
        "commit": commit.stdout.strip(),
        "jax": jax.__version__,
        "device": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": arguments.threads or os.cpu_count(),
        "load_average": load,
        "realtime": arguments.realtime,
        "model": arguments.model,
        "read_gb_s": bandwidth,
    }
    print(json.dumps(about | tables))


if __name__ == "__main__":
    main()
