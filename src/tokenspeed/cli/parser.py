"""How a command line is read: both spellings of a flag, JSON in dotted form, a file of flags, and clear errors."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from tokenspeed.cli.kinds import Absent, Flag, Holds, Positional, Value
from tokenspeed.types import ConfigError

_CONFIG = Value("config", "--config", "YAML file whose keys are names of flags; the command line wins")


class Given:
    """What a command line gave. What it did not is not here, so that the configuration's defaults are the only ones."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def part(self, name: str) -> dict[str, Any]:
        """The fields given for one part, e.g. all of `engine`."""
        prefix = f"{name}."
        return {key.removeprefix(prefix): value for key, value in self._values.items() if key.startswith(prefix)}


class Parser:
    """Reads the arguments of one command.

    Args:
      command: its name.
      summary: one sentence for `--help`.
      groups: the flags, by the title they have in `--help`.
      positional: the positional argument, if there is one.
    """

    def __init__(
        self,
        command: str,
        summary: str,
        groups: Mapping[str, Sequence[Flag]],
        positional: Positional | None = None,
    ) -> None:
        self._parser = _Argparse(
            prog=f"tokenspeed {command}",
            description=summary,
            usage=f"tokenspeed {command}{f' [{positional.metavar}]' if positional else ''} [flags]",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        if positional is not None:
            positional.add_to(self._parser.add_argument_group("argument"))
        self._names: set[str] = set()
        for title, flags in {**groups, "file": (_CONFIG,)}.items():
            group = self._parser.add_argument_group(title)
            for flag in flags:
                flag.add_to(group)
                self._names.update(flag.names.split())
        self._parser.epilog = _epilog([flag for flags in groups.values() for flag in flags])

    def read(self, arguments: Sequence[str]) -> Given:
        """Reads a command line, and the file it may name.

        Raises:
          ConfigError: it asks for what is not there, or the file cannot be used.
          SystemExit: 2 after one sentence on stderr if it cannot be understood, 0 after `--help`.
        """
        given = self._parse(arguments)
        file = given.pop("config", None)
        return Given(given if file is None else {**self._parse(list(self._from_file(Path(file)))), **given})

    def _parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        namespace, rest = self._parser.parse_known_args(list(self._spelled(arguments)))
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            kind = "flag" if word.startswith("-") else "argument"
            self._parser.error(f"unknown {kind} {word}{self._nearest(word)}")
        return vars(namespace)

    def _spelled(self, arguments: Iterable[str]) -> Iterator[str]:
        """The arguments with known flags in their own spelling, and dotted ones as JSON."""
        words = iter(arguments)
        for word in words:
            name, equals, value = word.partition("=")
            base, dot, path = name.partition(".")
            if (dashed := name.replace("_", "-")) in self._names:
                yield f"{dashed}{equals}{value}"
            elif dot and (dashed := base.replace("_", "-")) in self._names:
                yield f"{dashed}={_nested(path, value if equals else next(words, ''))}"
            else:
                yield word

    def _nearest(self, word: str) -> str:
        close = difflib.get_close_matches(word.replace("_", "-"), self._names, n=1)
        return f"; did you mean {close[0]}?" if close else ""

    def _from_file(self, path: Path) -> Iterator[str]:
        """The arguments that a YAML file stands for."""
        for key, value in _read_yaml(path).items():
            name = f"--{str(key).lstrip('-').replace('_', '-')}"
            if name not in self._names:
                raise ConfigError(f"{path} has the unknown key {key!r}{self._nearest(name)}")
            yield from self._as_arguments(name, value)

    def _as_arguments(self, name: str, value: object) -> Iterator[str]:
        negative = f"--no-{name.removeprefix('--')}"
        match value:
            case None:
                return
            case True:
                yield name
            case False:
                yield from (negative,) if negative in self._names else ()
            case list():
                yield from (f"{name}={item}" for item in cast(list[object], value))
            case dict():
                yield f"{name}={json.dumps(value)}"
            case _:
                yield f"{name}={value}"


class _Argparse(argparse.ArgumentParser):
    """One sentence in place of the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (`{self.prog} --help` lists the flags)\n")


def _nested(path: str, text: str) -> str:
    """JSON of the object in which the dotted path leads to the value."""
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError:
        value = text
    for key in reversed(path.split(".")):
        value = {key: value}
    return json.dumps(value)


def _read_yaml(path: Path) -> dict[object, object]:
    try:
        content: object = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must map names of flags to values")
    return cast(dict[object, object], content)


def _epilog(flags: Sequence[Flag]) -> str:
    """Names the flags that `--help` does not list."""
    holds = [flag.names.split()[0] for flag in flags if isinstance(flag, Holds)]
    absent = [flag.names.split()[0] for flag in flags if isinstance(flag, Absent)]
    lines = [f"Accepted, as it holds anyway: {', '.join(holds)}."] if holds else []
    return " ".join([*lines, *([f"Not supported: {', '.join(absent)}."] if absent else [])])
