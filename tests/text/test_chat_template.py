"""Conversations to prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import assets
from tests.text import chat_cases
from tests.text.chat_cases import CONVERSATIONS, WEATHER
from tokenspeed.text.chat_template import ChatTemplate, load_chat_template
from tokenspeed.types import ConfigError, InvalidRequest

USER = [{"role": "user", "content": "Hi"}]
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


def template(text: str = CHATML, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special_tokens, "x")


def rendered(text: str, messages: list[dict[str, Any]] = USER, **arguments: Any) -> str:
    return template(text).render(messages, **arguments)


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("model", chat_cases.MODELS)
def test_prompts_are_those_of_transformers(model: str, name: str) -> None:
    kept = chat_cases.kept(model)
    made = template(kept["template"], **kept["special_tokens"]).render(**CONVERSATIONS[name])
    assert made == kept["prompts"][name]


@pytest.mark.oracle
@pytest.mark.parametrize("model", chat_cases.MODELS)
def test_kept_prompts_are_those_of_transformers_now(model: str) -> None:
    assert chat_cases.ask(model) == chat_cases.kept(model)["prompts"]


def test_the_template_of_a_gguf_file_is_found() -> None:
    kept = chat_cases.kept("smollm2")
    found = load_chat_template(assets.smollm2())
    assert found is not None
    assert found.text == kept["template"]
    assert found.render(**CONVERSATIONS["system"]) == kept["prompts"]["system"]
    eos = load_chat_template(assets.smollm2(), "{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    assert eos is not None
    assert eos.render(USER) == "<|im_start|><|im_end|><|endoftext|>"


def write_folder(folder: Path, **files: str | dict[str, Any]) -> Path:
    for name, content in files.items():
        file = folder / {"jinja": "chat_template.jinja", "config": "tokenizer_config.json"}.get(name, f"{name}.jinja")
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_templates_are_looked_for_in_order(tmp_path: Path) -> None:
    def found(override: str | None = None) -> str | None:
        loaded = load_chat_template(tmp_path, override)
        return loaded and loaded.text

    assert found() is None
    write_folder(tmp_path, config={"chat_template": "from config", "bos_token": {"content": "<s>"}})
    assert found() == "from config"
    write_folder(tmp_path, jinja="from jinja")
    assert found() == "from jinja"
    (tmp_path / "tokenizer.json").write_text("{}")
    by_file = load_chat_template(tmp_path / "tokenizer.json")
    assert by_file is not None
    assert by_file.text == "from jinja"
    write_folder(tmp_path, other="from file {{ bos_token }}")
    assert found(str(tmp_path / "other.jinja")) == "from file {{ bos_token }}"
    assert found("{{ literal }}") == "{{ literal }}"
    overridden = load_chat_template(tmp_path, "{{ bos_token }}")
    assert overridden is not None
    assert overridden.render(USER) == "<s>"


def test_a_template_of_its_own_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    loaded = load_chat_template(write_folder(tmp_path, config={"chat_template": named}))
    assert loaded is not None
    assert loaded.render(USER) == loaded.render(USER, tools=[]) == "plain"
    assert loaded.render(USER, tools=[WEATHER]) == "1 tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    beside = load_chat_template(write_folder(tmp_path, jinja="from jinja"))
    assert beside is not None
    assert (beside.render(USER), beside.render(USER, tools=[WEATHER])) == ("from jinja", "more tools")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("/no/such/file.jinja", "--chat-template /no/such/file.jinja is no template, and as a file it cannot be read"),
        ("{% for %}", "the chat template of --chat-template has a mistake in line 1"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_chat_template(tmp_path, override)


def test_the_environment_is_that_of_transformers() -> None:
    assert rendered("{%- generation %}a{% endgeneration %}b") == "ab"
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"
    assert (
        rendered("{{ '<é>' | tojson }}{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}")
        == '"<é>"{\n "b": 1,\n "a": [\n  2\n ]\n}'
    )
    assert len(rendered("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert rendered("{{ documents | length }}{{ tools is none }}", documents=[{"title": "t", "text": "x"}]) == "1True"
    assert rendered("{{ thinking }}", kwargs={"thinking": "on"}) == "on"


def test_lists_can_be_queues_and_nothing_else_is_changed() -> None:
    messages = [{"role": "user", "content": "Hi", "tags": ["a"]}]
    queue = "{% set q = [] %}{% set _ = q.append(1) %}{% set _ = q.append(2) %}{{ q.pop(0) }}{{ q }}"
    assert rendered(queue) == "1[2]"
    assert rendered("{% set _ = messages[0].tags.append('b') %}{{ messages[0].tags }}", messages) == "['a', 'b']"
    assert messages == [{"role": "user", "content": "Hi", "tags": ["a"]}]
    for attack in ("{{ messages[0].update({'role': 'x'}) }}", "{{ ''.__class__.__mro__ }}", "{{ [].clear() }}"):
        with pytest.raises(InvalidRequest, match="unsafe"):
            rendered(attack)


def test_a_template_refuses_in_its_own_words() -> None:
    with pytest.raises(InvalidRequest, match=r"^roles must alternate$") as caught:
        rendered("{% if messages | length < 5 %}{{ raise_exception('roles must alternate') }}{% endif %}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "text", ["{{ messages[0].content + 1 }}", "{{ nothing.at.all }}", "{{ messages[0]['x'] + 'y' }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_fails_is_the_requests_fault(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"chat template cannot render these messages: ."):
        rendered("{% if messages[0].content == 'Hi' %}" + text + "{% endif %}")


def test_what_cannot_be_rendered_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="must not be empty"):
        rendered(CHATML, [])
    with pytest.raises(InvalidRequest, match="cannot both be true"):
        rendered(CHATML, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="messages is a field of the request") as caught:
        rendered(CHATML, kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs.messages"


@pytest.mark.parametrize(
    ("text", "content", "prompt"),
    [
        (CHATML, "It is ", "<|assistant|>It is "),
        (CHATML, [{"type": "text", "text": "It"}, {"type": "text", "text": "is"}], "<|assistant|>It\nis"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "It is ", "[It is"),
        (
            "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}",
            [{"type": "text", "text": "It "}],
            "[It ",
        ),
    ],
)
def test_a_continued_message_stays_open(text: str, content: Any, prompt: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    assert rendered(text, messages, add_generation_prompt=False, continue_final_message=True) == prompt


def test_what_cannot_be_continued_is_refused() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match="leaves out the last message"):
        rendered("x", **options)
    with pytest.raises(InvalidRequest, match="a last message with text"):
        rendered("{% for p in messages[0].content %}{% endfor %}", [{"role": "assistant", "content": []}], **options)


def test_tool_schemas_keep_their_nulls_and_order() -> None:
    tool = {
        "type": "function",
        "strict": None,
        "function": {"name": "f", "description": None, "parameters": {"b": None, "a": 1}},
    }
    made = rendered("{{ tools[0] | tojson }}", tools=[tool])
    assert made == '{"type": "function", "function": {"name": "f", "parameters": {"b": null, "a": 1}}}'
