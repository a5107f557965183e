"""Encoding texts that come back longer: what was encoded before is not encoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

from tokenspeed.text.safe_cuts import SafeCuts
from tokenspeed.text.tokenizer import Tokenizer

PART_CHARACTERS = 1024
"""Least length of a part: what is encoded again of a text that grew is about this and what is new."""

CAPACITY = 16 * 2**20
"""Default of the characters that are remembered: 4 million tokens or so, which take 50 MB."""


class IncrementalEncoder:
    """Encodes with a memory of parts of texts, the least recently used of which are forgotten. Threads may share it.

    A text is cut where that is proven not to change its ids (`SafeCuts`). Where the parts begin and end depends only
    on what comes before, so a conversation that returns with another turn has the parts of its last visit and a few
    new ones.

    Args:
      capacity: characters that are remembered.
    """

    def __init__(self, tokenizer: Tokenizer, capacity: int = CAPACITY) -> None:
        self._tokenizer = tokenizer
        self._cuts = SafeCuts(tokenizer)
        self._capacity = capacity
        self._size = 0
        self._ids: OrderedDict[str, list[int]] = OrderedDict()
        # Lists of ids share these objects: making 50,000 integers anew takes longer than all else here.
        self._integers = list(range(tokenizer.vocab_size))
        self._lock = threading.Lock()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids that `Tokenizer.encode` gives. Raises InvalidRequest as it does."""
        parts = list(self._cuts.parts(text, PART_CHARACTERS))
        known = self._recall(parts)
        new = [part for part in dict.fromkeys(parts) if part not in known]
        for part, ids in zip(new, self._tokenizer.encode_parts(new), strict=True):
            known[part] = [self._integers[i] for i in ids]
        self._remember((part, known[part]) for part in new if part is not parts[-1])
        ids: list[int] = []
        for part in parts:
            ids += known[part]
        return self._tokenizer.surround(ids) if add_special_tokens else ids

    def _recall(self, parts: Iterable[str]) -> dict[str, list[int]]:
        """The ids of the parts that are known."""
        with self._lock:
            known = {part: self._ids[part] for part in parts if part in self._ids}
            for part in known:
                self._ids.move_to_end(part)
        return known

    def _remember(self, parts: Iterable[tuple[str, list[int]]]) -> None:
        with self._lock:
            for part, ids in parts:
                if part not in self._ids:
                    self._ids[part] = ids
                    self._size += len(part)
            while self._size > self._capacity:
                part, _ = self._ids.popitem(last=False)
                self._size -= len(part)
