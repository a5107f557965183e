"""Tokenizers from GGUF metadata: how text is cut and merged, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokenspeed.text.gguf_tokenizer import ConvertedTokenizer, convert
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import ConfigError
from tokenspeed.weights.gguf import MetadataValue

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def metadata(**values: MetadataValue) -> dict[str, MetadataValue]:
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def byte_level(
    *more: tuple[str, int], merges: tuple[str, ...] = (), **values: MetadataValue
) -> dict[str, MetadataValue]:
    """A vocabulary of printable ASCII, the space's character, the merges' results, and `more` (token, kind)."""
    tokens = [chr(i) for i in range(0x21, 0x7F)] + ["Ġ", "Ċ", "Ì", "ģ", "Ã", "©"]
    tokens += [merge.replace(" ", "") for merge in merges]
    kinds = [NORMAL] * len(tokens) + [kind for _, kind in more]
    return (
        metadata(
            model="gpt2",
            tokens=tokens + [token for token, _ in more],
            token_type=np.array(kinds, np.int32),
            merges=list(merges) or ["a b"],
            **values,
        )
        if merges
        else byte_level(*more, merges=("a b",), **values)
    )


def sentence_piece(*more: tuple[str, int], prefix: bool = False, **values: MetadataValue) -> dict[str, MetadataValue]:
    """Bytes and a few words whose scores fall in the order they are written."""
    words = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab"]
    vocabulary = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    vocabulary += [(f"<0x{i:02X}>", BYTE) for i in range(256)] + [(word, NORMAL) for word in words] + list(more)
    return metadata(
        model="llama",
        tokens=[token for token, _ in vocabulary],
        token_type=np.array([kind for _, kind in vocabulary], np.int32),
        scores=-np.arange(len(vocabulary), dtype=np.float32),
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        add_space_prefix=prefix,
        **values,
    )


def tokenizer(values: dict[str, MetadataValue]) -> Tokenizer:
    backend, bos_id, eos_ids = convert(values, "x.gguf")
    return Tokenizer(backend, bos_id=bos_id, eos_ids=eos_ids, source="x.gguf")


def spellings(values: dict[str, MetadataValue], text: str) -> list[str]:
    made = tokenizer(values)
    return [made.spelling(i) for i in made.encode(text, add_special_tokens=False)]


def cuts(pre: str, text: str) -> list[str]:
    backend = convert(byte_level(pre=pre), "x.gguf").backend
    assert backend.pre_tokenizer is not None
    return [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 1234", " USAOk", "!", "\n", "\n", "x", "'", "S"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", " USAOk", "!", "\n", "\n", "x", "'", "S"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", " USAOk", "!\n\n", "x", "'S"]),
        ("llama-bpe", ["it", "'s", " ", "123", "4", " USAOk", "!\n\n", "x", "'S"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", " USAOk", "!\n\n", "x", "'S"]),
        ("gpt-4o", ["it's", " ", "123", "4", " USAOk", "!\n\n", "x'S"]),
        ("deepseek-v3", ["it", "'s", " ", "123", "4", " USAOk", "!\n\n", "x", "'S"]),
    ],
)
def test_text_is_cut_as_the_file_says(pre: str, pieces: list[str]) -> None:
    assert cuts(pre, "it's 1234 USAOk!\n\nx'S") == pieces


def test_cased_words_are_cut_before_a_capital() -> None:
    assert cuts("tekken", "camelCase/\n") == ["camel", "Case", "/\n"]
    assert cuts("gpt-4o", "camelCase's") == ["camel", "Case's"]


def test_a_file_that_does_not_say_is_cut_like_gpt2() -> None:
    values = byte_level()
    assert convert(values, "x.gguf").backend.pre_tokenizer is not None
    assert cuts("default", "a 12") == cuts("gpt-2", "a 12") == ["a", " 12"]
    assert spellings(values, "ab 12") == ["ab", "Ġ", "1", "2"]


def test_qwen_composes_characters_and_others_do_not() -> None:
    assert spellings(byte_level(pre="qwen2"), "e\u0301") == ["Ã", "©"]
    assert spellings(byte_level(pre="smollm"), "e\u0301") == ["e", "Ì", "ģ"]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])])
def test_whole_words_need_no_merges_where_the_model_says_so(pre: str, expected: list[str]) -> None:
    assert spellings(byte_level(("abc", NORMAL), pre=pre), "abc") == expected


def test_control_and_user_defined_tokens_are_found_in_text() -> None:
    values = byte_level(("<end>", CONTROL), ("<tool>", USER_DEFINED), ("ab12", UNUSED), ("cd", NORMAL), pre="qwen2")
    made = tokenizer(values)
    assert spellings(values, "a<end><tool>ab12cd") == ["a", "<end>", "<tool>", "ab", "1", "2", "c", "d"]
    assert made.special_ids == {made.token_id("<end>")}


def test_unused_tokens_at_the_end_are_no_vocabulary() -> None:
    made = tokenizer(byte_level(("ab12", UNUSED), ("<end>", CONTROL), ("[PAD1]", UNUSED), ("[PAD2]", UNUSED)))
    assert made.token_id("<end>") == made.vocab_size - 1
    assert made.token_id("[PAD1]") is None


@pytest.mark.parametrize(
    ("values", "adds_bos"),
    [
        (byte_level(("<s>", CONTROL), pre="gpt-2", bos_token_id=101), False),
        (byte_level(("<s>", CONTROL), pre="llama-bpe", bos_token_id=101), True),
        (byte_level(("<s>", CONTROL), pre="llama-bpe", bos_token_id=101, add_bos_token=False), False),
        (byte_level(("<s>", CONTROL), pre="gpt-2", bos_token_id=101, add_bos_token=True), True),
        (sentence_piece(), True),
        (sentence_piece(add_bos_token=False), False),
    ],
)
def test_beginning_of_sequence_is_added_as_the_file_or_the_kind_says(
    values: dict[str, MetadataValue], adds_bos: bool
) -> None:
    made = tokenizer(values)
    assert made.adds_bos == adds_bos
    plain = made.encode("ab", add_special_tokens=False)
    assert made.encode("ab") == ([made.bos_id, *plain] if adds_bos else plain)


def test_ends_of_sequence_turn_and_message_are_all_ends() -> None:
    ends = byte_level(("<a>", CONTROL), ("<b>", CONTROL), eos_token_id=102, eot_token_id=101, eom_token_id=102)
    assert convert(ends, "x.gguf").eos_ids == (102, 101)
    outside: ConvertedTokenizer = convert(byte_level(eos_token_id=4000), "x.gguf")
    assert outside.eos_ids == ()


def test_an_end_of_sequence_can_be_added() -> None:
    values = sentence_piece(add_eos_token=True)
    assert tokenizer(values).encode("a") == [1, tokenizer(values).token_id("a"), 2]


def test_sentence_piece_merges_the_best_union_first() -> None:
    assert spellings(sentence_piece(), "abc") == ["abc"]
    assert spellings(sentence_piece(), "bcab c") == ["bc", "ab", "▁", "c"]
    # "ab" scores better than "▁a", so it is made first, and then "▁ab".
    assert spellings(sentence_piece(), " ab") == ["▁ab"]


def test_sentence_piece_writes_unknown_characters_as_bytes() -> None:
    assert spellings(sentence_piece(), "aé") == ["a", "<0xC3>", "<0xA9>"]
    assert tokenizer(sentence_piece()).decode(tokenizer(sentence_piece()).encode("aé b", False)) == "aé b"


def test_sentence_piece_puts_a_space_before_text_if_the_file_says_so() -> None:
    values = sentence_piece(prefix=True)
    assert spellings(values, "ab") == ["▁ab"]
    assert tokenizer(values).decode(tokenizer(values).encode("ab")) == "ab"
    assert tokenizer(values).decode(tokenizer(values).encode(" ab")) == " ab"
    assert spellings(sentence_piece(), "ab") == ["ab"]


@pytest.mark.parametrize("space", [" ", "▁"])
def test_runs_of_spaces_match_longest_first(space: str) -> None:
    values = sentence_piece((space * 2, USER_DEFINED), (space * 4, USER_DEFINED))
    assert spellings(values, "a" + " " * 7 + "ab") == ["a", "▁▁▁▁", "▁▁", "▁ab"]
    made = tokenizer(values)
    assert made.decode(made.encode("a" + " " * 7 + "ab")) == "a" + " " * 7 + "ab"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (byte_level(pre="new-pre"), r"x\.gguf cuts text in the way 'new-pre', .* smollm, .*--tokenizer"),
        (
            sentence_piece() | metadata(model="t5"),
            r"x\.gguf holds a tokenizer of kind 't5'; supported are gpt2 and llama",
        ),
        (metadata(model="gpt2"), r"x\.gguf has no tokenizer\.ggml\.tokens"),
        (metadata(model="gpt2", tokens=["a"]), r"has no tokenizer\.ggml\.merges"),
        (metadata(model="llama", tokens=["a"]), r"has no tokenizer\.ggml\.scores"),
        (
            byte_level() | metadata(token_type=np.ones(3, np.int32)),
            r"damaged: tokenizer\.ggml\.token_type does not have",
        ),
        (byte_level() | metadata(merges=["q 漢"]), r"damaged: its tokenizer merges 'q' and '漢'"),
    ],
)
def test_what_cannot_be_used_is_named(values: dict[str, MetadataValue], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(values, "x.gguf")


def test_a_converted_tokenizer_can_be_saved() -> None:
    saved = json.loads(convert(sentence_piece(), "x.gguf").backend.to_str())
    assert saved["model"]["byte_fallback"] is True
    assert ["▁", "ab"] in saved["model"]["merges"]
