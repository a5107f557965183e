"""What the engine counts while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start."""

    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    num_preemptions: int = 0
    """Times a sequence was put back."""
    num_steps: int = 0
