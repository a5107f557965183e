from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import assets
from tests.weights.gguf_writing import write as write_gguf
from tests.weights.test_config_json import QWEN2_05B
from tests.weights.test_huggingface import NAMES, random_tensors
from tests.weights.test_huggingface import write as write_folder
from tokenspeed.config import EngineConfig, GenerationDefaults, LoadFormat
from tokenspeed.types import ConfigError
from tokenspeed.weights.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "hf", random_tensors(*NAMES))


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf")


def test_a_path_decides_its_layout(folder: Path, gguf: Path) -> None:
    assert open_checkpoint(folder, EngineConfig()).config.architecture == "Qwen2ForCausalLM"
    assert open_checkpoint(gguf, EngineConfig()).config.architecture == "LlamaForCausalLM"
    assert open_checkpoint(gguf.parent, EngineConfig()).path == gguf, "the only .gguf file of a folder"


def test_the_load_format_may_insist(folder: Path, gguf: Path) -> None:
    assert open_checkpoint(folder, EngineConfig(load_format="safetensors")).path == folder
    assert open_checkpoint(gguf, EngineConfig(load_format="gguf")).path == gguf
    with pytest.raises(ConfigError, match=r"--load-format safetensors cannot read .*m\.gguf"):
        open_checkpoint(gguf, EngineConfig(load_format="safetensors"))
    with pytest.raises(ConfigError, match=r"hf holds no \.gguf file"):
        open_checkpoint(folder, EngineConfig(load_format="gguf"))
    (folder / "m.gguf").write_bytes(gguf.read_bytes())
    assert open_checkpoint(folder, EngineConfig(load_format="gguf")).path == folder / "m.gguf"


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "gguf", "dummy"])
def test_folders_that_hold_no_model(tmp_path: Path, load_format: LoadFormat) -> None:
    with pytest.raises(ConfigError, match=rf"{tmp_path.name} holds"):
        open_checkpoint(tmp_path, EngineConfig(load_format=load_format))


def test_several_gguf_files_need_a_choice(gguf: Path) -> None:
    (gguf.parent / "n.gguf").write_bytes(gguf.read_bytes())
    with pytest.raises(ConfigError, match=r"holds 2 \.gguf files; give the path of one"):
        open_checkpoint(gguf.parent, EngineConfig())


def test_dummy_weights_need_only_a_config(folder: Path, gguf: Path) -> None:
    (folder / "model.safetensors").unlink()
    gguf.write_bytes(gguf.read_bytes()[:-1000])
    for path in (folder, gguf):
        with pytest.raises(ConfigError):
            open_checkpoint(path, EngineConfig())
        assert open_checkpoint(path, EngineConfig(load_format="dummy")).config.num_heads > 0


def test_overrides_are_applied(folder: Path, gguf: Path) -> None:
    for path in (folder, gguf):
        assert open_checkpoint(path, EngineConfig(hf_overrides={"rope_theta": 123.0})).config.rope.theta == 123.0


def test_sampling_defaults_come_from_where_the_user_says(folder: Path, tmp_path: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": 5}')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"temperature": 0.25}')

    def found(named: str) -> tuple[GenerationDefaults, tuple[int, ...]]:
        opened = open_checkpoint(folder, EngineConfig(generation_config=named))
        return opened.generation, opened.config.eos_token_ids

    assert found("auto") == (GenerationDefaults(top_k=7), (151645, 5))
    assert found("vllm") == (GenerationDefaults(), (151645, 5))
    assert found(str(tmp_path / "other")) == (GenerationDefaults(temperature=0.25), (151645, 5))
    with pytest.raises(ConfigError, match=r"nowhere/generation_config\.json cannot be read"):
        found("nowhere")


def test_a_whole_real_model_is_the_same_packed_and_not() -> None:
    checkpoint = open_checkpoint(assets.smollm2(), EngineConfig())
    packed_names = 0
    for name in checkpoint.names():
        if "layers.0." not in name and "layers.29." not in name:
            continue
        packed, weights = checkpoint.read_quantized(name), checkpoint.read(name)
        assert weights.dtype == np.float32
        assert weights.shape == checkpoint.shape(name)
        if packed is None:
            continue
        packed_names += 1
        restored = packed.values.reshape(*packed.scales.shape, packed.group_size) * packed.scales[..., None]
        if packed.offsets is not None:
            restored += packed.offsets[..., None]
        np.testing.assert_array_equal(restored.reshape(weights.shape), weights)
    assert packed_names == 14


def test_a_foreign_config_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(QWEN2_05B | {"architectures": ["BertModel"]}))
    with pytest.raises(ConfigError, match=r"config\.json describes the architecture BertModel, which is not supported"):
        open_checkpoint(folder, EngineConfig())
