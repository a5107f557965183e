"""Opening a model's files: one protocol over Hugging Face folders and GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from tokenspeed.config import EngineConfig, GenerationDefaults, ModelConfig
from tokenspeed.types import ConfigError
from tokenspeed.weights.config_json import generation_defaults
from tokenspeed.weights.gguf_blocks import QuantizedTensor
from tokenspeed.weights.gguf_checkpoint import GGUFCheckpoint
from tokenspeed.weights.huggingface import CONFIG, GENERATION_CONFIG, HuggingFaceCheckpoint, read_json

__all__ = ["Checkpoint", "QuantizedTensor", "open_checkpoint"]


class Checkpoint(Protocol):
    """A model's configuration and tensors, under Hugging Face names. Tensors are read one at a time."""

    path: Path
    config: ModelConfig
    generation: GenerationDefaults

    def names(self) -> frozenset[str]:
        """Names of all tensors, e.g. `model.layers.0.self_attn.q_proj.weight`."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; matrices are (out, in)."""
        ...

    def read(self, name: str) -> np.ndarray:
        """A tensor as floats, in the stored dtype (bfloat16 is ml_dtypes'); packed GGUF types become float32.

        The array may be a read-only view of the mapped file.

        Raises:
          ConfigError: there is no such tensor, or its bytes cannot be read.
        """
        ...

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix as integers with scales, equal to `read` bit for bit; None if it is not stored so."""
        ...


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ConfigError(f"{folder} holds {len(files)} .gguf files; give the path of one")
    raise ConfigError(f"{folder} holds no .gguf file" + ("" if (folder / CONFIG).exists() else f" and no {CONFIG}"))


def _open(path: Path, config: EngineConfig) -> Checkpoint:
    dummy = config.load_format == "dummy"
    if path.is_dir() and (config.load_format == "gguf" or not (path / CONFIG).exists()):
        path = _only_gguf(path)
    if path.is_dir():
        return HuggingFaceCheckpoint(path, config.hf_overrides, config_only=dummy)
    if config.load_format == "safetensors":
        raise ConfigError(f"--load-format safetensors cannot read {path}, which is not a folder; leave the flag out")
    return GGUFCheckpoint(path, config.hf_overrides, header_only=dummy)


def _generation(named: str, own: GenerationDefaults) -> GenerationDefaults:
    """Sampling defaults by `--generation-config`."""
    match named:
        case "auto":
            return own
        case "vllm":
            return GenerationDefaults()
        case folder:
            file = Path(folder) / GENERATION_CONFIG
            return generation_defaults(read_json(file), str(file))[0]


def open_checkpoint(path: Path, config: EngineConfig) -> Checkpoint:
    """Opens a .gguf file, or a folder with config.json and safetensors or with one .gguf file.

    `config` says the load format, `hf_overrides`, and whose sampling defaults `generation` holds. With
    `load_format="dummy"` only config.json (or the GGUF header) is read: weights may be missing, and `names` of a folder
    in Hugging Face layout is empty.

    Raises:
      ConfigError: something is missing, damaged or not supported; the text names the file.
    """
    checkpoint = _open(path, config)
    checkpoint.generation = _generation(config.generation_config, checkpoint.generation)
    return checkpoint
