"""The one way to declare a device record: a frozen dataclass that JAX sees as a pytree (flax.struct)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

from flax import struct

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Declares `cls` a frozen pytree of its annotated fields, complete when constructed."""
    return struct.dataclass(cls, kw_only=True)


static: Callable[..., Any] = lambda **kwargs: struct.field(pytree_node=False, **kwargs)  # noqa: E731
"""A field that is part of the tree's structure, hashed at trace time, not a leaf."""
