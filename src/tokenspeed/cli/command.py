"""Running a command: every failure a user can cause ends in one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from tokenspeed.types import TokenspeedError

INTERRUPTED = 130
"""Exit code after SIGINT, as shells have it."""


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Runs one command; returns the exit code."""
    run: Callable[[Sequence[str]], int] = import_module(f"tokenspeed.cli.{name}").run
    try:
        return run(arguments)
    except TokenspeedError as error:
        print(f"tokenspeed {name}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Who read our output has left, as `head` does. What is still in the buffer must not fail at exit once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
