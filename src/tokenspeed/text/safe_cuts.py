"""Where a text may be cut so that its parts, encoded one by one, have the ids of the whole."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tokenizers import AddedToken

from tokenspeed.text.gguf_tokenizer import SPLIT_PATTERNS
from tokenspeed.text.tokenizer import JsonObject, Tokenizer, steps_of

_LINE_FEED = r"\n(?<=[^\n]\n)(?=[^\n])"
_BEHIND_WORDS = frozenset(map(chr, range(128))) - frozenset(string.ascii_letters + "'")


class SafeCuts:
    """Finds the places where cutting a text is proven not to change its ids.

    A tokenizer works in stages: added tokens are found (the leftmost first, then the longest), the text between them
    is normalised, cut by patterns, and each piece is encoded by itself. A cut is safe if no stage sees across it:

    - Behind an added token, if no other added token can overlap it and it takes no spaces with it: it is found
      wherever it stands, and what comes before and behind it never meets. A token that is looked for in normalised
      text counts only where there is no normaliser.
    - Behind a lone line feed, if that is an added token and the other added tokens that hold one hold nothing else.
    - Behind a letter, before a character that is no letter and no apostrophe, and that follows a letter in no added token; both of ASCII, so that no two libraries' notions of a letter matter. All patterns must be known.
      None of their alternatives goes on from a letter to such a character (contractions go over an apostrophe), so a
      piece ends there; those that end in letters look at nothing behind them, and none looks back. NFC composes
      nothing with a character of ASCII that comes after it.

    What is not proven here is not cut; then the whole text is one part.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = list(tokenizer.added_tokens.values())
        normalizer = list(steps_of(tokenizer.backend.normalizer, "normalizers"))
        splits = list(steps_of(tokenizer.backend.pre_tokenizer, "pretokenizers"))
        ends: list[str] = []
        if not any(token.single_word for token in tokens) and all(map(_is_local, splits)):
            ends = [re.escape(text) for text in _lone_tokens(tokens, bool(normalizer))]
            if not any(token.rstrip for token in tokens):
                ends += _plain_ends(tokens, normalizer, splits)
        self._end = re.compile("|".join(ends)) if ends else None

    def parts(self, text: str, least: int) -> Iterator[str]:
        """The text in parts of at least `least` characters, each as short as it can be; the last may be shorter.

        Texts that begin alike have the same parts, up to the one in which they differ or one of them ends.
        """
        start = 0
        while self._end and (found := self._end.search(text, start + least)):
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]


def _is_local(split: JsonObject) -> bool:
    """Whether a pre-tokenizer treats a text between added tokens the same wherever it stands."""
    if split["type"] == "Metaspace":
        return split.get("prepend_scheme") in ("always", "never")
    return split["type"] in ("ByteLevel", "Split", "Digits")


def _lone_tokens(tokens: Sequence[AddedToken], normalizes: bool) -> Iterable[str]:
    """Added tokens behind which a text may be cut."""
    texts = {token.content for token in tokens}
    heads = {text[:end] for text in texts for end in range(1, len(text))}
    tails = {text[start:] for text in texts for start in range(1, len(text))}
    joined = "\0".join(texts)
    for token in tokens:
        text = token.content
        # Reserved tokens are numbered and many; leaving them out keeps the search quick.
        if token.rstrip or (token.normalized and normalizes) or re.search(r"\d", text):
            continue
        inside = {text[a:b] for a in range(len(text)) for b in range(a + 1, len(text) + 1)} - {text}
        overlaps = any(text[k:] in heads or text[:k] in tails for k in range(1, len(text)))
        if not overlaps and not inside & texts and joined.count(text) == 1:
            yield text


def _plain_ends(
    tokens: Sequence[AddedToken], normalizer: Sequence[JsonObject], splits: Sequence[JsonObject]
) -> Iterator[str]:
    """Patterns that end where text without added tokens may be cut."""
    feeds = [token for token in tokens if "\n" in token.content]
    if not any(token.normalized or token.content.strip("\n") for token in feeds) and "\n" in {t.content for t in feeds}:
        yield _LINE_FEED
    composes = all(step["type"] == "NFC" for step in normalizer)
    if composes and all(map(_is_known, splits)) and any(map(_cuts_words, splits)):
        inside = {pair[1] for token in tokens for pair in re.findall(r"(?=([A-Za-z][\x00-\x7f]))", token.content)}
        yield f"[A-Za-z](?=[{re.escape(''.join(sorted(_BEHIND_WORDS - inside)))}])"


def _is_known(split: Mapping[str, object]) -> bool:
    if split["type"] == "Split":
        return _pattern(split) in SPLIT_PATTERNS and split.get("behavior") == "Isolated" and not split.get("invert")
    return split["type"] == "Digits" or (split["type"] == "ByteLevel" and not split.get("add_prefix_space"))


def _cuts_words(split: Mapping[str, object]) -> bool:
    """Whether words end where a split is made."""
    return bool(split.get("use_regex")) or r"|\s+(?!\S)|\s+" in _pattern(split)


def _pattern(split: Mapping[str, object]) -> str:
    pattern = split.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    return text.replace("\r", r"\r").replace("\n", r"\n") if isinstance(text, str) else ""
