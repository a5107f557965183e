"""Conversations, and the prompts that transformers makes of them; `python -m tests.text.chat_cases` asks it anew.

tests/data/chat_templates/ holds a file a model: its template (as published with SmolLM2-135M-Instruct,
Qwen2.5-Coder-0.5B-Instruct, Qwen3 (Apache-2.0) and DeepSeek-V3 (MIT)), its special tokens, and the prompts of
transformers 5.24.
"""

from __future__ import annotations

import copy
import importlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "chat_templates"
MODELS = sorted(file.stem for file in FOLDER.glob("*.json"))

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather, <now>: naïve",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "default": None}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": "Hi <b>&\"'"}]},
    "system": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello é."},
            {"role": "user", "content": "Bye\n"},
        ]
    },
    "tools": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}],
        "tools": [WEATHER],
    },
    "calls": {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [_call('{"city": "Zürich", "days": 2}')]},
            {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"t": 20}'},
        ],
        "tools": [WEATHER],
    },
    "reasoning": {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4", "reasoning_content": "Easy."},
            {"role": "user", "content": "3+3?"},
        ]
    },
    "closed": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}],
        "add_generation_prompt": False,
    },
    "continued": {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    "thinking_off": {"messages": [{"role": "user", "content": "Hi"}], "kwargs": {"enable_thinking": False}},
}
"""Arguments of ChatTemplate.render by name."""


def kept(model: str) -> dict[str, Any]:
    """What is kept of a model: `template`, `special_tokens`, `prompts` by name of the conversation."""
    return json.loads((FOLDER / f"{model}.json").read_text(encoding="utf-8"))


def ask(model: str) -> dict[str, str]:
    """transformers' prompts for one model."""
    return {name: _ask(model, arguments) for name, arguments in CONVERSATIONS.items()}


def _ask(model: str, arguments: dict[str, Any]) -> str:
    library = importlib.import_module("transformers.utils.chat_template_utils")
    given = copy.deepcopy(arguments)
    if model != "deepseek_v3":  # which prints the arguments as they are, and only where the content is null
        for message in given["messages"]:
            message["content"] = message["content"] or ""
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    prompts, _ = library.render_jinja_template(
        [given.pop("messages")],
        chat_template=kept(model)["template"],
        **{"add_generation_prompt": True, **given.pop("kwargs", {}), **given, **kept(model)["special_tokens"]},
    )
    return prompts[0]


def main() -> None:
    for model in MODELS:
        text = json.dumps({**kept(model), "prompts": ask(model)}, ensure_ascii=False, indent=1)
        (FOLDER / f"{model}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
