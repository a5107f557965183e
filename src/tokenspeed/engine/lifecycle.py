"""The states of a request's life: a transition is a method that exists only on the states it may leave."""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.engine.page_table import Lease
from tokenspeed.types import FinishReason


@dataclass(frozen=True, slots=True)
class Queued:
    """Has not run yet."""

    def admit(self, lease: Lease) -> Prefilling:
        return Prefilling(lease)

    def finish(self, reason: FinishReason) -> Finished:
        return Finished(reason)


@dataclass(frozen=True, slots=True)
class Prefilling:
    """Has a slot; some of its known ids are not scheduled yet."""

    lease: Lease

    def complete(self) -> Decoding:
        """All known ids are scheduled; the last one's step samples."""
        return Decoding(self.lease)

    def put_back(self) -> PutBack:
        return PutBack()

    def finish(self, reason: FinishReason) -> Finished:
        return Finished(reason)


@dataclass(frozen=True, slots=True)
class Decoding:
    """Has a slot, whose last sampled token is what it computes next."""

    lease: Lease

    def put_back(self) -> PutBack:
        return PutBack()

    def finish(self, reason: FinishReason) -> Finished:
        return Finished(reason)


@dataclass(frozen=True, slots=True)
class PutBack:
    """Ran, lost its slot and pages to others, and waits to compute its known ids again."""

    def admit(self, lease: Lease) -> Prefilling:
        return Prefilling(lease)

    def finish(self, reason: FinishReason) -> Finished:
        return Finished(reason)


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing follows."""

    reason: FinishReason


Waiting = Queued | PutBack
Running = Prefilling | Decoding
State = Queued | Prefilling | Decoding | PutBack | Finished
