"""Opening a model: its text side from files, and its runner."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.fake import FakeRunner, limits
from tests.fake_llm import TOKENIZER
from tokenspeed import LLM, EngineConfig, SamplingParams
from tokenspeed.config import GenerationDefaults
from tokenspeed.loading import build, open_text
from tokenspeed.runtime import build as runtime_build
from tokenspeed.types import ConfigError
from tokenspeed.weights.checkpoint import Checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": TOKENIZER.vocab_size,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 1,
    "bos_token_id": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model without weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "eos_token_id": [1, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    return folder


def config_of(folder: Path, **more: str) -> EngineConfig:
    return EngineConfig(model=str(folder), load_format="dummy", **more)  # pyright: ignore[reportArgumentType]


def test_the_text_side_of_a_folder(folder: Path) -> None:
    text = open_text(config_of(folder))
    assert text.tokenizer.encode("abc") == TOKENIZER.encode("abc")
    assert sorted(text.eos_ids) == [1, 7]
    assert text.defaults == GenerationDefaults(temperature=0.5)
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "hi"}]) == "hi!"


def test_another_tokenizer_and_template(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer.json"
    (folder / "tokenizer.json").rename(other)
    (folder / "chat_template.jinja").unlink()
    text = open_text(config_of(folder, tokenizer=str(other), chat_template="{{ messages[0].content }}?"))
    assert text.tokenizer.encode("abc") == TOKENIZER.encode("abc")
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": "hi"}]) == "hi?"
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json"):
        open_text(config_of(folder))
    with pytest.raises(ConfigError, match="nowhere"):
        open_text(config_of(folder, tokenizer="nowhere"))


def test_a_model_may_have_no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert open_text(config_of(folder)).chat_template is None


def test_sampling_defaults_may_be_left_out(folder: Path) -> None:
    assert open_text(config_of(folder, generation_config="vllm")).defaults == GenerationDefaults()


def test_the_text_side_needs_no_jax() -> None:
    code = (
        "import sys, tokenspeed.loading, tokenspeed.server.run, tokenspeed.cli.serve; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, Checkpoint]]:
    """What runners were built of; they are fakes."""
    calls: list[tuple[EngineConfig, Checkpoint]] = []

    def build_fake(config: EngineConfig, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> FakeRunner:
        calls.append((config, checkpoint))
        for done in (1, 2):
            on_progress(done, 2)
        return FakeRunner(limits())

    monkeypatch.setattr(runtime_build, "build_runner", build_fake)
    return calls


def test_an_llm_of_a_folder(
    folder: Path, built: list[tuple[EngineConfig, Checkpoint]], capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM(folder, load_format="dummy", max_num_seqs=2) as llm:
        assert "Compiling" in capsys.readouterr().err
        [answer] = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4))
        assert answer.prompt == "hi!"
        assert llm.default_sampling().temperature == 0.5
    [(config, checkpoint)] = built
    assert config == EngineConfig(model=str(folder), load_format="dummy", max_num_seqs=2)
    assert checkpoint.config.num_layers == 1


@pytest.mark.usefixtures("built")
def test_progress_can_be_turned_off(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LLM(folder, load_format="dummy", progress=False):
        assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("built")
def test_a_build_logs_how_far_it_is(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed"):
        assert build(config_of(folder)).limits == limits()
    assert caplog.messages == ["compiled 1 of 2 programs", "compiled 2 of 2 programs"]
