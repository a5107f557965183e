"""Token ids to text while they come: only text that can no longer change."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from tokenspeed.text.tokenizer import TokenBytes

_DECODER = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one sequence of ids. What is pushed in which portions does not change the text.

    Bytes that can never be UTF-8 become U+FFFD; a character that is not complete yet is held back.

    Args:
      skip_special_tokens: leave out the tokenizer's special ids.
      strip_leading_space: leave out a space that begins the text, as SentencePiece tokenizers that put one before every
        text do (`Tokenizer.strips_leading_space`); not for text that continues a prompt.
    """

    def __init__(
        self, tokenizer: TokenBytes, skip_special_tokens: bool = True, *, strip_leading_space: bool = False
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _DECODER("replace")
        self._at_start = strip_leading_space

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids; returns the text that is new and settled."""
        skipped = self._skipped
        text = self._decoder.decode(b"".join([self._token_bytes(i) for i in ids if i not in skipped]))
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """Ends the text: bytes of an incomplete character are dropped. Nothing is ever left to return but that."""
        self._decoder.reset()
        return ""
