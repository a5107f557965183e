"""Building: once, atomically, and a reason in one line where it cannot be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pallas_kernels.cpu import build, load, loaded

ROOT = Path(__file__).parents[3]
LOAD = "import sys, pathlib; from pallas_kernels import cpu; print(cpu.load(pathlib.Path(sys.argv[1]), compiler=sys.argv[2]))"


def fake_compiler(path: Path, script: str) -> str:
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1; exit 0; fi\n{script}\n')
    path.chmod(0o755)
    return str(path)


def load_elsewhere(cache: Path, compiler: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, str(cache), compiler]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_compiles_once(tmp_path: Path):
    log = tmp_path / "log"
    compiler = fake_compiler(tmp_path / "cc", f'echo run >> {log}\nfor last; do :; done\n: > "$last"')
    first = build.build(tmp_path / "cache", compiler=compiler)
    runs = log.read_text().count("run")
    assert build.build(tmp_path / "cache", compiler=compiler) == first
    assert log.read_text().count("run") == runs == len(list(Path(build.__file__).parent.glob("*.cc"))) + 1
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.name]


def test_the_name_depends_on_flags_and_compiler(tmp_path: Path):
    make = 'for last; do :; done\n: > "$last"'
    compiler = fake_compiler(tmp_path / "cc", make)
    other = fake_compiler(tmp_path / "other", make)
    other_path = Path(other)
    other_path.write_text(other_path.read_text().replace("fake 1", "fake 2"))
    names = {
        build.build(tmp_path, compiler=compiler).name,
        build.build(tmp_path, compiler=compiler, defines=["PALLAS_KERNELS_PORTABLE"]).name,
        build.build(tmp_path, compiler=other).name,
    }
    assert len(names) == 3


def test_a_refusal_is_one_line_and_leaves_nothing_behind(tmp_path: Path):
    compiler = fake_compiler(
        tmp_path / "cc", "echo 'In file included from x:' >&2; echo 'x.cc:3: error: no luck' >&2; exit 1"
    )
    with pytest.raises(build.BuildError, match=r"^\S+/cc: x\.cc:3: error: no luck$"):
        build.build(tmp_path / "cache", compiler=compiler)
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C"):
        build.build(tmp_path)


def test_no_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build.jax.ffi, "include_dir", lambda: str(tmp_path))
    with pytest.raises(build.BuildError, match="no FFI headers"):
        build.build(tmp_path)


def test_two_processes_at_once_and_a_library_that_does_not_load(tmp_path: Path):
    compiler = fake_compiler(tmp_path / "cc", 'for last; do :; done\necho garbage > "$last"')
    processes = [load_elsewhere(tmp_path / "cache", compiler) for _ in range(2)]
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert len(out.strip().splitlines()) == 1
        assert "file too short" in out or "invalid ELF header" in out
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").write_text("")
    compiler = fake_compiler(tmp_path / "cc", "exit 0")
    with pytest.raises(OSError, match="file"):
        build.build(tmp_path / "file" / "cache", compiler=compiler)


def test_loading_again_changes_the_threads_only(tmp_path: Path):
    assert loaded()
    assert load(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_portable_code_gives_the_same_results():
    tests = Path(__file__).parent
    chosen = [
        "test_one_group_is_exact",
        "test_rows",
        "test_nan",
        "test_half_precision_pages",
        "test_write_in_place",
        "test_fused",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "--portable-kernels", "-k", " or ".join(chosen), str(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
