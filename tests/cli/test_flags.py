"""The table of flags: every field has one, no name is given twice, and what it gives makes a configuration."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import pytest

from tokenspeed.cli.flags import SAMPLES, SAMPLING, SERVER
from tokenspeed.cli.kinds import Absent, Flag, Holds
from tokenspeed.cli.parser import Parser
from tokenspeed.config import EngineConfig, ServerConfig
from tokenspeed.types import ConfigError, SamplingParams

GROUPS = {**SERVER, "sampling": (*SAMPLES, *SAMPLING)}
FLAGS: list[Flag] = list(itertools.chain(*GROUPS.values()))
PARSER = Parser("serve", "Serves.", GROUPS)


def test_every_field_has_a_flag_and_every_flag_a_field() -> None:
    fields = {flag.field for flag in FLAGS if not isinstance(flag, Holds | Absent)}
    engine = {f"engine.{field.name}" for field in dataclasses.fields(EngineConfig)}
    server = {f"server.{field.name}" for field in dataclasses.fields(ServerConfig)}
    sampling = {f"sampling.{field.name}" for field in msgspec.structs.fields(SamplingParams)}
    assert fields == engine | server | sampling


def test_no_name_is_given_twice() -> None:
    names = [name for flag in FLAGS for name in flag.names.split()]
    assert len(names) == len(set(names))
    assert all(name.startswith("-") and "_" not in name for name in names)


def test_flags_make_configurations() -> None:
    given = PARSER.read(
        [
            "--model",
            "m",
            "--context-length",
            "4K",
            "--mem-fraction-static",
            "0.5",
            "--page-size",
            "32",
            "--chunked-prefill-size",
            "512",
            "--disable-radix-cache",
            "--disable-overlap-schedule",
            "--disable-cuda-graph",
            "--random-seed",
            "3",
            "--sampling-defaults",
            "openai",
            "--kv-cache-memory-bytes",
            "1G",
            "--no-use-tqdm-on-load",
            "--port",
            "0",
            "--api-key",
            "a",
            "--api-key",
            "b",
            "--disable-uvicorn-access-log",
            "--temperature",
            "0",
            "--stop",
            "a",
            "b",
            "--stop-token-ids",
            "1,2",
            "3",
            "--max-new-tokens",
            "1k",
        ]
    )
    assert EngineConfig(**given.part("engine")) == EngineConfig(
        model="m",
        max_model_len=4096,
        gpu_memory_utilization=0.5,
        page_size=32,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        overlap=False,
        enforce_eager=True,
        seed=3,
        generation_config="vllm",
        kv_cache_memory_bytes=2**30,
        progress=False,
    )
    assert ServerConfig(**given.part("server")) == ServerConfig(port=0, api_keys=("a", "b"), access_log=False)
    assert SamplingParams(**given.part("sampling")) == SamplingParams(
        temperature=0, stop=("a", "b"), stop_token_ids=(1, 2, 3), max_tokens=1000
    )


def test_names_of_dtypes() -> None:
    for given, dtype in (("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")):
        assert PARSER.read(["--dtype", given]).part("engine") == {"dtype": dtype}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trust-remote-code", "--enable-chunked-prefill", "--enable-auto-tool-choice", "--enable-metrics"],
        ["-tp", "1", "-dp", "1", "-pp", "1", "-q", "none", "--kv-cache-dtype", "auto"],
        ["--stream-interval", "1", "--max-logprobs", "20", "--scheduling-policy", "fcfs"],
    ],
)
def test_what_asks_for_nothing_new_is_accepted(arguments: list[str]) -> None:
    given = PARSER.read(arguments)
    assert (given.part("engine"), given.part("server")) == ({}, {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tensor-parallel-size", "2"],
        ["--data-parallel-size", "2"],
        ["--quantization", "fp8"],
        ["--kv-cache-dtype", "fp8"],
        ["--speculative-config", "{}"],
        ["--enable-lora"],
        ["--tool-call-parser", "hermes"],
        ["--reasoning-parser", "qwen3"],
    ],
)
def test_what_is_absent_is_refused_by_name(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"^{arguments[0]}.* is not supported"):
        PARSER.read(arguments)
