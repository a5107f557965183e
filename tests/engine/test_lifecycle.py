from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError

import pytest

from tokenspeed.engine.lifecycle import Decoding, Finished, Prefilling, PutBack, Queued
from tokenspeed.engine.page_table import Lease

LEASE = Lease(slot=3, epoch=7)
LEGAL = {
    Queued: {"admit": Prefilling, "finish": Finished},
    Prefilling: {"complete": Decoding, "put_back": PutBack, "finish": Finished},
    Decoding: {"put_back": PutBack, "finish": Finished},
    PutBack: {"admit": Prefilling, "finish": Finished},
    Finished: {},
}
STATES = [Queued(), Prefilling(LEASE), Decoding(LEASE), PutBack(), Finished("stop")]
ARGUMENTS: dict[str, tuple[object, ...]] = {"admit": (LEASE,), "finish": ("length",), "complete": (), "put_back": ()}


@pytest.mark.parametrize("state", STATES, ids=lambda state: type(state).__name__)
def test_a_state_has_exactly_its_transitions(state: object) -> None:
    methods = {name for name, _ in inspect.getmembers(state, inspect.ismethod) if not name.startswith("_")}
    assert methods == set(LEGAL[type(state)])
    for name in methods:
        assert type(getattr(state, name)(*ARGUMENTS[name])) is LEGAL[type(state)][name]


def test_the_lease_goes_with_the_states_that_run() -> None:
    assert Queued().admit(LEASE).lease is LEASE
    assert Prefilling(LEASE).complete().lease is LEASE
    assert Decoding(LEASE).finish("abort").reason == "abort"
    with pytest.raises(FrozenInstanceError):
        Prefilling(LEASE).lease = Lease(0, 0)  # pyright: ignore[reportAttributeAccessIssue]
