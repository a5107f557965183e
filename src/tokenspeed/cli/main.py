"""The command line's entry: picks the command, and ends every failure a user can cause in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from tokenspeed import __version__
from tokenspeed.types import TokenspeedError

COMMANDS = {
    "serve": "serve a model over HTTP, with the OpenAI API",
    "chat": "talk to a model in the terminal",
    "generate": "continue prompts from arguments, a file or stdin",
    "env": "show versions, devices and kernels",
}

_USAGE = f"""usage: tokenspeed COMMAND [flags]

{chr(10).join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())}

`tokenspeed serve` with nothing else serves the embedded default. `tokenspeed COMMAND --help` lists a command's flags.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default this process's; returns the exit code: 0, 1 for a failure, 2 for a wrong use."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments), *()] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command in ("-V", "--version", "version"):
        print(__version__)
        return 0
    if command not in COMMANDS:
        print(f"tokenspeed: unknown command {command!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _run(command, rest)


def _run(command: str, arguments: Sequence[str]) -> int:
    # Imported when it is wanted: `tokenspeed --help` must not wait for what a command needs.
    run: Callable[[Sequence[str]], int] = import_module(f"tokenspeed.cli.{command}").run
    try:
        return run(arguments)
    except TokenspeedError as error:
        print(f"tokenspeed {command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of our output left, as `head` does
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:
        return 130
