"""How fast does SmolLM2 answer on this device? Decode tokens a second by batch, and prefill, through `LLM`.

`python benchmarks/gpu_first_tokens.py [MODEL]`: a table, then one line of JSON.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time

import jax

from tokenspeed import LLM, SamplingParams, __version__

PROMPT = 512
OUTPUT = 128
RUNS = 3


def seconds(llm: LLM, batch: int, tokens: int) -> float:
    """Median wall time of `batch` prompts of PROMPT ids with `tokens` outputs each, no prefix shared."""
    times: list[float] = []
    for _ in range(RUNS + 1):
        prompts = [random.choices(range(1000, 40000), k=PROMPT) for _ in range(batch)]
        start = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def main() -> None:
    """Prints the table and the JSON line."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    start = time.perf_counter()
    llm = LLM(model, max_model_len=2048, max_num_seqs=64, max_num_batched_tokens=2048, progress=False)
    ready = time.perf_counter() - start
    text = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))[0].text
    rows: list[dict[str, float]] = []
    for batch in (1, 8, 64):
        short, long = seconds(llm, batch, 1), seconds(llm, batch, OUTPUT + 1)
        step = (long - short) / OUTPUT
        rows.append({"batch": batch, "ms_a_token": step * 1e3, "tokens_a_second": batch / step, "prefill_s": short})
        print(f"batch {batch:3d}: {step * 1e3:7.3f} ms a token, {batch / step:9.0f} tokens/s, prefill {short:.3f} s")
    device = jax.devices()[0]
    print(
        json.dumps(
            {
                "benchmark": "gpu_first_tokens",
                "version": __version__,
                "jax": jax.__version__,
                "python": platform.python_version(),
                "device": device.device_kind,
                "model": model.rsplit("/", 1)[-1],
                "prompt": PROMPT,
                "output": OUTPUT,
                "ready_s": ready,
                "text": text,
                "rows": rows,
            }
        )
    )
    llm.close()


if __name__ == "__main__":
    main()
