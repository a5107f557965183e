"""An engine in a process of its own, so that the front end's Python never waits for the engine's and the reverse."""

from __future__ import annotations

from collections.abc import Callable

from tokenspeed.config import EngineConfig
from tokenspeed.engine.engine import Runner

Build = Callable[[EngineConfig], Runner]
"""A module-level callable that builds a runner in the engine's process; what it logs at INFO to the `tokenspeed`
loggers becomes start-up progress. It raises a TokenspeedError for what the user can mend."""
