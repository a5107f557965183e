"""Cutting a text wherever SafeCuts allows gives the ids of the whole."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tests import assets
from tests.text import real_text
from tokenspeed.text.gguf_tokenizer import SPLIT_PATTERNS
from tokenspeed.text.safe_cuts import SafeCuts
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer

FRAGMENTS = [
    *("\n", "\n\n", "\r\n", " ", "  ", "\t", "\u2028", "\x85", "\xa0", "\x1c", "\x00", "\u200b"),
    *(
        "a",
        "b",
        "Z",
        "the ",
        "foo",
        "HTTPServer",
        "1",
        "23",
        "4567",
        "'s",
        "'RE",
        "'",
        "!",
        "#",
        "/",
        "//",
        ".",
        "\n/",
        "_",
        '"',
        "->",
    ),
    *("é", "e\u0301", "\u0338", "\u0301", "漢", "字", "かな", "😀", "ß", "Ⅷ", "²"),
    *(
        "▁",
        "▁▁",
        "<",
        ">",
        "<|",
        "|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_start",
        "im_end|>",
        "<|endoftext|>",
        "<|eot_id|>",
    ),
    *(
        "<start_of_turn>",
        "<end_of_turn>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<tool_call>",
        "</think>",
        "<table>",
        "<bos>",
        "<0x0A>",
    ),
]


@cache
def loaded(asset: Callable[[], Path]) -> Tokenizer:
    return load_tokenizer(asset())


def fuzz(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(FRAGMENTS, k=draw.randint(1, 40))) for _ in range(count)]


def windows(text: str, seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    starts = [draw.randrange(len(text)) for _ in range(count)]
    return [text[start : start + draw.randint(1, 1000)] for start in starts]


def check(tokenizer: Tokenizer, texts: list[str]) -> int:
    """Cuts each text wherever it may be cut; returns how many cuts there were."""
    cuts, made = SafeCuts(tokenizer), 0
    for text, whole in zip(texts, tokenizer.encode_parts(texts), strict=True):
        parts = list(cuts.parts(text, 0))
        assert "".join(parts) == text
        assert list(chain.from_iterable(tokenizer.encode_parts(parts))) == whole, parts
        made += len(parts) - 1
    return made


@pytest.mark.parametrize("asset", [assets.smollm2, assets.gemma3])
def test_cuts_of_real_tokenizers(asset: Callable[[], Path]) -> None:
    assert check(loaded(asset), fuzz(1, 500)) > 500
    assert check(loaded(asset), windows(real_text.sources(), 2, 100)) > 500
    assert check(loaded(asset), windows(real_text.sessions()[0], 3, 50)) > 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "asset",
    [
        assets.qwen25_coder_05b,
        *(pytest.param(lambda name=name: assets.tokenizer(name), id=name) for name in assets.TOKENIZERS),
    ],
)
def test_cuts_of_more_tokenizers(asset: Callable[[], Path]) -> None:
    tokenizer = load_tokenizer(asset())
    assert check(tokenizer, fuzz(1, 5000)) > 5000
    assert check(tokenizer, windows(real_text.sources(), 2, 500)) > 2500
    assert check(tokenizer, real_text.sessions()[::8]) > 2500


def byte_level(*added: AddedToken, pattern: str | None = None) -> tokenizers.Tokenizer:
    """Byte-level with merges for pairs of spaces, line feeds and some letters, so that wrong pieces show in the ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [
        ("Ġ", "Ġ"),
        ("Ċ", "Ċ"),
        ("Ġ", "Ċ"),
        ("Ċ", "Ġ"),
        ("!", "Ċ"),
        ("Ċ", "b"),
        ("a", "Ġ"),
        ("a", "."),
        ("e", "x"),
    ]
    vocab = {token: i for i, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    first = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, last])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    return backend


def wrapped(backend: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(backend, bos_id=None, eos_ids=(), source="x")


def parts(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(SafeCuts(tokenizer).parts(text, 0))


@pytest.mark.parametrize("pattern", [None, *sorted(SPLIT_PATTERNS)])
@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.Sequence([])])
def test_cuts_of_every_known_pattern(pattern: str | None, normalizer: normalizers.Normalizer | None) -> None:
    backend = byte_level(AddedToken("<|im_end|>"), AddedToken("<tool_call>", normalized=False), pattern=pattern)
    if normalizer is not None:
        backend.normalizer = normalizer
    words = pattern is None or r"\s+(?!\S)|\s+" in pattern
    assert check(wrapped(backend), fuzz(4, 300)) > (500 if words else 20)


