from __future__ import annotations

from typing import Any

import pytest

from tokenspeed.config import ServerConfig
from tokenspeed.types import ConfigError


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"port": 70000}, "--port.*70000"),
        ({"shutdown_timeout": -1}, "--shutdown-timeout.*-1"),
        ({"sse_keep_alive_interval": float("nan")}, "--sse-keep-alive-interval"),
        ({"watchdog_timeout": 0}, "--watchdog-timeout"),
        ({"max_body_bytes": 0}, "--max-body "),
        ({"max_n": 0}, "--max-n "),
        ({"max_stop_strings": 0}, "--max-stop-strings"),
        ({"max_num_queued_reqs": -1}, "--max-num-queued-reqs"),
        ({"metrics_prefix": "a b"}, "--metrics-prefix.*'a b'"),
        ({"api_keys": ("a", "")}, "--api-key"),
        ({"served_model_names": ("",)}, "--served-model-name"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"root_path": "llm"}, "--root-path"),
        ({"root_path": "/llm/"}, "--root-path"),
    ],
)
def test_server_values_that_cannot_be_used(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServerConfig(**values)


def test_server_values_at_their_limits() -> None:
    ServerConfig(port=0, shutdown_timeout=0, max_num_queued_reqs=0, root_path="/llm", ssl_keyfile="k", ssl_certfile="c")
