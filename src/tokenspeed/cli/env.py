"""`tokenspeed env`: versions, devices, the CPU, compilers, the cache folder and the kernels, for a look or a report."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import pallas_kernels
from pallas_kernels import cpu
from tokenspeed import __version__
from tokenspeed.cli.kinds import Flag, Switch
from tokenspeed.cli.parser import Parser
from tokenspeed.config import environment

PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "flax", "numpy", "tokenizers",
            "huggingface_hub", "gguf", "starlette", "uvicorn")  # fmt: skip
COMPILERS = ("c++", "g++", "clang++", "nvcc")
CPU_FEATURES = frozenset(
    ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16",
     "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve")
)  # fmt: skip
"""Those that decide which kernels a CPU can run."""

_FLAGS: tuple[Flag, ...] = (Switch("env.json", "--json", "--no-json", "one JSON object"),)
PARSER = Parser("env", "Shows versions, devices and kernels.", {"output": _FLAGS})

Report = Mapping[str, str | Mapping[str, str]]


def run(arguments: Sequence[str]) -> int:
    """Prints the report."""
    as_json = PARSER.read(arguments).part("env").get("json", False)
    report = make_report()
    print(json.dumps(report, indent=2) if as_json else as_text(report))
    return 0


def make_report() -> Report:
    """What there is, by topic."""
    return {
        "tokenspeed": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": _versions(),
        "devices": _devices(),
        "cpu": _cpu(),
        "compilers": _compilers(),
        "cache": _cache(environment().home),
        "kernels": _kernels(),
    }


def as_text(report: Report) -> str:
    """The report for people: a line a fact."""
    lines: list[str] = []
    for topic, facts in report.items():
        if isinstance(facts, str):
            lines.append(f"{topic}: {facts}")
        else:
            lines += [f"{topic}:", *(f"  {name}: {fact}" for name, fact in facts.items())]
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> dict[str, str]:
    return {str(device): f"{device.platform}, {device.device_kind}" for device in jax.local_devices()}


def _cpu() -> dict[str, str]:
    """The processor as Linux describes it; elsewhere what Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features = sorted(CPU_FEATURES.intersection((fields.get("flags") or fields.get("Features") or "").split()))
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "features": " ".join(features) or "unknown",
    }


def _compilers() -> dict[str, str]:
    paths = {name: path for name in COMPILERS if (path := shutil.which(name))}
    return {name: f"{_version(path)}, {path}" for name, path in paths.items()} or {"none": "the path has no compiler"}


def _version(program: str) -> str:
    """The first version number in what a compiler says of itself."""
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+(?:\.\d+)*", told)
    return found[0] if found else "unknown version"


def _cache(home: Path) -> dict[str, str]:
    """The cache folder, and what each part of it takes."""
    parts = sorted(part for part in home.iterdir() if part.is_dir()) if home.is_dir() else []
    sizes = {part.name: sum(file.stat().st_size for file in part.rglob("*") if file.is_file()) for part in parts}
    return {"folder": str(home), **{name: f"{size / 2**20:.1f} MiB" for name, size in sizes.items()}}


def _kernels() -> dict[str, str]:
    """For each op the kernel that a model of the usual shape gets on this device, and why the others do not serve."""
    platform_name = jax.local_devices()[0].platform
    packed = {"packed weights": _packed()} if platform_name == "cpu" else {}
    case: dict[str, Any] = {
        "platform": platform_name,
        "dtype": "float32" if platform_name == "cpu" else "bfloat16",
        "kv_dtype": "float32" if platform_name == "cpu" else "bfloat16",
        "head_dim": 64 if platform_name == "cpu" else 128,
        "page_size": 32 if platform_name == "cpu" else 16,
    }
    return {op: _choices(op, case) for op in pallas_kernels.names()} | packed


def _packed() -> str:
    """What multiplies by weights of few bits on a CPU; builds it if that has not been done."""
    reason = cpu.load(environment().home / "kernels")
    return "C++" if reason is None else f"none: {reason}"


def _choices(op: str, case: Mapping[str, Any]) -> str:
    choices = pallas_kernels.explain(op, **case)
    chosen = [choice.kernel.name for choice in choices if choice.chosen] or ["composed of the others"]
    others = [f"{choice.kernel.name}: {choice.reason}" for choice in choices if not choice.chosen]
    return f"{chosen[0]} ({'; '.join(others)})" if others else chosen[0]
