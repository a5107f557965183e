"""From the tokenizer that a GGUF file describes to one of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tokenspeed.types import ConfigError
from tokenspeed.weights.gguf import MetadataValue

SPACE_MARK = "▁"
"""What SentencePiece writes for a space."""

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Values of `tokenizer.ggml.token_type`."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)


class _Splits(NamedTuple):
    """How text is cut before byte-pair merging, and what else goes with that choice.

    Attributes:
      patterns: each cuts what the one before left; empty: GPT-2's own pattern.
      digits: cut digits off one by one first.
      nfc: normalise the text.
      whole_words: a piece that is a token is taken as it is, without merging.
      adds_bos: whether a beginning-of-sequence token is added where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = (
            [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        )
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        return pre_tokenizers.Sequence(steps)


_GPT2 = _Splits()
_DIGITS = _Splits(digits=True)
_QWEN2 = _Splits(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",), nfc=True
)
_QWEN35 = _Splits(
    (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    ),
    nfc=True,
)
_LLAMA3 = _Splits(
    (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",),
    whole_words=True,
    adds_bos=True,
)
_TEKKEN = _Splits(
    (rf"{_CASED_WORD % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",), whole_words=True, adds_bos=True
)
_GPT4O = _Splits(
    (
        rf"{_CASED_WORD % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
    ),
    whole_words=True,
)
_DEEPSEEK3 = _Splits(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)
_SPLITS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "deepseek-v3": _DEEPSEEK3,
}
"""By `tokenizer.ggml.pre`; the patterns are those of the models' own tokenizer.json."""

SPLIT_PATTERNS = frozenset(pattern for splits in _SPLITS.values() for pattern in splits.patterns)
"""The patterns of all splits, which `safe_cuts` knows."""


class ConvertedTokenizer(NamedTuple):
    """A tokenizer, and the ids that it does not tell itself."""

    backend: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """End of sequence, of turn, of message: those that the file names."""


class _Vocabulary:
    """The tokens of a GGUF file. Unused ones at the end pad the model's matrices; they are left out."""

    def __init__(self, metadata: Mapping[str, MetadataValue], source: str) -> None:
        self._metadata = metadata
        self.source = source
        self.tokens = self.texts("tokens")
        self._stored = len(self.tokens)
        self.kinds: list[int] = self.numbers("token_type").tolist() or [_NORMAL] * self._stored
        while self.kinds and self.kinds[-1] == _UNUSED:
            self.kinds.pop()
        del self.tokens[len(self.kinds) :]

    def ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    def get(self, key: str) -> MetadataValue | None:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def texts(self, key: str) -> list[str]:
        value = self.get(key)
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{self.source} has no tokenizer.ggml.{key}; pass another tokenizer with --tokenizer")
        return list(value)

    def numbers(self, key: str) -> np.ndarray:
        """A number a token, unused ones at the end included; empty if the file has none."""
        value = self.get(key)
        if value is None:
            return np.zeros(0)
        if not isinstance(value, np.ndarray) or len(value) != self._stored:
            raise ConfigError(
                f"{self.source} is damaged: tokenizer.ggml.{key} does not have {self._stored} entries; download it again"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)

    def token_id(self, key: str) -> int | None:
        """The id that the file names for a purpose, if it is one of the vocabulary."""
        value = self.get(f"{key}_token_id")
        return value if isinstance(value, int) and 0 <= value < len(self.tokens) else None

    def added(self, marked_spaces: bool) -> list[AddedToken]:
        """Tokens that are found in the text before anything else, the longest first."""
        return [
            AddedToken(
                token,
                special=kind != _USER_DEFINED,
                # Runs of spaces are found after the normaliser has marked them, like SentencePiece does.
                normalized=marked_spaces and SPACE_MARK in token,
            )
            for token, kind in zip(self.tokens, self.kinds, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]


def convert(metadata: Mapping[str, MetadataValue], source: str) -> ConvertedTokenizer:
    """The tokenizer of a GGUF file's metadata; `source` names the file in errors.

    Raises:
      ConfigError: the metadata is incomplete or damaged, or of a kind that is not supported.
    """
    vocabulary = _Vocabulary(metadata, source)
    kind = vocabulary.get("model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentence_piece(vocabulary)
    else:
        raise ConfigError(
            f"{source} holds a tokenizer of kind {kind!r}; supported are gpt2 and llama: "
            "pass the model's tokenizer.json with --tokenizer"
        )
    ends = [vocabulary.token_id(key) for key in ("eos", "eot", "eom")]
    eos_ids = tuple(dict.fromkeys(token_id for token_id in ends if token_id is not None))
    bos_id = vocabulary.token_id("bos")
    before = [bos_id] if bos_id is not None and vocabulary.flag("add_bos_token", adds_bos) else []
    after = [eos_ids[0]] if eos_ids and vocabulary.flag("add_eos_token", False) else []
    if before or after:
        backend.post_processor = _surround(
            [vocabulary.tokens[i] for i in before], [vocabulary.tokens[i] for i in after], backend
        )
    return ConvertedTokenizer(backend, bos_id, eos_ids)


def _surround(before: Sequence[str], after: Sequence[str], backend: Tokenizer) -> processors.PostProcessor:
    ids = [(token, backend.token_to_id(token)) for token in (*before, *after)]
    return processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """GPT-2's kind: bytes written as printable characters, merged by rank."""
    name = vocabulary.get("pre") or "default"
    splits = _SPLITS.get(str(name))
    if splits is None:
        raise ConfigError(
            f"{vocabulary.source} cuts text in the way {name!r}, which is not supported; supported are "
            f"{', '.join(_SPLITS)}: pass the model's tokenizer.json with --tokenizer"
        )
    backend = Tokenizer(
        models.BPE(vocab=vocabulary.ids(), merges=_stored_merges(vocabulary), ignore_merges=splits.whole_words)
    )
    if splits.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splits.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(vocabulary.added(marked_spaces=False))
    return backend, splits.adds_bos


def _sentence_piece(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece's byte-pair kind: no cuts, a mark for each space, unknown characters as bytes."""
    prefix = vocabulary.flag("add_space_prefix", True)
    # Files hold the runs of spaces among the user-defined tokens with spaces or with marks.
    vocabulary.tokens = [
        token.replace(" ", SPACE_MARK) if kind == _USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    unknown = vocabulary.token_id("unknown")
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids(),
            merges=_merges_by_score(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.kinds,
        )
    )
    mark_spaces = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark_spaces]) if prefix else mark_spaces
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    backend.add_tokens(vocabulary.added(marked_spaces=not prefix))
    return backend, True


def _stored_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The pairs that the file lists, the first to be merged first."""
    ids = vocabulary.ids()
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.texts("merges"))]
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise ConfigError(
                f"{vocabulary.source} is damaged: its tokenizer merges {left!r} and {right!r}, which are not all tokens; "
                "download it again"
            )
    return merges


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make an ordinary token, the best score first, and of one token the longest left part first.

    SentencePiece merges the neighbours whose union scores best. Sorting the pairs by their union's score makes ranks
    of that, as Hugging Face's converters do.
    """
    tokens = vocabulary.tokens
    scores = vocabulary.numbers("scores")
    if not len(scores):
        raise ConfigError(f"{vocabulary.source} has no tokenizer.ggml.scores; pass another tokenizer with --tokenizer")
    known = set(tokens)
    merges: list[tuple[str, str]] = []
    for i in np.argsort(-scores[: len(tokens)], kind="stable").tolist():
        token = tokens[i]
        if vocabulary.kinds[i] == _NORMAL:
            for cut in range(len(token) - 1, 0, -1):
                if (right := token[cut:]) in known and (left := token[:cut]) in known:
                    merges.append((left, right))
    return merges
