"""What a spawned engine process is given to build, in tests."""

from __future__ import annotations

import logging
import os
import time

from tests.engine.fake import FakeRunner, FakeStep, limits
from tokenspeed.config import EngineConfig
from tokenspeed.types import ConfigError, Schedule

log = logging.getLogger("tokenspeed.tests.builds")


class SlowRunner(FakeRunner):
    """A fake device that takes 5 ms a step."""

    def dispatch(self, schedule: Schedule) -> FakeStep:
        time.sleep(0.005)
        return super().dispatch(schedule)


def build(config: EngineConfig) -> FakeRunner:
    log.info("loading %s", config.model)
    log.info("compiling")
    return FakeRunner(limits(), facts={"device": "fake", "pid": str(os.getpid())})


def build_slow(config: EngineConfig) -> FakeRunner:
    return SlowRunner(limits(num_pages=2001, max_model_len=8000), facts={"pid": str(os.getpid())})


def build_broken(config: EngineConfig) -> FakeRunner:
    """Its third step fails."""
    return FakeRunner(limits(), fail_at=2)


def build_refusing(config: EngineConfig) -> FakeRunner:
    raise ConfigError(f"--model={config.model} does not exist; name another")


def build_crashing(config: EngineConfig) -> FakeRunner:
    os._exit(7)


def build_endless(config: EngineConfig) -> FakeRunner:
    log.info("pid %d", os.getpid())
    time.sleep(600)
    raise AssertionError
