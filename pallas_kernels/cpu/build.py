"""Compiles the C++ kernels of this folder once per machine and registers them with XLA."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib.version

COMPILERS = ("c++", "g++", "clang++")
TARGETS = {
    "pallas_kernels_quantized_matmul": "PallasKernelsQuantizedMatmul",
    "pallas_kernels_quantized_rows": "PallasKernelsQuantizedRows",
    "pallas_kernels_paged_attention": "PallasKernelsPagedAttention",
    "pallas_kernels_write_kv": "PallasKernelsWriteKv",
    "pallas_kernels_attend_qkv": "PallasKernelsAttendQkv",
}
"""FFI target to symbol."""

_OWN_FLAGS = {"bindings.cc": ("-O1",)}
"""The handlers are large templates and take no time to speak of: optimising them would double the build."""

_libraries: list[ctypes.CDLL] = []


class BuildError(Exception):
    """Why the kernels cannot be used here, in one line."""


def loaded() -> bool:
    """Whether `load` has succeeded in this process."""
    return bool(_libraries)


def load(
    cache_dir: Path, *, compiler: str | None = None, threads: int | None = None, defines: Sequence[str] = ()
) -> str | None:
    """Makes the kernels' FFI targets available to this process; later calls only set the number of threads.

    Args:
      cache_dir: where the shared library is kept, under a name made of everything it depends on.
      compiler: a C++17 compiler; None: the first of `COMPILERS` on the path.
      threads: threads a kernel may use, its caller's included; None: as many CPUs as this process may run on.
      defines: preprocessor names to define; `PALLAS_KERNELS_PORTABLE` leaves out the code for one instruction set.

    Returns:
      None, or why the kernels cannot be used, in one line.
    """
    try:
        if not _libraries:
            library = ctypes.CDLL(str(build(cache_dir, compiler=compiler, defines=defines)))
            for target, symbol in TARGETS.items():
                jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(library[symbol]), platform="cpu")
            _libraries.append(library)
    except (BuildError, OSError) as error:
        return " ".join(str(error).split())
    _libraries[0]["PallasKernelsSetThreads"](threads or available_cpus())
    return None


def available_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if platform.system() == "Linux" else os.cpu_count() or 1


def build(cache_dir: Path, *, compiler: str | None = None, defines: Sequence[str] = ()) -> Path:
    """The shared library, compiled unless `cache_dir` has it. Safe when several processes build at once.

    Raises:
      BuildError: no compiler, no headers, or the compiler refused.
      OSError: the cache folder cannot be written.
    """
    path = compiler or next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if path is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    headers = Path(jax.ffi.include_dir())
    if not (headers / "xla/ffi/api/ffi.h").is_file():
        raise BuildError(f"jaxlib ships no FFI headers in {headers}")
    flags = [*_flags(), *(f"-D{name}" for name in defines)]
    library = cache_dir / f"pallas_kernels-{_key(path, flags)}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            built = _compile(path, [*flags, f"-I{headers}"], Path(scratch))
            built.replace(library)  # atomic: the folder is on the same file system
    return library


def _sources(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in Path(__file__).parent.glob(pattern))


def _flags() -> list[str]:
    tuned = {"x86_64": "-march=native", "AMD64": "-march=native", "aarch64": "-mcpu=native", "arm64": "-mcpu=native"}
    flags = ["-O3", "-std=c++17", "-ffp-contract=off", "-fPIC", "-pthread", "-w"]
    machine = platform.machine()
    return [*flags, tuned[machine]] if machine in tuned else flags


def _key(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in _sources("*.cc", "*.h"):
        digest.update(source.read_bytes())
    for part in (_run([compiler, "--version"]), *flags, jaxlib.version.__version__, _cpu()):
        digest.update(part.encode())
    return digest.hexdigest()[:20]


def _cpu() -> str:
    """What code for this very machine depends on."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor()
    names = ("flags", "Features", "model name", "CPU part")
    return "\n".join(sorted({line for line in info.read_text().splitlines() if line.startswith(names)}))


def _compile(compiler: str, flags: Sequence[str], scratch: Path) -> Path:
    """Compiles the sources side by side and links them."""
    sources = _sources("*.cc")
    objects = [scratch / f"{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen(
            [compiler, *flags, *_OWN_FLAGS.get(source.name, ()), "-c", str(source), "-o", str(to)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for source, to in zip(sources, objects, strict=True)
    ]
    errors = [job.communicate()[1] for job in jobs]
    for job, text in zip(jobs, errors, strict=True):
        if job.returncode:
            raise BuildError(f"{compiler}: {_failure(text)}")
    library = scratch / "library.so"
    _run([compiler, "-shared", "-pthread", *map(str, objects), "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{command[0]}: {_failure(done.stderr)}")
    return done.stdout


def _failure(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "failed without a message")
