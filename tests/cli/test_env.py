"""What `tokenspeed env` reports."""

from __future__ import annotations

import json
import platform
import shutil
from pathlib import Path

import jax
import pytest

from pallas_kernels import cpu
from tokenspeed.cli.env import as_text, make_report, run


@pytest.fixture(autouse=True)
def quick_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ kernels are said to be there, and not built."""
    monkeypatch.setattr(cpu, "load", lambda folder: None)


def test_the_report_is_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENSPEED_HOME", str(tmp_path))
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "program").write_bytes(bytes(3 << 20))
    report = make_report()
    assert str(report["python"]).startswith(platform.python_version())
    assert report["packages"]["jax"] == jax.__version__  # pyright: ignore[reportArgumentType]
    assert len(report["devices"]) == jax.local_device_count()
    assert report["cache"] == {"folder": str(tmp_path), "compiled": "3.0 MiB"}
    assert set(report["compilers"]) & {"c++", "g++", "clang++", "none"}
    assert {"paged_attention", "write_kv"} <= set(report["kernels"])
    on_cpu = jax.default_backend() == "cpu"
    assert report["kernels"].get("packed weights") == ("C++" if on_cpu else None)  # pyright: ignore[reportArgumentType]


def test_why_kernels_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda folder: f"no compiler for {folder.name}")
    told = "none: no compiler for kernels" if jax.default_backend() == "cpu" else None
    assert make_report()["kernels"].get("packed weights") == told  # pyright: ignore[reportArgumentType]


def test_json_and_text_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == make_report()
    assert run([]) == 0
    assert capsys.readouterr().out == as_text(report) + "\n"
    assert f"  jax: {jax.__version__}" in as_text(report)


def test_a_machine_without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make_report()["compilers"] == {"none": "the path has no compiler"}
