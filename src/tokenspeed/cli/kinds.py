"""The kinds of flags there are, and how the text of a value is read."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tokenspeed.types import ConfigError

Group = argparse._ArgumentGroup  # pyright: ignore[reportPrivateUsage]

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def size(text: str) -> int:
    """A count with a unit, as in vLLM: `8k` is 8000, `8K` is 8192; also m, M, g, G, and `1.5k`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write a number such as 8192, 8k (8000) or 8K (8192)")
    return int(float(found[1]) * _SIZE_UNITS[found[2]])


def size_or_auto(text: str) -> int | None:
    """A size; `auto` and -1 are None."""
    return None if text in ("auto", "-1") else size(text)


def name_list(text: str) -> tuple[str, ...]:
    """One name, or a JSON list of them."""
    if not text.startswith("["):
        return (text,)
    return tuple(str(item) for item in _json(text, list))


def token_ids(text: str) -> tuple[int, ...]:
    """Token ids, separated by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids; write them as 1,2,3") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    return _json(text, dict)


def biases(text: str) -> dict[int, float]:
    """A JSON object from token id to bias."""
    try:
        return {int(key): float(value) for key, value in json_object(text).items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f'{text!r} does not map token ids to numbers; write {{"42": -5}}') from None


def mapped(values: Mapping[str, object]) -> Callable[[str], object]:
    """A parser of the mapping's keys into its values."""

    def parse(text: str) -> object:
        if text not in values:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(values)}")
        return values[text]

    return parse


def _json(text: str, kind: type[Any]) -> Any:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON {'object' if kind is dict else 'list'}")
    return value


@dataclass(frozen=True)
class Value:
    """A flag with one value.

    Args:
      field: where the value goes, as `part.field`.
      names: the flag's names, the first of them shown.
      help: what it does.
      parse: from text to the field's value.
      choices: the texts allowed; any if empty.
    """

    field: str
    names: str
    help: str
    parse: Callable[[str], object] = str
    choices: tuple[str, ...] = ()

    def add_to(self, group: Group) -> None:
        group.add_argument(
            *self.names.split(),
            dest=self.field,
            type=self.parse,
            choices=self.choices or None,
            metavar=f"{{{','.join(self.choices)}}}" if self.choices else _metavar(self.names),
            help=self.help,
        )


@dataclass(frozen=True)
class Many:
    """A flag with several values, at once or by repetition, or as one JSON list; the field is a tuple."""

    field: str
    names: str
    help: str
    parse: Callable[[str], tuple[object, ...]] = name_list

    def add_to(self, group: Group) -> None:
        group.add_argument(
            *self.names.split(),
            dest=self.field,
            type=self.parse,
            nargs="+",
            action=_Collect,
            metavar=_metavar(self.names),
            help=self.help,
        )


@dataclass(frozen=True)
class Switch:
    """Flags without value that turn a field on, and others that turn it off; `--help` shows the ones that change something."""

    field: str
    on: str
    off: str
    help: str
    shown: Literal["on", "off"] = "on"

    @property
    def names(self) -> str:
        return f"{self.on} {self.off}"

    def add_to(self, group: Group) -> None:
        for which, flags in (("on", self.on), ("off", self.off)):
            group.add_argument(
                *flags.split(),
                dest=self.field,
                action="store_true" if which == "on" else "store_false",
                help=self.help if which == self.shown else argparse.SUPPRESS,
            )


@dataclass(frozen=True)
class Json:
    """A flag whose value is a JSON object; `--flag.key.inner value` sets one key."""

    field: str
    names: str
    help: str

    def add_to(self, group: Group) -> None:
        group.add_argument(
            *self.names.split(), dest=self.field, type=json_object, action=_Merge, metavar="JSON", help=self.help
        )


@dataclass(frozen=True)
class Holds:
    """Flags without value that ask for what holds anyway."""

    names: str

    def add_to(self, group: Group) -> None:
        group.add_argument(*self.names.split(), dest="holds", action="store_true", help=argparse.SUPPRESS)


@dataclass(frozen=True)
class Absent:
    """Flags of something that is not there: refused by name, but for the values that hold anyway.

    Args:
      names: the flags.
      why: ends the sentence "--flag is not supported: ...".
      holds: values that are accepted.
    """

    names: str
    why: str
    holds: tuple[str, ...] = ()

    def add_to(self, group: Group) -> None:
        group.add_argument(
            *self.names.split(), dest="absent", nargs="?", action=_Refuse, flag=self, help=argparse.SUPPRESS
        )


class _Collect(argparse.Action):
    """Adds the values of each use of the flag to those of the earlier ones."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        earlier: tuple[object, ...] = vars(namespace).get(self.dest, ())
        vars(namespace)[self.dest] = (*earlier, *(item for value in values for item in value))


class _Merge(argparse.Action):
    """Merges the JSON objects of all uses of the flag; the later wins."""

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        vars(namespace)[self.dest] = _merged(vars(namespace).get(self.dest, {}), values)


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    nested = [key for key in old.keys() & new.keys() if isinstance(old[key], dict) and isinstance(new[key], dict)]
    return {**old, **new, **{key: _merged(old[key], new[key]) for key in nested}}


class _Refuse(argparse.Action):
    """Raises ConfigError unless the value is what holds anyway."""

    def __init__(self, *, flag: Absent, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._flag = flag

    def __call__(self, parser: object, namespace: object, values: Any, option_string: str | None = None) -> None:
        if values in self._flag.holds:
            return
        given = f"{option_string}{f' {values}' if values is not None else ''}"
        allowed = f" or write {' or '.join(self._flag.holds)}" if self._flag.holds else ""
        raise ConfigError(f"{given} is not supported: {self._flag.why}; leave it out{allowed}")


def _metavar(flag_names: str) -> str:
    return flag_names.split(maxsplit=1)[0].rsplit("-", 1)[-1].upper()


Flag = Value | Many | Switch | Json | Holds | Absent


@dataclass(frozen=True)
class Positional:
    """What stands without a flag: at most one, or any number into a tuple."""

    field: str
    metavar: str
    help: str
    many: bool = False

    def add_to(self, group: Group) -> None:
        group.add_argument(self.field, metavar=self.metavar, nargs="*" if self.many else "?", help=self.help)
