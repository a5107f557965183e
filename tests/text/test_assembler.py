"""A sequence's output, assembled the same from deltas of one, two, or all tokens."""

from __future__ import annotations

import pytest

from tests.text.scripted import ScriptedTokenizer, portions
from tokenspeed.text.assembler import OutputAssembler, TextDelta
from tokenspeed.types import FinishReason, SamplingParams, TokenDelta, TokenLogprobs

SMILE = "😊".encode()
SIZES = pytest.mark.parametrize("size", [1, 2, 99])


def deltas(
    num_tokens: int, size: int, reason: FinishReason | None = None, stop_token_id: int | None = None
) -> list[TokenDelta]:
    """Tokens 0, 1, ... in portions; the last carries the reason. Each token's log-probability is minus its id."""
    made: list[TokenDelta] = []
    for ids in portions(range(num_tokens), size):
        logprobs = tuple(TokenLogprobs(-float(i), 1, (), ()) for i in ids)
        made.append(TokenDelta(request_id="r", token_ids=tuple(ids), logprobs=logprobs))
    last = TokenDelta(
        request_id="r",
        token_ids=made[-1].token_ids,
        logprobs=made[-1].logprobs,
        finish_reason=reason,
        stop_token_id=stop_token_id,
    )
    return [*made[:-1], last]


def push(tokenizer: ScriptedTokenizer, sampling: SamplingParams, made: list[TokenDelta]) -> TextDelta:
    """All deltas as one; also checks that the end comes once and the log-probabilities are the ids' own."""
    assembler, ids, logprobs, text = OutputAssembler(tokenizer, sampling), list[int](), list[float](), ""
    ended: TextDelta | None = None
    for delta in made:
        added = assembler.push(delta)
        text, ids = text + added.text, ids + list(added.token_ids)
        logprobs += [entry.logprob for entry in added.logprobs or ()]
        if added.finish_reason is not None:
            assert ended is None
            ended = added
    assert logprobs == [-float(i) for i in ids]
    assert assembler.finished == (ended is not None)
    return TextDelta(
        text=text,
        token_ids=tuple(ids),
        finish_reason=ended and ended.finish_reason,
        stop_reason=ended and ended.stop_reason,
    )


def outcome(
    *tokens: bytes,
    size: int,
    reason: FinishReason | None,
    num_special: int = 0,
    stop_token_id: int | None = None,
    **sampling: object,
) -> tuple[str, int, FinishReason | None, str | int | None]:
    params = SamplingParams(**sampling)  # pyright: ignore[reportArgumentType]
    made = deltas(len(tokens), size, reason, stop_token_id)
    end = push(ScriptedTokenizer(*tokens, num_special=num_special), params, made)
    return end.text, len(end.token_ids), end.finish_reason, end.stop_reason


@SIZES
@pytest.mark.parametrize(("max_tokens", "text"), [(2, "Hello! "), (3, "Hello! "), (4, "Hello! 😊")])
def test_the_limit_inside_a_character_drops_its_bytes(max_tokens: int, text: str, size: int) -> None:
    tokens = (b"Hello", b"! ", SMILE[:2], SMILE[2:])[:max_tokens]
    assert outcome(*tokens, size=size, reason="length") == (text, max_tokens, "length", None)


@SIZES
@pytest.mark.parametrize(
    ("tokens", "text"), [((b"hi", b"\nUs", b"ers", b"</s>"), "hi\nUsers"), ((b"hi", b"\nUs", b"</s>"), "hi\nUs")]
)
def test_what_was_held_back_is_flushed_at_the_end(tokens: tuple[bytes, ...], text: str, size: int) -> None:
    ended = outcome(*tokens, size=size, reason="stop", num_special=1, stop=("\nUser:",))
    assert ended == (text, len(tokens), "stop", None)


@SIZES
def test_a_stop_string_ends_the_output_and_what_follows_is_dropped(size: int) -> None:
    tokens = (b"hi", b"\nUs", b"er:", b" x", b"y")
    expected = ("hi", 3, "stop", "\nUser:")
    assert outcome(*tokens, size=size, reason="length", stop=("\nUser:",)) == expected
    assert outcome(*tokens, size=size, reason=None, stop=("\nUser:",)) == expected


