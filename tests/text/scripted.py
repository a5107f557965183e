"""A tokenizer whose tokens are written down in the test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class ScriptedTokenizer:
    """Token k is the k-th of `tokens`; the last `num_special` are special."""

    def __init__(self, *tokens: bytes, num_special: int = 0) -> None:
        self._tokens = tokens
        self.special_ids = frozenset(range(len(tokens) - num_special, len(tokens)))

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


def portions(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """`items` in runs of `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]
