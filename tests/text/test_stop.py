"""Stop strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.text.stop import StopMatcher


def run(matcher: StopMatcher, *texts: str) -> tuple[list[str], str | None]:
    """What comes out of each push until the end, and of the flush."""
    out: list[str] = []
    for text in texts:
        settled, stop = matcher.push(text)
        out.append(settled)
        if stop is not None:
            return out, stop
    return [*out, matcher.flush()], None


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    assert run(StopMatcher(["\nUser:"]), "hi", "\nUs", "ers", "x") == (["hi", "", "\nUsers", "x", ""], None)


def test_the_end_is_flushed() -> None:
    assert run(StopMatcher(["\nUser:"]), "hi", "\nUs") == (["hi", "", "\nUs"], None)


def test_a_match_across_tokens_ends_the_text_before_it() -> None:
    assert run(StopMatcher(["\nUser:"]), "hi", " \nUs", "er: x", "y") == (["hi", " ", ""], "\nUser:")


def test_a_match_may_be_included() -> None:
    matcher = StopMatcher(["\nUser:"], include=True)
    assert run(matcher, "hi", "\nUs", "er: x") == (["hi", "\nUs", "er:"], "\nUser:")


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["b", "a"], "xab", ("x", "a")),
        (["abcd", "bc"], "abcd", ("a", "bc")),
        (["c", "abc", "bc"], "xabc", ("x", "abc")),
        (["aab"], "aaaab", ("aa", "aab")),
        (["abab", "abac"], "ababac", ("", "abab")),
        (["abac"], "ababac", ("ab", "abac")),
        (["ß😊"], "x😊ß😊", ("x😊", "ß😊")),
    ],
)
def test_the_first_complete_match_wins_and_of_two_the_longer(
    stop: list[str], text: str, expected: tuple[str, str]
) -> None:
    for texts in ([text], list(text)):
        out, found = run(StopMatcher(stop), *texts)
        assert ("".join(out), found) == expected


def test_text_of_the_first_tokens_is_not_searched() -> None:
    assert run(StopMatcher(["a"], min_tokens=2), "xa", "a", "ya") == (["xa", "a", "y"], "a")
    assert run(StopMatcher(["ab"], min_tokens=1), "a", "b", "ab") == (["a", "b", ""], "ab")


def reference(stop: list[str], text: str) -> tuple[str, str | None]:
    """The rule, tried at every character."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_portions_do_not_matter(stop: list[str], texts: list[str]) -> None:
    out, found = run(StopMatcher(stop), *texts)
    assert ("".join(out), found) == reference(stop, "".join(texts))


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=12),
)
def test_no_more_is_held_back_than_could_belong_to_a_match(stop: list[str], texts: list[str]) -> None:
    matcher, given_text, out = StopMatcher(stop), "", ""
    for text in texts:
        settled, found = matcher.push(text)
        if found is not None:
            return
        given_text, out = given_text + text, out + settled
        held = given_text[len(out) :]
        assert given_text == out + held
        assert held == "" or any(s.startswith(held) for s in stop)
