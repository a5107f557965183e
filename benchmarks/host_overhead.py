"""What does a decode step cost on the host: schedule, pack and commit, with a device that takes no time?"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time

import numpy as np

from tokenspeed import __version__
from tokenspeed.engine.commit import commit
from tokenspeed.engine.prefix_cache import PrefixCache
from tokenspeed.engine.roster import Roster
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.types import NO_TOKEN, Request, RunnerLimits, SamplingParams, Schedule, StepResult

PROMPT_TOKENS = 512
PAGE_SIZE = 16
LIMIT_US = {1: 100, 64: 300, 256: 800, 1024: 2500}
"""Bars on the median."""


def decoding_roster(num_seqs: int, num_steps: int, *, overlap: bool) -> tuple[Roster, Scheduler]:
    """A roster whose sequences have all been prefilled, with one decode step in flight if overlapped."""
    pages = num_seqs * ((PROMPT_TOKENS + num_steps) // PAGE_SIZE + 12) + 1
    limits = RunnerLimits(
        num_pages=max(pages, 131072 // PAGE_SIZE + 1),
        page_size=PAGE_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=131072,
        vocab_size=128256,
    )
    roster = Roster(limits, share_prefixes=True, seed=0)
    scheduler = Scheduler(roster)
    rng = np.random.default_rng(0)
    for number in range(num_seqs):
        prompt = rng.integers(0, limits.vocab_size, PROMPT_TOKENS, dtype=np.int32)
        sampling = SamplingParams(max_tokens=None, ignore_eos=True)
        roster.add(_request(number, sampling), prompt)
    while roster.num_waiting or roster.prefilling:
        commit(roster, instant(scheduler.schedule()))
    if overlap:
        scheduler.schedule()
    return roster, scheduler


def _request(number: int, sampling: SamplingParams) -> Request:
    return Request(request_id=f"r{number}", prompt_ids=(), sampling=sampling, eos_ids=(2,), arrival_time=time.time())


def instant(schedule: Schedule | None) -> StepResult:
    """The result of a device that takes no time."""
    assert schedule is not None
    tokens = np.where(schedule.samples, np.int32(7), np.int32(NO_TOKEN))
    return StepResult(schedule.step_id, tokens, None, ())


def measure(num_seqs: int, num_steps: int, *, overlap: bool) -> dict[str, float]:
    """Microseconds of schedule and commit a decode step: medians, and the 99th percentile of their sum."""
    roster, scheduler = decoding_roster(num_seqs, num_steps + 20, overlap=overlap)
    times = np.zeros((num_steps, 2))
    for step in range(-20, num_steps):
        start = time.perf_counter()
        scheduler.schedule()
        middle = time.perf_counter()
        result = instant(roster.in_flight[0].schedule)
        begin = time.perf_counter()
        deltas = commit(roster, result)
        end = time.perf_counter()
        assert len(deltas) == num_seqs
        if step >= 0:
            times[step] = middle - start, end - begin
    total = times.sum(axis=1)
    return {
        "schedule_us": float(np.median(times[:, 0]) * 1e6),
        "commit_us": float(np.median(times[:, 1]) * 1e6),
        "p50_us": float(np.median(total) * 1e6),
        "p99_us": float(np.percentile(total, 99) * 1e6),
    }


def measure_lookup(num_tokens: int) -> float:
    """Milliseconds to find a prompt that is wholly in the prefix cache; median of 9."""
    pages = num_tokens // PAGE_SIZE
    cache = PrefixCache(pages + 1, PAGE_SIZE)
    ids = np.random.default_rng(1).integers(0, 128256, num_tokens, dtype=np.int32)
    parent = None
    for page in range(pages):
        parent = cache.publish(parent, None, ids[page * PAGE_SIZE : (page + 1) * PAGE_SIZE].tobytes(), page + 1)
    times: list[float] = []
    for _ in range(9):
        start = time.perf_counter()
        found = cache.match(ids, None, pages)
        times.append(time.perf_counter() - start)
        assert len(found) == pages
    return float(np.median(times) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=sorted(LIMIT_US))
    arguments = parser.parse_args()
    rows = {count: measure(count, arguments.steps, overlap=True) for count in arguments.num_seqs}
    lookup = measure_lookup(131072)
    print(f"{'sequences':>9} {'schedule':>9} {'commit':>9} {'p50':>9} {'p99':>9} {'bar':>6}   (microseconds a step)")
    for count, row in rows.items():
        cells = " ".join(f"{row[key]:9.0f}" for key in ("schedule_us", "commit_us", "p50_us", "p99_us"))
        print(f"{count:9d} {cells} {LIMIT_US.get(count, 0):6d}")
    print(f"prefix look-up of 131072 tokens, all cached, pages of {PAGE_SIZE}: {lookup:.2f} ms (bar 5)")
    commit_hash = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "benchmark": "host_overhead",
                "commit": commit_hash.stdout.strip(),
                "tokenspeed": __version__,
                "python": sys.version.split()[0],
                "numpy": np.__version__,
                "device": platform.processor() or platform.machine(),
                "cpus": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "steps": arguments.steps,
                "prompt_tokens": PROMPT_TOKENS,
                "page_size": PAGE_SIZE,
                "by_num_seqs": rows,
                "lookup_131072_ms": lookup,
                "share_of_bar": {n: row["p50_us"] / LIMIT_US[n] for n, row in rows.items() if n in LIMIT_US},
            }
        )
    )


if __name__ == "__main__":
    main()
