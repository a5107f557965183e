"""A whole server, with the engine of a fake device in its own process: `python -m tests.server.process`."""

from __future__ import annotations

import json
import sys
import time

import tokenizers
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from tests.engine import builds
from tests.engine.fake import EOS
from tests.server.serving import FakeText
from tokenspeed.config import EngineConfig, GenerationDefaults, ServerConfig
from tokenspeed.engine.process import ProcessEngine
from tokenspeed.server.run import run_server
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import TokenspeedError


def load_text() -> FakeText:
    alphabet = sorted(ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(BPE({char: k for k, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    return FakeText(Tokenizer(backend, bos_id=None, eos_ids=(EOS,), source="test"), None, GenerationDefaults(), (EOS,))


def load_text_forever() -> FakeText:
    time.sleep(600)
    raise AssertionError


def main() -> int:
    """Arguments: the name of a build, JSON for the configuration, and whether the text side never loads."""
    build, config, text = sys.argv[1:]
    engine_config = EngineConfig(model="tiny")
    engine = ProcessEngine(vars(builds)[build], engine_config, lambda line: print(line, flush=True))
    try:
        run_server(
            ServerConfig(**json.loads(config)),
            engine_config,
            engine,
            load_text_forever if text == "endless" else load_text,
            lambda lines: print(lines, flush=True),
        )
    except TokenspeedError as error:
        print(f"error: {error}", flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
