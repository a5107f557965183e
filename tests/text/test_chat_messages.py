"""What a template sees of messages."""

from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.text.chat_messages import MessageForm
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.types import InvalidRequest


def form_of(text: str) -> MessageForm:
    return ChatTemplate({"default": text}, {}, "x").form


def seen(form: MessageForm, **message: Any) -> dict[str, Any]:
    [made] = form.messages([{"role": "user", **message}])
    return made


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def arguments_seen(form: MessageForm, arguments: Any) -> Any:
    return seen(form, role="assistant", tool_calls=[call(arguments)])["tool_calls"][0]["function"]["arguments"]


TEXT = MessageForm()
PARTS = MessageForm(content_parts=True)


def test_null_values_are_left_out_and_a_missing_content_is_empty() -> None:
    assert seen(TEXT, content=None, name=None, tool_calls=None) == {"role": "user", "content": ""}
    assert seen(TEXT, tool_calls=[]) == {"role": "user", "content": ""}
    assert seen(TEXT, content="x", name="n", tool_call_id="i")["tool_call_id"] == "i"


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        ["a", {"type": "input_text", "text": "b"}],
        ({"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "b"}),
    ],
)
def test_parts_are_joined_unless_the_template_goes_through_them(parts: Any) -> None:
    assert seen(TEXT, content=parts)["content"] == "a\nb"
    assert seen(PARTS, content=parts)["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert seen(PARTS, content="ab")["content"] == "ab"
    assert seen(TEXT, content=[])["content"] == ""


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {}}, {"type": "text"}, {}, 3])
def test_parts_that_are_no_text_are_refused(part: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"messages\.0\.content\.1 is a part of type .* text only") as caught:
        seen(TEXT, content=["a", part])
    assert caught.value.param == "messages.0.content.1"


def test_developers_are_systems_to_templates_that_do_not_know_them() -> None:
    assert seen(TEXT, role="developer")["role"] == "system"
    assert seen(MessageForm(developer=True), role="developer")["role"] == "developer"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_has_the_names_that_templates_read(name: str) -> None:
    made = seen(TEXT, role="assistant", content="x", **{name: "why"})
    assert (made["reasoning_content"], made["thinking"]) == ("why", "why")


@pytest.mark.parametrize(
    ("arguments", "as_object", "as_text"),
    [
        ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"}, '{"b": 1, "a": "é"}'),
        ("", {}, "{}"),
        (None, {}, "{}"),
        ({"a": "é"}, {"a": "é"}, '{"a": "é"}'),
        ('{"a": 1', '{"a": 1', '{"a": 1'),
        ("[1]", "[1]", "[1]"),
    ],
)
def test_arguments_of_calls(arguments: Any, as_object: Any, as_text: str) -> None:
    assert arguments_seen(TEXT, arguments) == as_object
    assert arguments_seen(MessageForm(arguments_as_text=True), arguments) == as_text


def test_content_beside_calls() -> None:
    form = MessageForm(calls_without_content=True)
    assert seen(form, content=None, tool_calls=[call("")])["content"] is None
    assert seen(form, content="x", tool_calls=[call("")])["content"] == "x"
    assert seen(form, content=None)["content"] == ""
    assert seen(TEXT, content=None, tool_calls=[call("")])["content"] == ""


def test_the_callers_messages_stay_as_they_are() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "a"}], "tool_calls": [call("{}")]}]
    TEXT.messages(messages)
    assert messages == [{"role": "developer", "content": [{"type": "text", "text": "a"}], "tool_calls": [call("{}")]}]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("{{ messages[0].content }}", MessageForm()),
        ("{% for p in messages[0].content %}{% endfor %}", PARTS),
        ("{% for p in messages[0]['content'] | list %}{% endfor %}", PARTS),
        ("{% set c = messages[0].content %}{% for p in c %}{% endfor %}", PARTS),
        ("{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}", PARTS),
        ("{% for p in messages %}{% endfor %}", MessageForm()),
        ("{# developer #}{{ 'developer' }}", MessageForm(developer=True)),
        (CALLS + "{{ c.function.arguments | tojson }}" + END, MessageForm()),
        (CALLS + "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}" + END, MessageForm()),
        (CALLS + "{{ c.function.arguments }}" + END, MessageForm(arguments_as_text=True)),
        (CALLS + "{{ 'x' + c.function.arguments }}" + END, MessageForm(arguments_as_text=True)),
        (
            "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}",
            MessageForm(calls_without_content=True),
        ),
        (
            "{% for m in messages %}{% if m.content is none %}{{ 'x' + m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}",
            MessageForm(calls_without_content=True, arguments_as_text=True),
        ),
    ],
)
def test_how_a_template_reads_messages_is_found_out(text: str, form: MessageForm) -> None:
    assert form_of(text) == form
