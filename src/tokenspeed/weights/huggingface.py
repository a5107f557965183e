"""Model folders in Hugging Face layout: config.json and safetensors, whole or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from tokenspeed.config import GenerationDefaults, ModelConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights.config_json import generation_defaults, model_config
from tokenspeed.weights.gguf_blocks import QuantizedTensor

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_DTYPES: dict[str, Literal["float32", "bfloat16", "float16"]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Where a multimodal checkpoint keeps its language model, in transformers 5 and 4."""
_OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def read_json(path: Path) -> dict[str, object]:
    """A file's JSON object.

    Raises:
      ConfigError: it is missing or holds something else.
    """
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}); it is damaged or a download was cut off") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return cast(dict[str, object], value)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="np")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except SafetensorError as error:
        raise ConfigError(f"{path} is damaged or cut off ({error}); download it again") from error


def _shard_names(folder: Path) -> dict[str, str] | None:
    """Each tensor's file as the index says; None if the weights are in one file."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists() or not index.exists():
        return None
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(
        isinstance(file, str) for file in cast(dict[str, object], named).values()
    ):
        raise ConfigError(f"{index} has no weight_map of tensor names to file names; it is damaged")
    return cast(dict[str, str], named)


class _TensorHeader(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class Shards:
    """The safetensors files of a folder, opened and checked against their index; tensors are read when asked for.

    Raises:
      ConfigError: there are none; a shard is missing, damaged or cut off; or a tensor is not where the index says.
    """

    def __init__(self, folder: Path) -> None:
        named = _shard_names(folder)
        if named is None and not (folder / WEIGHTS).exists():
            found = ", ".join(sorted(file.name for file in folder.glob("*.bin"))[:3])
            hint = f"; {found} must be converted to safetensors first" if found else ""
            raise ConfigError(f"{folder} has neither {WEIGHTS} nor {INDEX}{hint}")
        files = [WEIGHTS] if named is None else sorted(set(named.values()))
        for file in files:
            if not (folder / file).exists():
                raise ConfigError(f"{folder / file} is missing, but {INDEX} names it; download it again")
        self.files = {file: _open(folder / file) for file in files}
        held = {file: frozenset(opened.keys()) for file, opened in self.files.items()}
        self.where = {name: file for file, names in held.items() for name in names} if named is None else named
        """The file of each tensor."""
        for name, file in self.where.items():
            if name not in held[file]:
                raise ConfigError(f"{folder / file} lacks {name}, which {INDEX} says it holds; download it again")

    def _header(self, name: str) -> _TensorHeader:
        return cast(_TensorHeader, self.files[self.where[name]].get_slice(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return tuple(self._header(name).get_shape())

    def dtype(self, name: str) -> str:
        """A tensor's dtype as safetensors writes it, e.g. `BF16`."""
        return self._header(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor."""
        return cast(np.ndarray, self.files[self.where[name]].get_tensor(name))


def _text_names(stored: Mapping[str, str], multimodal: bool) -> dict[str, str]:
    """Names as a language model alone would have them, to names in the files; parts for vision are left out."""
    if not multimodal:
        return {name: name for name in stored}
    found: dict[str, str] = {}
    for name in stored:
        if name.startswith(_OTHER_PARTS):
            continue
        prefix, short = next((pair for pair in _TEXT_PREFIXES if name.startswith(pair[0])), ("", ""))
        found[short + name.removeprefix(prefix)] = name
    return found


class HuggingFaceCheckpoint:
    """A folder with config.json and safetensors; a `Checkpoint`.

    Args:
      path: the folder.
      overrides: keys of config.json to replace.
      config_only: read no weights; `names` is then empty.
    """

    def __init__(self, path: Path, overrides: Mapping[str, object], *, config_only: bool = False) -> None:
        self.path = path
        values = read_json(path / CONFIG)
        config = model_config(values, source=str(path / CONFIG), overrides=overrides, name_or_path=str(path))
        generation, eos_ids = GenerationDefaults(), ()
        if (path / GENERATION_CONFIG).exists():
            generation, eos_ids = generation_defaults(
                read_json(path / GENERATION_CONFIG), str(path / GENERATION_CONFIG)
            )
        self.generation: GenerationDefaults = generation
        self.config: ModelConfig = replace(
            config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *eos_ids)))
        )
        self._shards = None if config_only else Shards(path)
        multimodal = config.architecture == "Gemma3ForConditionalGeneration"
        self._stored = _text_names(self._shards.where, multimodal) if self._shards else {}
        if self._shards:
            self._check_dtypes(self._shards)

    def _check_dtypes(self, shards: Shards) -> None:
        for name, stored in self._stored.items():
            if (dtype := shards.dtype(stored)) not in _DTYPES:
                raise ConfigError(
                    f"{self.path / shards.where[stored]} stores {name} as {dtype}, which is not supported; "
                    f"supported are {', '.join(_DTYPES)}"
                )

    def names(self) -> frozenset[str]:
        """Names of the language model's tensors."""
        return frozenset(self._stored)

    def _where(self, name: str) -> tuple[Shards, str]:
        if self._shards is None or name not in self._stored:
            raise ConfigError(f"{self.path} has no tensor {name}")
        return self._shards, self._stored[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, (out, in) for matrices."""
        shards, stored = self._where(name)
        return shards.shape(stored)

    def read(self, name: str) -> np.ndarray:
        """A copy of a tensor in its stored dtype."""
        shards, stored = self._where(name)
        return shards.read(stored)

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """None: these checkpoints hold floats."""
        self._where(name)
        return None
