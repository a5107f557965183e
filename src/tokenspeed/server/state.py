"""What the routes of one server share: its configuration, the engine, the served model, and threads for heavy text work."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

from tokenspeed.config import GenerationDefaults, ServerConfig
from tokenspeed.engine.client import EngineClient
from tokenspeed.server.errors import HttpError, model_not_found
from tokenspeed.server.generation import Delivery, Generation
from tokenspeed.server.metrics import Metrics
from tokenspeed.text.chat_template import ChatTemplate
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.types import Overloaded, Request, RunnerLimits

INLINE_BYTES = 4096
"""Bodies up to this size are decoded, rendered and tokenised on the event loop: it takes less than a hop to a thread."""

MAX_LOGGED_FIELDS = 1000
"""Most distinct unknown fields that are logged."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ModelText(Protocol):
    """The text side of a model."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None:
        """None if the model has none."""
        ...

    @property
    def defaults(self) -> GenerationDefaults:
        """The sampling values it ships."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end its output."""
        ...


class PromptEncoder(Protocol):
    """Encodes prompts, and may remember them: `text.incremental.IncrementalEncoder`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]: ...


class Served(NamedTuple):
    """A model that answers."""

    text: ModelText
    encoder: PromptEncoder
    limits: RunnerLimits
    metrics: Metrics
    delivery: Delivery


class ServerState:
    """One server. It is loading until `serve` is called.

    Args:
      config: how it listens and what it allows.
      engine: may still be starting.
      model: the model as it was named to the engine; its name here unless the configuration gives others.

    Attributes:
      names: what clients may call the model; the first is echoed.
      created: when the server started, in seconds since the epoch.
    """

    def __init__(self, config: ServerConfig, engine: EngineClient, model: str) -> None:
        self.config = config
        self.engine = engine
        self.model = model
        self.names = config.served_model_names or (model,)
        self.created = int(time.time())
        self._served: Served | None = None
        self._pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2), thread_name_prefix="tokenspeed-text")
        self._logged_fields: set[str] = set()

    def serve(self, text: ModelText, encoder: PromptEncoder) -> None:
        """Begins to answer. The engine is ready; the caller runs on the event loop that serves."""
        limits = self.engine.limits
        metrics = Metrics(
            prefix=self.config.metrics_prefix,
            model_name=self.names[0],
            max_model_len=limits.max_model_len,
            cache_config={"block_size": str(limits.page_size), "num_gpu_blocks": str(limits.num_pages)},
            stats=self.engine.stats,
        )
        delivery = Delivery(self.engine, asyncio.get_running_loop(), metrics.step)
        self._served = Served(text, encoder, limits, metrics, delivery)

    def close(self) -> None:
        """Lets go of the threads; what they have not begun is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def served(self) -> Served:
        """The model. Raises HttpError 503 while it loads, and EngineDead when the engine has stopped."""
        if self.engine.error is not None:
            raise self.engine.error
        if self._served is None:
            raise HttpError(503, "Loading model", code="loading", headers={"Retry-After": "1"})
        return self._served

    @property
    def metrics(self) -> Metrics | None:
        """The metrics, once there are any; they outlive the engine."""
        return None if self._served is None else self._served.metrics

    def check_health(self) -> None:
        """Raises HttpError 503 or EngineDead unless requests are being answered."""
        _ = self.served
        if self.engine.stalled_seconds > self.config.watchdog_timeout:
            raise HttpError(
                503, f"The engine has not made a step for {self.engine.stalled_seconds:.0f} s", code="engine_stalled"
            )

    def check_model(self, name: str) -> None:
        """Raises HttpError 404 if `name` is given and is not served here."""
        if name and name not in self.names:
            raise model_not_found(name)

    async def run_text(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs text work of a request of `num_bytes`: at once if that is little, else in a thread."""
        if num_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def start(self, prompts: Sequence[Sequence[Request]], n: int, *, bounded: bool) -> Generation:
        """A generation of these prompts' requests, to be entered. Raises Overloaded if the queue is full."""
        served = self.served
        self._admit(sum(len(requests) for requests in prompts), served)
        return Generation(
            prompts,
            n,
            tokenizer=served.text.tokenizer,
            delivery=served.delivery,
            metrics=served.metrics,
            bounded=bounded,
        )

    def _admit(self, count: int, served: Served) -> None:
        """The engine's figures are a step old: requests added since then are counted against its free places."""
        most = self.config.max_num_queued_reqs
        if most is None:
            return
        live = self.engine.num_unfinished
        waiting = min(self.engine.stats().num_waiting, live)
        if max(waiting + count if waiting else 0, live + count - served.limits.max_num_seqs) > most:
            served.metrics.rejected("queue_full")
            raise Overloaded(f"The queue is full: {waiting} requests wait and --max-num-queued-reqs={most}; try again")

    def note_ignored(self, names: Sequence[str]) -> None:
        """Logs fields that nobody knows, each once."""
        fresh = [name for name in names if name not in self._logged_fields]
        if fresh and len(self._logged_fields) < MAX_LOGGED_FIELDS:
            self._logged_fields.update(fresh)
            logger.warning("unknown request fields are ignored: %s", ", ".join(ascii(name[:100]) for name in fresh))
