"""Ids to text, whole characters at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.scripted import ScriptedTokenizer, portions
from tokenspeed.text.detokenizer import Detokenizer

SMILE = "😊".encode()


def pieces(detokenizer: Detokenizer, ids: list[int], size: int = 1) -> list[str]:
    return [detokenizer.push(some) for some in portions(ids, size)] + [detokenizer.flush()]


def text_of(*tokens: bytes, size: int = 1) -> str:
    return "".join(pieces(Detokenizer(ScriptedTokenizer(*tokens)), list(range(len(tokens))), size))


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ((b"Hello! ", SMILE[:2], SMILE[2:]), "Hello! 😊"),
        ((b"Hello! ", SMILE[:1], SMILE[1:3]), "Hello! "),
        ((b"\xff", b"a"), "\ufffda"),
        ((SMILE[:3], b"a"), "\ufffda"),
        ((b"a", b"\xff"), "a\ufffd"),
        ((b"", b"a", b""), "a"),
        (("\ufeffa".encode(),), "\ufeffa"),
    ],
)
def test_characters_are_whole(tokens: tuple[bytes, ...], text: str, size: int) -> None:
    assert text_of(*tokens, size=size) == text


def test_text_comes_as_soon_as_it_is_settled() -> None:
    tokens = (b"a", b"b" + SMILE[:1], SMILE[1:3], SMILE[3:] + b"c")
    assert pieces(Detokenizer(ScriptedTokenizer(*tokens)), [0, 1, 2, 3]) == ["a", "b", "", "😊c", ""]


@given(st.lists(st.binary(max_size=4), max_size=12), st.integers(1, 5))
def test_portions_do_not_matter(tokens: list[bytes], size: int) -> None:
    assert text_of(*tokens, size=size) == text_of(*tokens, size=100)


@given(st.text(max_size=20), st.lists(st.integers(0, 80), max_size=10))
def test_valid_text_survives_any_cuts(text: str, cuts: list[int]) -> None:
    data = text.encode()
    ends = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    tokens = [data[a:b] for a, b in pairwise(ends)]
    assert text_of(*tokens) == text


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<end>b")])
def test_special_tokens_are_skipped_if_asked(skip: bool, text: str) -> None:
    tokenizer = ScriptedTokenizer(b"a", b"b", b"<end>", num_special=1)
    assert "".join(pieces(Detokenizer(tokenizer, skip), [0, 2, 1])) == text


def test_a_character_goes_on_after_a_skipped_token() -> None:
    tokenizer = ScriptedTokenizer(SMILE[:2], SMILE[2:], b"<end>", num_special=1)
    assert "".join(pieces(Detokenizer(tokenizer), [0, 2, 1])) == "😊"
    assert "".join(pieces(Detokenizer(tokenizer, skip_special_tokens=False), [0, 2, 1])) == "\ufffd<end>\ufffd\ufffd"


def test_one_leading_space_is_stripped_if_asked() -> None:
    tokenizer = ScriptedTokenizer(b" ", b" a", b"<s>", num_special=1)
    stripped = [Detokenizer(tokenizer, skip, strip_leading_space=True) for skip in (True, False)]
    assert "".join(pieces(stripped[0], [2, 0, 1])) == " a"
    assert "".join(pieces(stripped[1], [2, 0, 1])) == "<s>  a"
    assert "".join(pieces(Detokenizer(tokenizer), [2, 0, 1])) == "  a"
