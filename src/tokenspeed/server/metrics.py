"""Prometheus metrics under vLLM's names: the engine's state at each scrape, and what each request took."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tokenspeed.types import FinishReason, Request, StepStats, TokenDelta

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)  # fmt: skip
_PER_TOKEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)  # fmt: skip
_REQUEST = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SAMPLES = (1, 2, 5, 10, 20)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20)


def token_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    buckets = (digit * 10**power for power in range(len(str(limit))) for digit in (1, 2, 5))
    return tuple(bucket for bucket in buckets if bucket <= limit)


class Metrics:
    """All series of one server, in a registry of its own, each labelled with the model's name only.

    Args:
      prefix: stands before the colon of each name.
      model_name: the name clients know the model by.
      max_model_len: the largest bucket of token counts.
      cache_config: labels of `cache_config_info`.
      stats: the engine's state now, or None before its first step; called at each scrape.
    """

    def __init__(
        self,
        *,
        prefix: str,
        model_name: str,
        max_model_len: int,
        cache_config: Mapping[str, str],
        stats: Callable[[], StepStats | None],
    ) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(prefix, model_name, cache_config, stats))
        tokens = token_buckets(max_model_len)
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of started requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prompt_tokens_cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        self._finished = Counter(
            f"{prefix}:request_success",
            "Finished requests.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._rejected = Counter(
            f"{prefix}:admission_rejections", "Requests turned away.", ("model_name", "reason"), registry=self._registry
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens a request.", tokens)
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens a request.", tokens
        )
        self.request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Most tokens among a prompt's samples.", tokens
        )
        self.request_params_max_tokens = self._histogram("request_params_max_tokens", "max_tokens asked for.", tokens)
        self.request_prefill_kv_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens computed, not found in the cache.", tokens
        )
        self.request_params_n = self._histogram("request_params_n", "n asked for.", _SAMPLES)
        self.request_num_preemptions = self._histogram(
            "request_num_preemptions", "How often a request was put back.", _PREEMPTIONS
        )
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens a step.", _STEP_TOKENS)
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Gap between a request's tokens.", _PER_TOKEN
        )
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean gap between tokens.", _PER_TOKEN
        )
        self.e2e_latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST)
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "First scheduling to last token.", _REQUEST
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First scheduling to first token.", _REQUEST
        )
        self.decode_time = self._histogram("request_decode_time_seconds", "First token to last token.", _REQUEST)

    def _counter(self, name: str, text: str) -> Counter:
        counter = Counter(f"{self._prefix}:{name}", text, ("model_name",), registry=self._registry)
        return counter.labels(self._model_name)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"{self._prefix}:{name}", text, ("model_name",), buckets=buckets, registry=self._registry)
        return histogram.labels(self._model_name)

    def step(self, stats: StepStats) -> None:
        """Records one step of the engine."""
        if stats.step_tokens:
            self.iteration_tokens.observe(stats.step_tokens)

    def finished(self, reason: FinishReason) -> None:
        """Counts a request that ended."""
        self._finished.labels(self._model_name, reason).inc()

    def rejected(self, reason: str) -> None:
        """Counts a request that was turned away before the engine saw it."""
        self._rejected.labels(self._model_name, reason).inc()

    def exposition(self) -> bytes:
        """All series as Prometheus text, version 0.0.4."""
        return generate_latest(self._registry)


class RequestRecord:
    """Times and counts of one engine request, told to the metrics as they become known.

    Attributes:
      output_tokens: tokens generated so far.
      cached_tokens: prompt tokens that came from the prefix cache.
    """

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._arrival = request.arrival_time
        self._prompt_tokens = len(request.prompt_ids)
        self._scheduled = 0.0
        self._first = 0.0
        self._last = 0.0
        self._preemptions = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self._max_tokens = request.sampling.max_tokens

    def advance(self, delta: TokenDelta, count: int, now: float) -> None:
        """Records what one step added: `count` tokens, at `now` in seconds since the epoch."""
        if self._first == 0.0:
            self._start(delta, now)
        elif count:
            for _ in range(count):
                self._metrics.inter_token_latency.observe((now - self._last) / count)
        self._last = now
        self._preemptions = delta.num_preemptions
        self.output_tokens += count
        self._metrics.generation_tokens.inc(count)

    def _start(self, delta: TokenDelta, now: float) -> None:
        self._first = now
        self._scheduled = delta.scheduled_time or self._arrival
        self.cached_tokens = delta.num_cached_tokens
        self._metrics.prompt_tokens.inc(self._prompt_tokens)
        self._metrics.prompt_tokens_cached.inc(self.cached_tokens)
        self._metrics.time_to_first_token.observe(now - self._arrival)

    def finish(self, reason: FinishReason, now: float) -> None:
        """Records the end. A request that never started has no times but its latency."""
        metrics = self._metrics
        metrics.finished(reason)
        metrics.e2e_latency.observe(now - self._arrival)
        metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_generation_tokens.observe(self.output_tokens)
        metrics.request_num_preemptions.observe(self._preemptions)
        if self._max_tokens is not None:
            metrics.request_params_max_tokens.observe(self._max_tokens)
        if self._first == 0.0:
            return
        metrics.request_prefill_kv_computed_tokens.observe(self._prompt_tokens - self.cached_tokens)
        metrics.queue_time.observe(self._scheduled - self._arrival)
        metrics.inference_time.observe(self._last - self._scheduled)
        metrics.prefill_time.observe(self._first - self._scheduled)
        metrics.decode_time.observe(self._last - self._first)
        if self.output_tokens > 1:
            metrics.time_per_output_token.observe((self._last - self._first) / (self.output_tokens - 1))


class _EngineCollector(Collector):
    """The engine's own counts, read when somebody asks."""

    def __init__(
        self, prefix: str, model_name: str, cache_config: Mapping[str, str], stats: Callable[[], StepStats | None]
    ) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._cache_config = cache_config
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield self._cache_config_info()
        stats = self._stats()
        if stats is None:
            return
        tokens = stats.step_tokens + stats.step_padding
        yield self._gauge("num_requests_running", "Requests in the batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for a place.", stats.num_waiting)
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the cache's pages that live requests hold, 0 to 1.",
            stats.num_pages_used / max(stats.num_pages, 1),
        )
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits)
        yield self._counter("num_preemptions", "Requests put back for want of pages.", stats.num_preemptions)
        yield self._counter("compile", "Programs compiled since the engine was ready.", stats.num_compiles)
        yield self._gauge(
            "batch_padding_ratio", "Share of the last step that was padding.", stats.step_padding / max(tokens, 1)
        )
        yield self._gauge("engine_heartbeat_timestamp_seconds", "When the engine last stepped.", stats.time)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=("model_name",))
        family.add_metric((self._model_name,), value)
        return family

    def _cache_config_info(self) -> Metric:
        labels = {"model_name": self._model_name, **self._cache_config}
        family = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "The cache's sizes, as labels.", labels=tuple(labels)
        )
        family.add_metric(tuple(labels.values()), 1)
        return family
