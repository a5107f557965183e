"""The command line's entry: names the commands, and imports the one that is wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from tokenspeed import __version__

COMMANDS = {
    "serve": "serve a model over HTTP, with the OpenAI API",
    "chat": "talk to a model in the terminal",
    "generate": "continue prompts from arguments, a file or stdin",
    "env": "show versions, devices and kernels",
}
_LINES = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
_USAGE = f"""usage: tokenspeed COMMAND [flags]

{_LINES}

`tokenspeed serve` with nothing else serves the embedded default. `tokenspeed COMMAND --help` lists a command's flags.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, by default this process's; returns the exit code: 0, 1 for a failure, 2 for a wrong use."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
    elif command in ("-V", "--version", "version"):
        print(__version__)
    elif command in COMMANDS:
        # Imported when it is wanted: what a command needs takes a second or two, and help must not wait for it.
        return import_module("tokenspeed.cli.command").run_command(command, rest)
    else:
        print(f"tokenspeed: unknown command {command}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return 0
