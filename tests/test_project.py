"""The project keeps its habits: documented modules, the two commands as they stand, no words that hide what a thing is."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

INSTALL_AND_SERVE = "pip install .\ntokenspeed serve\n"
INSTALL_AND_TEST = "pip install '.[test]'\npytest\n"


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _fenced(text: str) -> list[str]:
    """The contents of a Markdown text's code blocks."""
    return re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def _commands(text: str) -> Iterator[str]:
    """A shell text's lines without comments."""
    yield from (line.strip() for line in text.splitlines() if not line.lstrip().startswith("#"))


def test_the_readme_opens_with_the_two_commands() -> None:
    assert _fenced((ROOT / "README.md").read_text())[:2] == [INSTALL_AND_SERVE, INSTALL_AND_TEST]


def test_ci_runs_the_readmes_test_command() -> None:
    ran = list(_commands((ROOT / ".ci" / "run").read_text()))
    for command in INSTALL_AND_TEST.splitlines():
        assert command in ran


@pytest.mark.parametrize("script", [".ci/run", "scripts/check"])
def test_scripts_stop_at_the_first_failure(script: str) -> None:
    path = ROOT / script
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text().splitlines()


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_a_module_says_what_it_is_responsible_for(path: Path) -> None:
    text = path.read_text()
    assert not text or ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_names_say_what_a_thing_does(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "helper", "common", "misc"}
    classes = [node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    assert [name for name in classes if re.search(r"Manager|Helper|Util|Mixin", name)] == []


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_nothing_is_left_for_later(path: Path) -> None:
    assert re.findall(r"\b(?:TODO|FIXME|XXX)\b|raise NotImplementedError", path.read_text()) == []


def _swallows_everything(handler: ast.ExceptHandler) -> bool:
    """Whether a handler takes every error; one that cleans up and raises it again does not."""
    last = handler.body[-1]
    raises_again = isinstance(last, ast.Raise) and last.exc is None
    return not raises_again and (handler.type is None or ast.unparse(handler.type) in {"Exception", "BaseException"})


@pytest.mark.parametrize("path", SOURCES, ids=_relative)
def test_everything_is_caught_only_at_the_edges(path: Path) -> None:
    """`except Exception` belongs to the engine's loop and to the HTTP edge."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    if path.parent.name not in {"engine", "server"}:
        assert [handler.lineno for handler in handlers if _swallows_everything(handler)] == []


@pytest.mark.parametrize("path", TESTS, ids=_relative)
def test_a_test_file_mirrors_what_it_tests(path: Path) -> None:
    """tests/a/test_b.py is about a/b.py or the package a/b; folders of the tests' own are about the whole."""
    inside = path.relative_to(ROOT / "tests")
    if len(inside.parts) == 1 or inside.parts[0] in {"oracle", "notebooks", "end_to_end"}:
        return
    base = ROOT if inside.parts[0] == "pallas_kernels" else ROOT / "src" / "tokenspeed"
    assert (base / inside.parent).is_dir()


def _skips(tree: ast.AST) -> list[str]:
    """The conditions under which tests are left out, but for those on the operating system."""
    marks = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Attribute)]
    found = [mark for mark in marks if re.match(r"pytest\.(mark\.(skip|skipif|xfail)|skip|xfail|importorskip)\(", mark)]
    return [mark for mark in found if not mark.startswith("pytest.mark.skipif(sys.platform ")]


@pytest.mark.parametrize("path", TESTS, ids=_relative)
def test_no_test_is_skipped(path: Path) -> None:
    """What cannot run fails with the reason, or is chosen by a marker; it does not pass in silence."""
    assert _skips(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("@pytest.mark.skipif(not torch, reason='x')\ndef test_a(): ...", 1),
        ("@pytest.mark.skipif(sys.platform != 'linux', reason='x')\ndef test_a(): ...", 0),
        ("def test_a():\n    pytest.importorskip('torch')", 1),
        ("@pytest.mark.skip(reason='x')\ndef test_a(): ...", 1),
        ("@pytest.mark.slow\ndef test_a(): ...", 0),
    ],
)
def test_a_skip_is_seen(source: str, count: int) -> None:
    assert len(_skips(ast.parse(source))) == count


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=_relative)
def test_a_notebook_is_short_half_prose_and_committed_without_output(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) <= 25
    assert sum(cell["cell_type"] == "markdown" for cell in cells) * 2 >= len(cells) - 1
    assert [cell for cell in cells if cell.get("outputs")] == []
