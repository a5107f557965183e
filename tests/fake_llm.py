"""An `LLM` over a real engine whose device is a fake, with a tokenizer of single characters."""

from __future__ import annotations

import time
from dataclasses import dataclass

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.engine.fake import EOS, VOCAB, FakeRunner, FakeStep, limits
from tokenspeed import LLM
from tokenspeed.config import EngineConfig, GenerationDefaults
from tokenspeed.engine.client import ThreadEngine
from tokenspeed.loading import ModelText
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import Schedule


def tiny_tokenizer() -> Tokenizer:
    """One token a character; `VOCAB` of them, with the fake model's end of sequence."""
    characters = "abcdefghijklmnopqrstuvwxyz0123456789ĠABCDEFGHIJKLMNOPQRSTUV"
    tokens = ["<bos>", "<eos>", *characters]
    assert (len(tokens), tokens[EOS]) == (VOCAB, "<eos>")
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: k for k, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return Tokenizer(backend, bos_id=0, eos_ids=(EOS,), source="the test")


TOKENIZER = tiny_tokenizer()


class SlowRunner(FakeRunner):
    """A device that takes a while for each step, so that a test can come between."""

    def dispatch(self, schedule: Schedule) -> FakeStep:
        time.sleep(0.02)
        return super().dispatch(schedule)


TEMPLATE = ChatTemplate(
    {
        "default": "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
        "{% if tools %}T{{ tools | length }} {% endif %}{% if thinks is defined %}K{{ thinks }} {% endif %}"
        "{% if add_generation_prompt %}A {% endif %}"
    },
    {},
    "the test",
)


TEXT = ModelText(TOKENIZER, TEMPLATE, GenerationDefaults(), (EOS,))


@dataclass
class Made:
    """An `LLM` and what is behind it."""

    llm: LLM
    runner: FakeRunner
    engine: ThreadEngine


def make(
    *,
    slow: bool = False,
    fail_at: int | None = None,
    defaults: GenerationDefaults | None = None,
    progress: bool = False,
) -> Made:
    runner = (SlowRunner if slow else FakeRunner)(limits(), fail_at=fail_at)
    engine = ThreadEngine(runner, EngineConfig())
    text = TEXT._replace(defaults=defaults or GenerationDefaults())
    return Made(LLM.over(text, engine, EngineConfig(progress=progress)), runner, engine)