@SIZES
def test_a_stop_string_can_be_included(size: int) -> None:
    ended = outcome(
        b"hi", b"\nUs", b"er: x", b"y", size=size, reason=None, stop=("er:",), include_stop_str_in_output=True
    )
    assert ended == ("hi\nUser:", 3, "stop", "er:")


@SIZES
def test_the_limit_wins_over_a_stop_string_on_the_same_token(size: int) -> None:
    assert outcome(b"a", b"b", b"END", size=size, reason="length", stop=("END",)) == ("ab", 3, "length", None)


@SIZES
def test_a_stop_string_before_the_end_of_sequence_drops_it(size: int) -> None:
    assert outcome(b"a", b"END", b"</s>", size=size, reason="stop", stop=("END",)) == ("a", 2, "stop", "END")


@SIZES
@pytest.mark.parametrize("skip", [True, False])
def test_the_end_of_sequence_is_counted_but_not_read(skip: bool, size: int) -> None:
    ended = outcome(b"a", b"b", b"</s>", size=size, reason="stop", num_special=1, skip_special_tokens=skip)
    assert ended == ("ab", 3, "stop", None)


@SIZES
@pytest.mark.parametrize(("num_special", "skip", "text"), [(0, True, "abQ"), (1, True, "ab"), (1, False, "abQ")])
def test_a_stop_ids_text_can_be_included(num_special: int, skip: bool, text: str, size: int) -> None:
    ended = outcome(
        b"a",
        b"b",
        b"Q",
        size=size,
        reason="stop",
        stop_token_id=2,
        num_special=num_special,
        skip_special_tokens=skip,
        include_stop_str_in_output=True,
    )
    assert ended == (text, 3, "stop", 2)
    without = outcome(b"a", b"b", b"Q", size=size, reason="stop", stop_token_id=2, stop=("Q",))
    assert without == ("ab", 3, "stop", 2)


@SIZES
def test_stop_strings_wait_for_min_tokens(size: int) -> None:
    ended = outcome(b"x", b"a", b"a", b"y", b"ba", b"z", size=size, reason="length", stop=("a",), min_tokens=3)
    assert ended == ("xaayb", 5, "stop", "a")


@SIZES
def test_an_aborted_output_keeps_its_text(size: int) -> None:
    assert outcome(b"a", b"EN", size=size, reason="abort", stop=("END",)) == ("aEN", 2, "abort", None)


def test_tokens_and_logprobs_come_before_their_text() -> None:
    assembler = OutputAssembler(ScriptedTokenizer(b"hi", b"\nUs", b"ers"), SamplingParams(stop=("\nUser:",)))
    added = [assembler.push(delta) for delta in deltas(3, 1)]
    assert [a.text for a in added] == ["hi", "", "\nUsers"]
    assert [a.token_ids for a in added] == [(0,), (1,), (2,)]
    assert [len(a.logprobs or ()) for a in added] == [1, 1, 1]


def test_no_logprobs_are_made_up() -> None:
    assembler = OutputAssembler(ScriptedTokenizer(b"a"), SamplingParams())
    assert assembler.push(TokenDelta(request_id="r", token_ids=(0,))).logprobs is None


def test_deltas_after_the_end_add_nothing() -> None:
    assembler = OutputAssembler(ScriptedTokenizer(b"END", b"x"), SamplingParams(stop=("END",)))
    assert assembler.push(TokenDelta(request_id="r", token_ids=(0,))).finish_reason == "stop"
    late = assembler.push(TokenDelta(request_id="r", token_ids=(1,), finish_reason="length"))
    assert late == TextDelta(text="", token_ids=())


def test_a_delta_without_tokens_can_end_the_output() -> None:
    assembler = OutputAssembler(ScriptedTokenizer(b"EN"), SamplingParams(stop=("END",)))
    assert assembler.push(TokenDelta(request_id="r", token_ids=(0,))).text == ""
    assert assembler.push(TokenDelta(request_id="r", token_ids=(), finish_reason="abort")).text == "EN"
