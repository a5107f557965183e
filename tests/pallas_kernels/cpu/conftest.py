"""Builds the C++ kernels once for all tests of this folder."""

from __future__ import annotations

import pytest

from pallas_kernels import cpu
from tokenspeed.config import environment


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    reason = cpu.load(environment().home / "kernels")
    assert reason is None, reason
