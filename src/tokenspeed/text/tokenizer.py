"""Text to token ids and back, whatever file the tokenizer came in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Protocol, TypeAlias, cast

import tokenizers
from tokenizers import AddedToken

from tokenspeed.text.gguf_tokenizer import SPACE_MARK, convert
from tokenspeed.types import ConfigError, InvalidRequest
from tokenspeed.weights.gguf import GGUFFile

JsonObject: TypeAlias = Mapping[str, object]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character of each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + k): byte for k, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class TokenBytes(Protocol):
    """What turning ids into text needs of a tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class Tokenizer:
    """A tokenizer of the `tokenizers` library, with the ids and the bytes that serving needs. Threads may share it.

    Args:
      backend: may lack nothing but truncation and padding, which are taken away.
      bos_id: beginning of sequence.
      eos_ids: what ends the model's output.
      source: the file's name, for errors.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      special_ids: ids that `skip_special_tokens` leaves out.

    Raises:
      ConfigError: its decoder is of a kind that has no exact bytes for a token.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_ids: Sequence[int], source: str
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = tuple(eos_ids)
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in self._added), 0)
        self._bytes: dict[int, bytes] = {}
        self._read_decoder(source)
        self._before, self._after = self._surroundings()

    def _read_decoder(self, source: str) -> None:
        steps = list(steps_of(self.backend.decoder, "decoders"))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise ConfigError(
                f"{source} has a decoder of {', '.join(map(str, kinds)) or 'no kind'}; "
                "supported are byte-level and SentencePiece tokenizers"
            )
        self.strips_leading_space = any(
            (step["type"] == "Strip" and step.get("content") == " " and step.get("start") == 1)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """The ids that `add_special_tokens` puts before and after a text."""
        plain, whole = self._encode("a"), list(self.backend.encode("a").ids)
        start = next(k for k in range(len(whole)) if whole[k : k + len(plain)] == plain)
        return whole[:start], whole[start + len(plain) :]

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special_tokens` puts a beginning of sequence before a text."""
        return self.bos_id is not None and self.bos_id in self._before

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids. Special tokens that are spelled out in it become their ids.

        Args:
          add_special_tokens: put around it what the model expects of a text that stands alone.

        Raises:
          InvalidRequest: the text holds a lone surrogate.
        """
        return [*self._before, *self._encode(text), *self._after] if add_special_tokens else self._encode(text)

    def surround(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text that was encoded without special tokens, with them."""
        return [*self._before, *ids, *self._after]

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens around it. Raises InvalidRequest as `encode` does."""
        try:
            return [encoding.ids for encoding in self.backend.encode_batch_fast(parts, add_special_tokens=False)]
        except TypeError as error:  # what the library says of a str that is not valid Unicode
            raise InvalidRequest("the text holds a lone surrogate (U+D800 to U+DFFF), which no encoding has") from error

    def _encode(self, text: str) -> list[int]:
        return self.encode_parts([text])[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The ids' text; bytes that are not UTF-8 become U+FFFD.

        Raises:
          InvalidRequest: an id is not in the vocabulary.
        """
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(f"token id {token_id} is not in the vocabulary [0, {self.vocab_size})")
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode(errors="replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """A token's exact bytes, which may be part of a character; empty if no token has this id."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        text = self.spelling(token_id)
        if self._byte_level:
            if token_id in self._added or not all(char in _BYTE_OF for char in text):
                return text.encode()
            return bytes(_BYTE_OF[char] for char in text)
        if (byte := _BYTE_TOKEN.fullmatch(text)) and token_id not in self._added:
            return bytes.fromhex(byte[1])
        return text.replace(SPACE_MARK, " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token's text; U+FFFD stands for bytes that are only part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def spelling(self, token_id: int) -> str:
        """How the vocabulary writes a token, e.g. `Ġthe`; empty if no token has this id."""
        added = self._added.get(token_id)
        if added is not None:
            return added.content
        return (self.backend.id_to_token(token_id) or "") if 0 <= token_id < self.vocab_size else ""

    def token_id(self, spelling: str) -> int | None:
        """The id of a token that the vocabulary writes so."""
        return self.backend.token_to_id(spelling)

    @cached_property
    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Tokens that are found in a text before anything else."""
        return dict(self._added)


class _Part(Protocol):
    """A decoder, normaliser or pre-tokenizer of the `tokenizers` library."""

    def __getstate__(self) -> bytes: ...


def steps_of(part: _Part | None, inner: str) -> Iterator[JsonObject]:
    """The simple steps of a tokenizer's part, as JSON objects with a `type`; `inner` names the list in a sequence."""
    return iter(()) if part is None else _flatten(json.loads(part.__getstate__()), inner)


def _flatten(state: JsonObject, inner: str) -> Iterator[JsonObject]:
    if state["type"] != "Sequence":
        yield state
    for step in cast(list[JsonObject], state.get(inner, [])):
        yield from _flatten(step, inner)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face layout, of a tokenizer.json, or of a GGUF file.

    Raises:
      ConfigError: it is missing, damaged or of a kind that is not supported.
    """
    if path.suffix == ".gguf":
        backend, bos_id, eos_ids = convert(GGUFFile(path, header_only=True).metadata, str(path))
        return Tokenizer(backend, bos_id=bos_id, eos_ids=eos_ids, source=str(path))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"{path} has no tokenizer.json; convert the model's tokenizer to that format, or name one with --tokenizer"
        )
    try:
        backend = tokenizers.Tokenizer.from_buffer(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    return _with_config(backend, file)


def _with_config(backend: tokenizers.Tokenizer, file: Path) -> Tokenizer:
    """Adds what stands beside a tokenizer.json: which tokens are special, and which ids end the output."""
    named = special_tokens(file.parent)
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [text for text in named.values() if text not in special and backend.token_to_id(text) is not None]
    )
    ends = [backend.token_to_id(named["eos_token"])] if "eos_token" in named else []
    for name in ("generation_config.json", "config.json"):
        ids = read_json(file.parent / name).get("eos_token_id")
        ends += ids if isinstance(ids, list) else [ids]
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else None
    eos_ids = list(dict.fromkeys(i for i in ends if isinstance(i, int)))
    return Tokenizer(backend, bos_id=bos_id, eos_ids=eos_ids, source=str(file))


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a folder's tokenizer_config.json and special_tokens_map.json name, e.g. `bos_token`."""
    named: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                named[key] = text
    return named


def read_json(path: Path) -> JsonObject:
    """A JSON file's object; empty if there is no such file. Raises ConfigError if it is not one."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value
