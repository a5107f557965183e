"""The registry's choice and its reasons."""

from __future__ import annotations

import pytest

from pallas_kernels import registry
from pallas_kernels.registry import Kernel, explain, register, select


@pytest.fixture(autouse=True)
def ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_kernels", {})

    def only_gpu(**case: object) -> str | None:
        return None if case["platform"] == "gpu" else "needs a GPU"

    register(Kernel("add", "fast", lambda: "fast", 20, only_gpu))
    register(Kernel("add", "plain", lambda: "plain", 10, lambda **_: None))
    register(Kernel("add", "reference", lambda: "reference", 0, lambda **_: None))


def test_the_highest_rank_that_serves_is_chosen() -> None:
    assert select("add", platform="gpu").name == "fast"
    assert select("add", platform="cpu").name == "plain"


def test_a_named_one_is_used_or_refused() -> None:
    assert select("add", name="reference", platform="gpu").name == "reference"
    with pytest.raises(LookupError, match="needs a GPU"):
        select("add", name="fast", platform="cpu")
    with pytest.raises(LookupError, match="named 'absent'"):
        select("add", name="absent", platform="cpu")


def test_every_implementation_is_explained() -> None:
    told = {choice.kernel.name: (choice.chosen, choice.reason) for choice in explain("add", platform="cpu")}
    assert told == {
        "fast": (False, "needs a GPU"),
        "plain": (True, "best that serves"),
        "reference": (False, "a better one serves"),
    }


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="registered twice"):
        register(Kernel("add", "plain", lambda: None, 1, lambda **_: None))
