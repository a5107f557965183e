"""Opening a model: its text side for a front end, and its runner for an engine."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, NoReturn

from tqdm.auto import tqdm

from tokenspeed.config import EngineConfig, GenerationDefaults
from tokenspeed.engine.engine import Runner
from tokenspeed.text.chat_template import ChatTemplate, load_chat_template
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer
from tokenspeed.weights.catalog import METADATA_PATTERNS, hub_folder, resolve_model
from tokenspeed.weights.checkpoint import Checkpoint, open_checkpoint

log = logging.getLogger(__name__)


class ModelText(NamedTuple):
    """The text side of a model.

    Attributes:
      chat_template: None if the model has none.
      defaults: the sampling values it ships.
      eos_ids: ids that end its output.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    eos_ids: tuple[int, ...]


def open_text(config: EngineConfig) -> ModelText:
    """The text side of the model that `config` names.

    Raises:
      ConfigError: a file is missing, damaged or of a kind that is not supported.
    """
    return _text(config, open_checkpoint(resolve_model(config), config))


def build(config: EngineConfig) -> Runner:
    """The runner of the model that `config` names. What it logs at INFO tells how far it is.

    Raises:
      ConfigError: the model, a flag or the memory does not allow it.
    """
    return _runner(config, open_checkpoint(resolve_model(config), config), _log_progress)


def open_model(config: EngineConfig) -> tuple[ModelText, Runner]:
    """Text side and runner, with progress bars if `config` wants them. Raises as `open_text` and `build` do."""
    checkpoint = open_checkpoint(resolve_model(config), config)
    text = _text(config, checkpoint)
    return text, _runner(config, checkpoint, _CompileBar() if config.progress else _log_progress)


def _text(config: EngineConfig, checkpoint: Checkpoint) -> ModelText:
    tokenizer = load_tokenizer(_tokenizer_path(config, checkpoint))
    return ModelText(
        tokenizer,
        load_chat_template(checkpoint.path, config.chat_template),
        checkpoint.generation,
        tuple(dict.fromkeys((*checkpoint.config.eos_token_ids, *tokenizer.eos_ids))),
    )


def _tokenizer_path(config: EngineConfig, checkpoint: Checkpoint) -> Path:
    if config.tokenizer is None:
        return checkpoint.path
    path = Path(config.tokenizer).expanduser()
    return (
        path
        if path.exists()
        else hub_folder(config.tokenizer, dataclasses.replace(config, revision=None), METADATA_PATTERNS)
    )


def _runner(config: EngineConfig, checkpoint: Checkpoint, on_progress: Callable[[int, int], None]) -> Runner:
    # Imported when it is wanted: a front end whose engine has a process of its own never loads JAX.
    return import_module("tokenspeed.runtime.build").build_runner(config, checkpoint, on_progress)


class _CompileBar:
    """A progress bar that appears with the first program and goes with the last."""

    def __init__(self) -> None:
        self._bar: tqdm[NoReturn] | None = None

    def __call__(self, done: int, total: int) -> None:
        bar = self._bar = self._bar or tqdm(desc="Compiling", unit="program", total=total, leave=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()


def _log_progress(done: int, total: int) -> None:
    if done * 4 // total > (done - 1) * 4 // total:  # each quarter
        log.info("compiled %d of %d programs", done, total)
