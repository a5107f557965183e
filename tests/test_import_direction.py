"""Who may import whom: imports go down the layers, at the top of a file, and the engine decides without JAX."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("tokenspeed", "pallas_kernels")
KERNELS = frozenset({"pallas_kernels"})

PARALLEL = frozenset({"pytree", "config"})
WEIGHTS = PARALLEL | {"types", "parallel"}
LAYERS = PARALLEL | {"parallel"}
MODELS = LAYERS | {"weights.param", "layers"}
RUNTIME = MODELS | {"types", "weights", "models"}
FRONT = frozenset({"types", "config", "text", "engine"})

ALLOWED: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "pytree": frozenset(),
    "config": frozenset({"types"}),
    "parallel": PARALLEL,
    "weights": WEIGHTS,
    "layers": LAYERS | KERNELS,
    "models": MODELS,
    "runtime": RUNTIME | KERNELS,
    "engine": frozenset({"types", "config"}),
    "engine.engine": frozenset({"types", "config", "runtime"}),
    "text": frozenset({"types", "weights.gguf"}),
    # Opens a model for a front end: where text, weights and runtime meet.
    "loading": FRONT | {"weights", "runtime"},
    "llm": FRONT | {"loading"},
    "server": FRONT,
    "bench": frozenset({"types", "config", "llm", "runtime"}) | KERNELS,
    "bench.client": frozenset({"types"}),
    "pallas_kernels": frozenset(),
    # The package names its public types lazily; the command line wires everything.
    "": frozenset({"types", "config", "llm"}),
    "__main__": frozenset({"cli"}),
}
"""Part of the project to the parts it may import beside itself; a module's own entry goes before its folder's."""

WITHOUT_JAX = ("types", "config", "engine", "text", "server", "llm", "loading")
"""Parts that decide, or talk, with integers and text only."""


def _sources() -> list[Path]:
    return sorted([*(ROOT / "src" / "tokenspeed").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")])


def _module(path: Path) -> str:
    """A file's dotted name without `tokenspeed.`: `engine.scheduler`, `pallas_kernels.attention`."""
    base = ROOT / "src" / "tokenspeed" if (ROOT / "src") in path.parents else ROOT
    return ".".join(path.relative_to(base).with_suffix("").parts).removesuffix("__init__").rstrip(".")


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"line {node.lineno}: a relative import"
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in _names(node))


def _imports_by_name(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`import_module("...")`: deferred until wanted, but in the same direction."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def _covers(part: str, name: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _owner(module: str) -> str:
    """The entry of ALLOWED that rules a module: the longest that covers it."""
    matching = [part for part in ALLOWED if part and _covers(part, module)]
    return max(matching, key=len, default="")


def _violations(module: str, source: str) -> list[str]:
    """What is wrong with the imports of a module, one line each."""
    top = module.split(".", maxsplit=1)[0]
    allowed = ALLOWED[_owner(module)]
    wrong: list[str] = []
    tree = ast.parse(source)
    for line, name in [*_imports(tree), *_imports_by_name(tree)]:
        if name.split(".")[0] in ("jax", "jaxlib", "flax") and top in WITHOUT_JAX:
            wrong.append(f"{module}:{line} imports {name}, but {top} does without JAX")
        if name.split(".")[0] not in PACKAGES or top == "cli" or name == "tokenspeed.__version__":
            continue
        inner = name.removeprefix("tokenspeed.")
        if inner.split(".")[0] != top and not any(_covers(part, inner) for part in allowed):
            wrong.append(f"{module}:{line} imports {name}, which {top or 'the package'} may not")
    return wrong


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_imports_go_down(path: Path) -> None:
    assert _violations(_module(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.scheduler", "import jax.numpy as jnp"),
        ("engine.scheduler", "from tokenspeed.runtime.batch import Batch"),
        ("text.tokenizer", "from tokenspeed.weights.load import load"),
        ("layers.norm", "from tokenspeed.models import dense"),
        ("types", "from tokenspeed.config import EngineConfig"),
        ("pallas_kernels.attention", "from tokenspeed.config import EngineConfig"),
        ("llm", "import tokenspeed.runtime.build"),
        ("", "from tokenspeed.runtime.build import build"),
        ("server.app", 'import_module("tokenspeed.runtime.build")'),
    ],
)
def test_a_wrong_import_is_seen(module: str, source: str) -> None:
    assert len(_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.engine", "from tokenspeed.runtime.build import build"),
        ("text.tokenizer", "from tokenspeed.weights.gguf import GGUFCheckpoint"),
        ("runtime.step", "import jax\nfrom pallas_kernels import select\nfrom tokenspeed.models import dense"),
        ("cli.serve", "from tokenspeed.runtime.build import build"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert _violations(module, source) == []


def _function_imports(tree: ast.AST) -> list[str]:
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = [found for function in functions for found in _imports(function)]
    return [f"line {line}: {name}" for line, name in found if name.split(".")[0] in PACKAGES]


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_our_own_code_is_imported_at_the_top(path: Path) -> None:
    assert _function_imports(ast.parse(path.read_text())) == []


def _names_used(tree: ast.AST) -> set[str]:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    return names | attributes


@pytest.mark.parametrize("path", _sources(), ids=_module)
def test_the_environment_is_read_in_one_place_and_nothing_is_probed(path: Path) -> None:
    used = _names_used(ast.parse(path.read_text()))
    assert "hasattr" not in used
    if _module(path) != "config":
        assert not used & {"os.environ", "os.environb", "os.getenv", "os.putenv"}
