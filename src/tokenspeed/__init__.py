"""tokenspeed: an LLM inference engine for coding agents, as pure JAX programs."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenspeed.config import EngineConfig
    from tokenspeed.llm import LLM
    from tokenspeed.types import RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]

_MODULES = {
    "EngineConfig": "tokenspeed.config",
    "LLM": "tokenspeed.llm",
    "RequestOutput": "tokenspeed.types",
    "SamplingParams": "tokenspeed.types",
}


def __getattr__(name: str) -> object:
    """Imports a public name when it is first used, so that `tokenspeed --help` does not wait for JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(_MODULES[name]).__dict__[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
