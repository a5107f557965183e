"""The registry: which implementations of an op exist, which one serves a given case, and why the others do not.

A case is a set of keyword facts (platform, dtype, head_dim, ...), the same for every implementation of an op. The choice
is made once, when a step is built; an implementation that was named explicitly is used or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

ENTRY_POINT_GROUP = "tokenspeed.kernels"
"""Installed packages name functions in this group; each is called once and registers its kernels."""


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Args:
      op: the op's name; all kernels of an op share its signature.
      name: the implementation's name, unique within the op.
      fn: the implementation.
      rank: the highest rank that can serve a case is chosen.
      why_not: given the case, the reason this implementation cannot serve it, or None if it can.
    """

    op: str
    name: str
    fn: Callable[..., Any]
    rank: int
    why_not: Callable[..., str | None]


@dataclass(frozen=True)
class Choice:
    """One line of an explanation."""

    kernel: Kernel
    chosen: bool
    reason: str


_kernels: dict[tuple[str, str], Kernel] = {}
_plugins_loaded = False


def register(kernel: Kernel) -> None:
    """Adds a kernel. Raises ValueError if the op already has one of that name."""
    key = (kernel.op, kernel.name)
    if key in _kernels:
        raise ValueError(f"kernel {kernel.name!r} of op {kernel.op!r} is registered twice")
    _kernels[key] = kernel


def _load_plugins() -> None:
    global _plugins_loaded
    if not _plugins_loaded:
        _plugins_loaded = True
        for entry_point in entry_points(group=ENTRY_POINT_GROUP):
            entry_point.load()()


def _of(op: str) -> list[Kernel]:
    _load_plugins()
    return sorted((k for k in _kernels.values() if k.op == op), key=lambda k: -k.rank)


def names() -> tuple[str, ...]:
    """The ops that have an implementation."""
    _load_plugins()
    return tuple(sorted({op for op, _ in _kernels}))


def explain(op: str, *, name: str | None = None, **case: object) -> list[Choice]:
    """Every implementation of `op`, best first, with the reason it is or is not chosen for `case`."""
    choices: list[Choice] = []
    taken = False
    for kernel in _of(op):
        reason = kernel.why_not(**case)
        if name is not None and kernel.name != name:
            choices.append(Choice(kernel, False, f"{name!r} was named explicitly"))
        elif reason is not None:
            choices.append(Choice(kernel, False, reason))
        elif taken:
            choices.append(Choice(kernel, False, "a better one serves"))
        else:
            taken = True
            choices.append(Choice(kernel, True, "named explicitly" if name else "best that serves"))
    return choices


def find(op: str, *, name: str | None = None, **case: object) -> Kernel | None:
    """The implementation of `op` for `case`, or None if none serves."""
    return next((choice.kernel for choice in explain(op, name=name, **case) if choice.chosen), None)


def select(op: str, *, name: str | None = None, **case: object) -> Kernel:
    """The implementation of `op` for `case`.

    Raises:
      LookupError: none serves, or the one named does not; the text lists each with its reason.
    """
    kernel = find(op, name=name, **case)
    if kernel is not None:
        return kernel
    choices = explain(op, name=name, **case)
    listed = "; ".join(f"{choice.kernel.name}: {choice.reason}" for choice in choices) or "none is registered"
    raise LookupError(f"no kernel for op {op!r}{f' named {name!r}' if name else ''}: {listed}")
