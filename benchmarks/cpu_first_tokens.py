"""How fast does SmolLM2 answer on a CPU, beside transformers (float32) and llama.cpp (the same file), two threads each?

`python benchmarks/cpu_first_tokens.py [MODEL.gguf] [--peer-python PYTHON]`: PYTHON is an interpreter that has torch,
transformers, gguf and xllamacpp; without it only tokenspeed runs. Every engine runs in a process of its own, in turn,
RUNS times; the medians are compared. A table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tokenspeed

PROMPT = "The history of the city begins with"
OUTPUT = 64
RUNS = 3

OURS = """
import json, sys, time
from tokenspeed import LLM, SamplingParams
llm = LLM(sys.argv[1], progress=False, max_model_len=1024)
greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
def rate(n):
    best = 0.0
    for turn in range(3):
        prompts = [f"{turn} {i} {PROMPT}" for i in range(n)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, greedy, use_tqdm=False)
        best = max(best, sum(len(o.token_ids) for o in outputs) / (time.perf_counter() - start))
    return best
print(json.dumps({"batch 1": rate(1), "batch 16": rate(16)}))
llm.close()
"""

TRANSFORMERS = """
import json, sys, time, torch, pathlib
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(2)
path = pathlib.Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
ids = tokenizer(PROMPT, return_tensors="pt")
best = 0.0
with torch.inference_mode():
    for _ in range(3):
        start = time.perf_counter()
        model.generate(**ids, do_sample=False, min_new_tokens=OUTPUT, max_new_tokens=OUTPUT)
        best = max(best, OUTPUT / (time.perf_counter() - start))
print(json.dumps({"batch 1": best}))
"""

LLAMA_CPP = """
import json, sys, time, xllamacpp as x
params = x.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx = 1024
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.n_parallel = 1
server = x.Server(params)
best = 0.0
for turn in range(3):
    request = {"prompt": f"{turn} {PROMPT}", "n_predict": OUTPUT, "temperature": 0.0, "ignore_eos": True}
    start = time.perf_counter()
    server.handle_completions(request)
    best = max(best, OUTPUT / (time.perf_counter() - start))
print(json.dumps({"batch 1": best}))
"""


def run(python: str, program: str, model: Path) -> dict[str, float]:
    """One process: the best of its three turns by batch, tokens a second."""
    head = f"PROMPT = {PROMPT!r}; OUTPUT = {OUTPUT}\n"
    done = subprocess.run([python, "-c", head + program, str(model)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{python} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", default=None)
    arguments = parser.parse_args()
    engines = {"tokenspeed": (sys.executable, OURS)}
    if arguments.peer_python:
        engines["transformers"] = (arguments.peer_python, TRANSFORMERS)
        engines["llama.cpp"] = (arguments.peer_python, LLAMA_CPP)
    rates: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for _ in range(RUNS):
        for name, (python, program) in engines.items():
            rates[name].append(run(python, program, arguments.model))
    medians = {
        f"{name}, {batch}": statistics.median(rate[batch] for rate in found)
        for name, found in rates.items()
        for batch in found[0]
    }
    for name, rate in medians.items():
        print(f"{name:28s} {rate:8.1f} tokens/s")
    ratios = {
        f"{batch} / {peer}": medians[f"tokenspeed, {batch}"] / medians[f"{peer}, batch 1"]
        for batch in ("batch 1", "batch 16")
        for peer in list(engines)[1:]
    }
    for name, ratio in ratios.items():
        print(f"{name:28s} {ratio:8.2f} x")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "cpu_first_tokens",
                "commit": commit.stdout.strip(),
                "version": tokenspeed.__version__,
                "jax": version("jax"),
                "python": platform.python_version(),
                "cpus": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "model": arguments.model.name,
                "output": OUTPUT,
                "runs": rates,
                "tokens_a_second": medians,
                "ratios": ratios,
            }
        )
    )


if __name__ == "__main__":
    main()
