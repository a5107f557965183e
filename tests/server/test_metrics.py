from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tokenspeed.engine.client import NO_STATS
from tokenspeed.server.metrics import Metrics, RequestRecord, token_buckets
from tokenspeed.types import Request, SamplingParams, StepStats, TokenDelta

STATS = msgspec.structs.replace(
    NO_STATS,
    time=1000.0,
    num_running=3,
    num_waiting=2,
    num_pages=100,
    num_pages_used=25,
    prefix_queries=50,
    prefix_hits=20,
    num_preemptions=4,
    step_tokens=6,
    step_padding=2,
    num_compiles=1,
)


def metrics(prefix: str = "tokenspeed", stats: StepStats = STATS) -> Metrics:
    return Metrics(
        prefix=prefix, model_name="m", max_model_len=100, cache_config={"block_size": "16"}, stats=lambda: stats
    )


def samples(exposed: Metrics) -> dict[str, float]:
    """Each sample's value; those of a histogram's buckets and of creation times left out."""
    families = text_string_to_metric_families(exposed.exposition().decode())
    return {
        sample.name + "".join(f"/{v}" for k, v in sample.labels.items() if k != "model_name"): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith(("_bucket", "_created"))
    }


def request(**sampling: object) -> Request:
    return Request(
        request_id="r",
        prompt_ids=(1, 2, 3, 4),
        sampling=SamplingParams(**sampling),  # pyright: ignore[reportArgumentType]
        eos_ids=(),
        arrival_time=100.0,
    )


@pytest.mark.parametrize("prefix", ["tokenspeed", "vllm"])
def test_engine_state(prefix: str) -> None:
    values = samples(metrics(prefix))
    assert values[f"{prefix}:num_requests_running"] == 3
    assert values[f"{prefix}:num_requests_waiting"] == 2
    assert values[f"{prefix}:kv_cache_usage_perc"] == 0.25
    assert values[f"{prefix}:prefix_cache_queries_total"] == 50
    assert values[f"{prefix}:prefix_cache_hits_total"] == 20
    assert values[f"{prefix}:num_preemptions_total"] == 4
    assert values[f"{prefix}:compile_total"] == 1
    assert values[f"{prefix}:batch_padding_ratio"] == 0.25
    assert values[f"{prefix}:engine_heartbeat_timestamp_seconds"] == 1000
    assert values[f"{prefix}:cache_config_info/16"] == 1


def test_before_the_first_step() -> None:
    values = samples(metrics(stats=NO_STATS))
    assert values["tokenspeed:kv_cache_usage_perc"] == 0
    assert values["tokenspeed:batch_padding_ratio"] == 0


def test_a_request() -> None:
    exposed = metrics()
    record = RequestRecord(exposed, request(max_tokens=7))
    delta = TokenDelta(request_id="r", token_ids=(1,), num_cached_tokens=3, scheduled_time=101.0)
    record.advance(delta, 1, 103.0)
    record.advance(TokenDelta(request_id="r", token_ids=(1, 2), num_preemptions=1), 2, 104.0)
    record.finish("stop", 104.0)
    values = samples(exposed)
    prefix = "tokenspeed:"
    assert values[prefix + "prompt_tokens_total"] == 4
    assert values[prefix + "prompt_tokens_cached_total"] == 3
    assert values[prefix + "generation_tokens_total"] == 3
    assert values[prefix + "request_success_total/stop"] == 1
    assert values[prefix + "time_to_first_token_seconds_sum"] == 3
    assert values[prefix + "inter_token_latency_seconds_sum"] == 1
    assert values[prefix + "inter_token_latency_seconds_count"] == 2
    assert values[prefix + "request_time_per_output_token_seconds_sum"] == 0.5
    assert values[prefix + "e2e_request_latency_seconds_sum"] == 4
    assert values[prefix + "request_queue_time_seconds_sum"] == 1
    assert values[prefix + "request_prefill_time_seconds_sum"] == 2
    assert values[prefix + "request_decode_time_seconds_sum"] == 1
    assert values[prefix + "request_inference_time_seconds_sum"] == 3
    assert values[prefix + "request_prompt_tokens_sum"] == 4
    assert values[prefix + "request_generation_tokens_sum"] == 3
    assert values[prefix + "request_prefill_kv_computed_tokens_sum"] == 1
    assert values[prefix + "request_params_max_tokens_sum"] == 7
    assert values[prefix + "request_num_preemptions_sum"] == 1


def test_a_request_that_never_ran() -> None:
    exposed = metrics()
    RequestRecord(exposed, request()).finish("abort", 105.0)
    values = samples(exposed)
    assert values["tokenspeed:request_success_total/abort"] == 1
    assert values["tokenspeed:e2e_request_latency_seconds_sum"] == 5
    assert values["tokenspeed:request_queue_time_seconds_count"] == 0


def test_steps_and_rejections() -> None:
    exposed = metrics()
    exposed.step(STATS)
    exposed.step(NO_STATS)
    exposed.rejected("queue_full")
    values = samples(exposed)
    assert values["tokenspeed:iteration_tokens_total_count"] == 1
    assert values["tokenspeed:iteration_tokens_total_sum"] == 6
    assert values["tokenspeed:admission_rejections_total/queue_full"] == 1


def test_token_buckets() -> None:
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(8192)[-1] == 5000
