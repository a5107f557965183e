"""Reading a command line: spellings, sizes, JSON, a file of flags, and what is said of a wrong use."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.cli.kinds import Absent, Holds, Json, Many, Positional, Switch, Value, size, size_or_auto
from tokenspeed.cli.parser import Parser
from tokenspeed.types import ConfigError

FLAGS = (
    Value("engine.model", "--model", "the model"),
    Value("engine.max_model_len", "--max-model-len --context-length", "tokens", parse=size_or_auto),
    Value("engine.dtype", "--dtype", "dtype", choices=("float32", "int8")),
    Value("server.port", "--port", "port", parse=int),
    Many("server.names", "--served-model-name", "names"),
    Switch("engine.cache", "--enable-cache", "--no-enable-cache --disable-cache", "cache", shown="off"),
    Json("engine.overrides", "--overrides", "overrides"),
    Holds("--enable-metrics"),
    Absent("-tp --tensor-parallel-size", "one device", holds=("1",)),
    Absent("--speculative-config", "no speculation"),
    Absent("--backend.kind", "no backend", holds=("auto",)),
)
PARSER = Parser("serve", "Serves.", {"all": FLAGS}, Positional("engine.model", "MODEL", "the model"))


def engine(*arguments: str) -> dict[str, object]:
    return PARSER.read(arguments).part("engine")


def server(*arguments: str) -> dict[str, object]:
    return PARSER.read(arguments).part("server")


def test_what_is_not_given_is_absent() -> None:
    assert (engine(), server()) == ({}, {})


@pytest.mark.parametrize("spelling", ["--max-model-len", "--max_model_len", "--context-length", "--context_length"])
def test_both_spellings_and_aliases(spelling: str) -> None:
    assert engine(spelling, "8k") == engine(f"{spelling}=8k") == {"max_model_len": 8000}


@pytest.mark.parametrize(
    ("text", "value"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2m", 2_000_000), ("2M", 2 << 20), ("1G", 1 << 30)],
)
def test_sizes(text: str, value: int) -> None:
    assert size(text) == value


def test_auto_is_none() -> None:
    assert engine("--max-model-len", "auto") == engine("--max-model-len", "-1") == {"max_model_len": None}


def test_values_keep_their_underscores() -> None:
    assert engine("a_model") == {"model": "a_model"}
    assert server("--served-model-name", "a_b") == {"names": ("a_b",)}


def test_the_model_may_stand_first_or_after_flags() -> None:
    assert engine("m", "--dtype", "int8") == engine("--dtype", "int8", "m") == {"model": "m", "dtype": "int8"}


def test_many_values() -> None:
    expected = {"names": ("a", "b", "c")}
    assert server("--served-model-name", "a", "b", "--served-model-name", "c") == expected
    assert server("--served-model-name", '["a", "b"]', "c") == expected


def test_switches() -> None:
    assert engine("--enable-cache") == {"cache": True}
    assert engine("--disable-cache") == engine("--no_enable_cache") == {"cache": False}


def test_json_and_its_dotted_form() -> None:
    assert engine("--overrides", '{"a": {"b": 1}}', "--overrides.a.c", "x", "--overrides.d=2.5") == {
        "overrides": {"a": {"b": 1, "c": "x"}, "d": 2.5}
    }


def test_what_holds_anyway_is_accepted() -> None:
    assert engine("--enable-metrics", "-tp", "1", "--tensor_parallel_size=1", "--backend.kind", "auto") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-tp", "2"], "^-tp 2 is not supported: one device; leave it out or write 1$"),
        (["--tensor-parallel-size=2"], "^--tensor-parallel-size 2 is not supported"),
        (["--speculative-config", "{}"], "^--speculative-config {} is not supported: no speculation; leave it out$"),
        (["--speculative-config.method", "ngram"], '^--speculative-config {"method": "ngram"} is not supported'),
        (["--speculative-config"], "^--speculative-config is not supported: no speculation; leave it out$"),
        (["--backend.kind=x"], "^--backend.kind x is not supported"),
    ],
)
def test_what_is_absent_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PARSER.read(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-length", "8"], "unknown flag --max-model-length; did you mean --max-model-len?"),
        (["--max_model_lem=8"], "unknown flag --max_model_lem; did you mean --max-model-len?"),
        (["--quux"], "unknown flag --quux ("),
        (["a", "b"], "unknown argument b ("),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--port"], "argument --port: expected one argument"),
        (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
        (["--max-model-len", "8q"], "argument --max-model-len/--context-length: '8q' is not a size; write"),
        (["--overrides", "{"], "argument --overrides: '{' is not JSON"),
        (["--overrides", "[]"], "argument --overrides: '[]' is not a JSON object"),
    ],
)
def test_a_wrong_use_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        PARSER.read(arguments)
    printed = capsys.readouterr()
    assert (caught.value.code, printed.out) == (2, "")
    assert printed.err.startswith("tokenspeed serve: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


def config_file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_of_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    file = config_file(
        tmp_path,
        "model: m\nmax-model-len: 8k\nserved_model_name: [a, b]\nenable-cache: false\noverrides: {a: 1}\n"
        "tensor-parallel-size: 1\nport: 1\nenable-metrics: true\ndtype: null\n",
    )
    assert engine("--config", file) == {
        "model": "m",
        "max_model_len": 8000,
        "cache": False,
        "overrides": {"a": 1},
    }
    given = PARSER.read(["n", "--served-model-name", "c", "--config", file, "--port", "2", "--enable-cache"])
    assert given.part("server") == {"names": ("c",), "port": 2}
    assert (given.part("engine")["model"], given.part("engine")["cache"]) == ("n", True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown key 'prot'; did you mean --port?"),
        ("- a", "must map names of flags to values"),
        ("a: [", "is not YAML"),
        ("speculative-config: {method: ngram}", "^--speculative-config .* is not supported"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PARSER.read(["--config", config_file(tmp_path, text)])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config /nowhere\.yaml cannot be read: No such file"):
        PARSER.read(["--config", "/nowhere.yaml"])


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    assert engine("--config", config_file(tmp_path, "")) == {}


def test_help_lists_what_works_and_names_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        PARSER.read(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "--max-model-len" in text
    assert "Accepted, as it holds anyway: --enable-metrics." in text
    assert "Not supported: -tp, --speculative-config, --backend.kind." in text
