from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.engine import builds
from tests.engine.drive import check_answer
from tests.engine.fake import request
from tokenspeed.config import EngineConfig
from tokenspeed.engine.process import Build, ProcessEngine
from tokenspeed.types import ConfigError, EngineDead, InvalidRequest, Overloaded, TokenDelta

CONFIG = EngineConfig(model="tiny")


@contextmanager
def engine(build: Build, *, ready: bool = True, on_progress: Callable[[str], None] = print) -> Iterator[ProcessEngine]:
    one = ProcessEngine(build, CONFIG, on_progress)
    one.start()
    try:
        if ready:
            one.wait_ready(60)
        yield one
    finally:
        one.close()
    assert not one.healthy


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def collect(stream: queue.SimpleQueue[TokenDelta]) -> list[TokenDelta]:
    deltas = [stream.get(timeout=20)]
    while deltas[-1].finish_reason is None:
        deltas.append(stream.get(timeout=20))
    return deltas


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_serves_from_another_process_with_one_message_a_step() -> None:
    lines: list[str] = []
    with engine(builds.build, on_progress=lines.append) as client:
        assert lines == ["loading tiny", "compiling"]
        assert client.healthy
        assert client.error is None
        assert client.facts["device"] == "fake"
        assert int(client.facts["pid"]) != os.getpid()
        assert client.limits.max_model_len == 96
        calls: list[int] = []
        client.on_step = lambda: calls.append(client.stats().num_steps)
        requests = [
            request("a", [2, 3, 4], max_tokens=20, ignore_eos=True, logprobs=2),
            request("b", list(range(2, 60)), max_tokens=9, prompt_logprobs=1, logit_bias={3: 1.5}, stop=("x",)),
            request("c", [9], max_tokens=None, stop_token_ids=(4, 5)),
        ]
        streams = {one.request_id: queue.SimpleQueue[TokenDelta]() for one in requests}
        for one in requests:
            client.add(one, streams[one.request_id].put)
        for one in requests:
            check_answer(one, collect(streams[one.request_id]), 96)
        until(lambda: calls[-1:] == [client.stats().num_steps])
        assert calls == list(range(1, len(calls) + 1))
        assert client.num_unfinished == 0
        assert client.stalled_seconds == 0.0
        with pytest.raises(InvalidRequest, match="maximum context length is 96"):
            client.add(request("long", [2] * 96), print)


def test_abort_and_close() -> None:
    with engine(builds.build_slow) as client:
        streams = {name: queue.SimpleQueue[TokenDelta]() for name in "ab"}
        for name, stream in streams.items():
            client.add(request(name, [2], max_tokens=5000, ignore_eos=True), stream.put)
            stream.get(timeout=20)
        client.abort("a")
        assert collect(streams["a"])[-1].finish_reason == "abort"
        assert client.num_unfinished == 1
        client.close()
        assert collect(streams["b"])[-1].finish_reason == "abort"
        with pytest.raises(EngineDead, match="closed"):
            client.add(request("c", [2]), print)


def test_a_refusal_to_start_is_its_one_sentence() -> None:
    with engine(builds.build_refusing, ready=False) as client:
        with pytest.raises(ConfigError, match="--model=tiny does not exist; name another"):
            client.wait_ready(60)
        assert not client.healthy
        assert "does not exist" in str(client.error)


def test_a_crash_at_start_is_told() -> None:
    with engine(builds.build_crashing, ready=False) as client, pytest.raises(EngineDead, match="ended with code 7"):
        client.wait_ready(60)


def test_start_returns_at_once_and_requests_wait_for_ready() -> None:
    lines: list[str] = []
    start = time.monotonic()
    with engine(builds.build_endless, ready=False, on_progress=lines.append) as client:
        assert time.monotonic() - start < 2
        with pytest.raises(Overloaded, match="starting"):
            client.add(request("a", [2]), print)
        with pytest.raises(TimeoutError):
            client.wait_ready(0.01)
        until(lambda: len(lines) == 1)
        start = time.monotonic()
    assert time.monotonic() - start < 5, "closing does not wait for a start"


def test_a_failing_step_ends_every_stream_with_its_cause() -> None:
    with engine(builds.build_broken) as client:
        stream = queue.SimpleQueue[TokenDelta]()
        client.add(request("a", [2], max_tokens=50, ignore_eos=True), stream.put)
        assert collect(stream)[-1].finish_reason == "error"
        assert "the fake device is on fire" in str(client.error)
        assert not client.healthy
        with pytest.raises(EngineDead, match="on fire"):
            client.add(request("b", [2]), print)


def test_a_killed_engine_ends_every_stream() -> None:
    with engine(builds.build_slow) as client:
        streams = {name: queue.SimpleQueue[TokenDelta]() for name in "ab"}
        for name, stream in streams.items():
            client.add(request(name, [2], max_tokens=5000, ignore_eos=True), stream.put)
            stream.get(timeout=20)
        os.kill(int(client.facts["pid"]), signal.SIGKILL)
        for stream in streams.values():
            assert collect(stream)[-1].finish_reason == "error"
        assert not client.healthy
        assert "ended with code -9" in str(client.error)


PARENT = """
    import os, sys, time
    from tests.engine import builds
    from tests.engine.fake import request
    from tokenspeed.config import EngineConfig
    from tokenspeed.engine.process import ProcessEngine

    if __name__ == "__main__":
        client = ProcessEngine(getattr(builds, sys.argv[1]), EngineConfig(), lambda line: print(line, flush=True))
        client.start()
        try:
            if sys.argv[1] == "build_slow":
                client.wait_ready(60)
                client.add(request("a", [2], max_tokens=7000, ignore_eos=True), lambda delta: None)
                print("pid", client.facts["pid"], flush=True)
            time.sleep(0 if "exit" in sys.argv else 600)
        except KeyboardInterrupt:
            time.sleep(0.3)
            print("healthy", client.healthy, flush=True)
            client.close()
"""


@contextmanager
def parent(tmp_path: object, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    script = f"{tmp_path}/parent.py"
    with open(script, "w") as file:
        file.write(textwrap.dedent(PARENT))
    process = subprocess.Popen(
        [sys.executable, script, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    with process:
        try:
            word, pid = process.stdout.readline().split()
            assert word == "pid"
            yield process, int(pid)
        finally:
            process.kill()


@pytest.mark.parametrize("build", ["build_slow", "build_endless"])
def test_no_engine_outlives_its_parent(tmp_path: object, build: str) -> None:
    with parent(tmp_path, build) as (process, pid):
        assert is_alive(pid)
        process.kill()
        until(lambda: not is_alive(pid), 5)


def test_a_parent_that_forgets_to_close_still_exits(tmp_path: object) -> None:
    with parent(tmp_path, "build_slow", "exit") as (process, pid):
        assert process.wait(10) == 0
        until(lambda: not is_alive(pid), 5)


def test_termination_is_the_parents() -> None:
    with engine(builds.build) as client:
        os.kill(int(client.facts["pid"]), signal.SIGTERM)
        stream, one = queue.SimpleQueue[TokenDelta](), request("a", [2, 3])
        client.add(one, stream.put)
        check_answer(one, collect(stream), 96)


def test_an_interrupt_is_the_parents(tmp_path: object) -> None:
    with parent(tmp_path, "build_slow") as (process, pid):
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "healthy True\n"
        assert process.wait(20) == 0
        until(lambda: not is_alive(pid), 5)
