"""Builds the C++ kernels once for all tests of this folder."""

from __future__ import annotations

import pytest

from pallas_kernels import cpu
from tokenspeed.config import environment


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--portable-kernels", action="store_true", help="without code for one instruction set")


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> None:
    defines = ["PALLAS_KERNELS_PORTABLE"] if request.config.getoption("--portable-kernels") else []
    reason = cpu.load(environment().home / "kernels", defines=defines)
    assert reason is None, reason
