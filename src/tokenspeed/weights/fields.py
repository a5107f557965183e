"""Typed look-ups in settings that come from a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar, cast

from tokenspeed.types import ConfigError

T = TypeVar("T", bool, int, float, str)
N = TypeVar("N", int, float)


class Fields:
    """Typed look-ups in a mapping of unknown values. Its errors name the file and the key; it remembers what was read."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self.values = values
        self.source = source
        self.used: set[str] = set()

    def raw(self, key: str) -> object:
        """The value as it is; None if absent."""
        self.used.add(key)
        return self.values.get(key)

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.source} has {key}={self.values[key]!r:.80}, which is not {expected}; the file is damaged"
        )

    def get(self, key: str, kind: type[T]) -> T | None:
        """The value as a `kind`; None if absent or null. Whole floats pass as int, ints as float."""
        value = self.raw(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return kind(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return kind(value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._wrong(key, "a finite number")
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._wrong(
                key, {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
            )
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value as a `kind`."""
        value = self.get(key, kind)
        if value is None:
            raise ConfigError(f"{self.source} lacks {key}; it is incomplete or of another kind of model")
        return value

    def positive(self, key: str, kind: type[N]) -> N:
        """The value as a `kind` above 0."""
        value = self.require(key, kind)
        if value <= 0:
            raise self._wrong(key, "above 0")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested mapping; None if absent or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Fields(cast(Mapping[str, object], value), f"{key} of {self.source}")

    def texts(self, key: str) -> tuple[str, ...] | None:
        """A list of strings; None if absent or null."""
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast(list[object], value)):
            raise self._wrong(key, "a list of texts")
        return tuple(cast(list[str], value))

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if absent or null."""
        value = self.raw(key)
        items = cast(list[object], value) if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) for item in items):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(cast(list[int], items))

    def refuse(self, key: str, *harmless: object) -> None:
        """Raises ConfigError if `key` asks for something that is not supported."""
        value = self.raw(key)
        if value is not None and value not in harmless:
            raise ConfigError(f"{self.source} has {key}={value!r:.80}, which is not supported")
