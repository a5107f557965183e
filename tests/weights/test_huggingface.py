from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.weights.test_config_json import GEMMA3_4B, QWEN2_05B
from tokenspeed.config import GenerationDefaults
from tokenspeed.types import ConfigError
from tokenspeed.weights.huggingface import HuggingFaceCheckpoint

Tensors = dict[str, np.ndarray]


def random_tensors(*names: str) -> Tensors:
    rng = np.random.default_rng(len(names))
    return {name: rng.normal(size=(6, 4)).astype(ml_dtypes.bfloat16) for name in names}


NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


def write(
    folder: Path, tensors: Tensors, shards: dict[str, list[str]] | None = None, config: dict[str, object] = QWEN2_05B
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
        return folder
    for file, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


TWO_SHARDS = {"model-00001-of-00002.safetensors": [*NAMES[:2]], "model-00002-of-00002.safetensors": [*NAMES[2:]]}


def checkpoint(folder: Path) -> HuggingFaceCheckpoint:
    return HuggingFaceCheckpoint(folder, {})


@pytest.mark.parametrize("shards", [None, TWO_SHARDS], ids=["whole", "sharded"])
def test_tensors_come_as_they_are_stored(tmp_path: Path, shards: dict[str, list[str]] | None) -> None:
    tensors = random_tensors(*NAMES)
    tensors[NAMES[2]] = np.arange(4, dtype=np.float32)
    tensors[NAMES[1]] = tensors[NAMES[1]].astype(np.float16)
    read = checkpoint(write(tmp_path, tensors, shards))
    assert read.names() == frozenset(NAMES)
    for name, expected in tensors.items():
        found = read.read(name)
        assert found.dtype == expected.dtype
        assert read.shape(name) == expected.shape
        np.testing.assert_array_equal(found, expected)
        assert read.read_quantized(name) is None
    assert read.config.hidden_size == 896
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        read.read("lm_head.weight")


@pytest.mark.parametrize("shards", [None, TWO_SHARDS], ids=["whole", "sharded"])
def test_a_file_cut_anywhere_is_refused_with_its_name(tmp_path: Path, shards: dict[str, list[str]] | None) -> None:
    folder = write(tmp_path, random_tensors(*NAMES), shards)
    file = sorted(folder.glob("*.safetensors"))[-1]
    whole = file.read_bytes()
    for size in range(0, len(whole), 5):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"{file.name} is damaged or cut off"):
            checkpoint(folder)


def test_damage_never_ends_in_another_error(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES))
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    refused: list[str] = []
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.integers(0, header)] = rng.integers(0, 256)
        (folder / "model.safetensors").write_bytes(damaged)
        try:
            read = checkpoint(folder)
            for name in read.names():
                read.read(name)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("model.safetensors" in text for text in refused)


def test_shards_are_held_to_their_index(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES), TWO_SHARDS)
    second = folder / "model-00002-of-00002.safetensors"
    save_file(random_tensors("model.other.weight"), second)
    with pytest.raises(
        ConfigError, match=r"00002-of-00002\.safetensors lacks model\.norm\.weight, which .*index\.json says"
    ):
        checkpoint(folder)
    second.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing, but .*index\.json names it"):
        checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    with pytest.raises(ConfigError, match=r"index\.json has no weight_map"):
        checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.no')
    with pytest.raises(ConfigError, match=r"index\.json is not valid JSON .*; it is damaged or a download was cut off"):
        checkpoint(folder)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        checkpoint(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin must be converted to safetensors first"):
        checkpoint(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config\.json does not hold a JSON object"):
        checkpoint(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        checkpoint(folder)


def test_tensors_that_are_not_floats_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES) | {"model.layers.0.mlp.up_proj.weight": np.ones((2, 2), np.int8)})
    with pytest.raises(ConfigError, match=r"model\.safetensors stores model\.layers\.0\.mlp\.up_proj\.weight as I8"):
        checkpoint(folder)


@pytest.mark.parametrize(
    "names",
    [
        (
            "language_model.model.norm.weight",
            "language_model.lm_head.weight",
            "vision_tower.x",
            "multi_modal_projector.y",
        ),
        ("model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x", "model.multi_modal_projector.y"),
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_only_the_language_model_of_a_multimodal_checkpoint_is_seen(tmp_path: Path, names: tuple[str, ...]) -> None:
    tensors = random_tensors(*names)
    read = checkpoint(write(tmp_path, tensors, config=GEMMA3_4B))
    assert read.names() == {"model.norm.weight", "lm_head.weight"}
    np.testing.assert_array_equal(read.read("model.norm.weight"), tensors[names[0]])
    np.testing.assert_array_equal(read.read("lm_head.weight"), tensors[names[1]])


def test_generation_config_adds_end_ids_and_defaults(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES))
    assert checkpoint(folder).generation == GenerationDefaults()
    (folder / "generation_config.json").write_text('{"eos_token_id": [151645, 151643], "top_p": 0.8}')
    read = checkpoint(folder)
    assert read.generation == GenerationDefaults(top_p=0.8)
    assert read.config.eos_token_ids == (151645, 151643)


def test_the_config_is_enough_where_weights_are_not_wanted(tmp_path: Path) -> None:
    folder = write(tmp_path, random_tensors(*NAMES))
    (folder / "model.safetensors").unlink()
    read = HuggingFaceCheckpoint(folder, {"num_hidden_layers": 3}, config_only=True)
    assert (read.config.num_layers, read.names()) == (3, frozenset())