def test_words_and_tokens_are_cut() -> None:
    tokenizer = wrapped(byte_level(AddedToken("<|im_end|>"), AddedToken("<r1>")))
    expected = ["It's", " a", " test", ".<|im_end|>", "\n x1 y", "<r1>z"]
    assert parts(tokenizer, "".join(expected)) == expected


def test_parts_have_a_least_length() -> None:
    cuts = SafeCuts(wrapped(byte_level()))
    assert list(cuts.parts("aa bb cc dd", 4)) == ["aa bb", " cc dd"]
    assert list(cuts.parts("", 4)) == [""]


def test_texts_that_begin_alike_have_the_same_first_parts() -> None:
    cuts, text = SafeCuts(loaded(assets.smollm2)), real_text.sources()
    for end in range(5000, 9000, 371):
        short, whole = list(cuts.parts(text[:end], 500)), list(cuts.parts(text, 500))
        assert short[:-1] == whole[: len(short) - 1]


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ([AddedToken("<a>"), AddedToken("<a><b>")], "1<a><b>1<a>1"),
        ([AddedToken("<a>"), AddedToken("1<a>e")], "1<a>ex"),
        ([AddedToken("<xe"), AddedToken("1<x")], "1<xex"),
        ([AddedToken("<a>"), AddedToken(">e", normalized=False)], "1<a>ex"),
        ([AddedToken("<ae"), AddedToken("a", normalized=False)], "1<aex"),
        ([AddedToken("11<11")], "11<11<11"),
        ([AddedToken("<a>", rstrip=True)], "1<a> 1"),
        ([AddedToken("x", rstrip=True)], "1x b"),
        ([AddedToken("<a>"), AddedToken("b", lstrip=True)], "1<a> b a b"),
        ([AddedToken("#a"), AddedToken("xe", single_word=True)], "1#axe"),
        ([AddedToken("a.b")], "1a.b a.c"),
        ([AddedToken("\n"), AddedToken("\n!")], "1\n!1\n1"),
        ([AddedToken("\n", rstrip=True)], "1\n !\n!"),
        ([AddedToken("\n", normalized=False), AddedToken("\n\n", normalized=False)], "1\n1\n\n1\n\n\n1"),
    ],
)
def test_added_tokens_that_could_mislead(added: list[AddedToken], text: str) -> None:
    check(wrapped(byte_level(*added)), [text])


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.Prepend("x"), normalizers.Replace("><", ">!<")])
def test_normalisers_that_could_mislead(normalizer: normalizers.Normalizer) -> None:
    for normalized in (True, False):
        tokens = [AddedToken("<a>", normalized=normalized), AddedToken("<b>", normalized=not normalized)]
        backend = byte_level(*tokens, AddedToken("\n", normalized=normalized))
        backend.normalizer = normalizer
        check(
            wrapped(backend), ["1<a>\u03381", "a<a>a <b> a<a><b>1", "  <a>  <b>  a  a", "a \u0338a\u0301 <b>", "1\n1"]
        )


def test_a_letter_may_go_on_into_an_unknown_pattern() -> None:
    tokenizer = wrapped(byte_level(pattern=r"\w+\.\w+|\s+(?!\S)|\s+"))
    assert parts(tokenizer, "a.b a") == ["a.b a"]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_space_before_the_first_text_only_forbids_cuts(scheme: str) -> None:
    vocab = {token: i for i, token in enumerate(["<unk>", "▁", "a", "b", "▁a", "▁b"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a"), ("▁", "b")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    backend.add_special_tokens(["<s>"])
    assert check(wrapped(backend), ["a<s>b", "<s>a b<s> a"]) == (0 if scheme == "first" else 3)


def test_line_feeds_that_are_tokens_are_cut() -> None:
    feeds = [AddedToken("\n" * n, normalized=False) for n in (1, 2, 3)]
    tokenizer = wrapped(byte_level(*feeds))
    assert parts(tokenizer, "1\n1\n\n1\n 1\n") == ["1\n", "1\n\n1\n", " 1\n"]
