"""Opening a model: its text side from files, and its runner."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_llm import TOKENIZER
from tokenspeed import LLM, EngineConfig, SamplingParams
from tokenspeed.config import GenerationDefaults
from tokenspeed.loading import open_text
from tokenspeed.types import ConfigError

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


def test_an_llm_of_random_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    settings = {"load_format": "dummy", "max_num_seqs": 2, "max_num_batched_tokens": 16, "compilation_cache": False}
    with LLM(folder, **settings) as llm:
        [alone] = llm.generate("hello", sampling)
        assert len(alone.token_ids) == 4
        assert "Compiling" in capsys.readouterr().err
    with LLM(folder, **settings, progress=False) as llm:
        assert llm.generate(["hello", "you"], sampling)[0].token_ids == alone.token_ids
        assert capsys.readouterr().err == ""
