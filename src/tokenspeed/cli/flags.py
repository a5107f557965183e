"""The one table of flags: vLLM's names, with SGLang's as aliases, to fields of the configuration and of the sampling."""

from __future__ import annotations

from typing import get_args, get_type_hints

from tokenspeed.cli.kinds import (
    Absent,
    Flag,
    Holds,
    Json,
    Many,
    Switch,
    Value,
    biases,
    mapped,
    size,
    size_or_auto,
    token_ids,
)
from tokenspeed.config import Dtype, EngineConfig, LoadFormat, ServerConfig

_ENGINE = EngineConfig()
_SERVER = ServerConfig()
_DTYPES = {**{name: name for name in get_args(Dtype)}, "half": "float16", "float": "float32"}

_MODEL: tuple[Flag, ...] = (
    Value(
        "engine.model",
        "--model --model-path",
        f"a name of the catalog, a folder, a .gguf file or a hub id (default {_ENGINE.model})",
    ),
    Value("engine.tokenizer", "--tokenizer --tokenizer-path", "a folder, a tokenizer.json or a hub id"),
    Value("engine.revision", "--revision", "branch, tag or commit of a hub model"),
    Value("engine.load_format", "--load-format", "dummy: random weights", choices=get_args(LoadFormat)),
    Value(
        "engine.dtype",
        "--dtype",
        f"of weights and activations: {', '.join(_DTYPES)} (default {_ENGINE.dtype})",
        parse=mapped(_DTYPES),
    ),
    Json("engine.hf_overrides", "--hf-overrides --json-model-override-args", "keys of config.json to replace"),
    Value("engine.download_dir", "--download-dir", "where models are kept (default TOKENSPEED_HOME)"),
    Value("engine.chat_template", "--chat-template", "a file or the template's text (default the model's own)"),
    Value(
        "engine.generation_config",
        "--generation-config",
        "sampling defaults: auto (the model's own), vllm (neutral), or a folder with a generation_config.json",
    ),
    Value(
        "engine.generation_config",
        "--sampling-defaults",
        "SGLang's form of --generation-config: model or openai",
        parse=mapped({"model": "auto", "openai": "vllm"}),
    ),
    Value("engine.seed", "--seed --random-seed", "of the seeds drawn for requests that bring none", parse=int),
    Holds("--trust-remote-code"),
    Absent("--hf-token", "a command line can be read by all users of the machine: set HF_TOKEN in the environment"),
    Absent("--tokenizer-revision", "the tokenizer comes from the model's --revision"),
    Absent("--tokenizer-mode", "there is one kind of tokenizer", holds=("auto",)),
    Absent("--hf-chat-template-name", "give the template itself with --chat-template"),
    Absent("--chat-template-content-format", "the format is found in the template", holds=("auto",)),
    Absent("-q --quantization", "a checkpoint is loaded as it is stored", holds=("auto", "none")),
    Absent(
        "--override-generation-config --preferred-sampling-params",
        "name the folder of a generation_config.json with --generation-config",
    ),
)

_ENGINE_FLAGS: tuple[Flag, ...] = (
    Value(
        "engine.max_model_len",
        "--max-model-len --context-length --max-seq-len",
        "tokens of prompt and output together, such as 8192 or 8k; auto: the model's own limit",
        parse=size_or_auto,
    ),
    Value(
        "engine.gpu_memory_utilization",
        "--gpu-memory-utilization --mem-fraction-static",
        f"share of the device's memory to use (default {_ENGINE.gpu_memory_utilization})",
        parse=float,
    ),
    Value("engine.kv_cache_memory_bytes", "--kv-cache-memory-bytes", "size of the KV cache, e.g. 2G", parse=size),
    Value("engine.num_pages", "--num-gpu-blocks-override", "pages of KV cache", parse=int),
    Value("engine.page_size", "--block-size --page-size --tokens-per-block", "tokens a page of KV cache", parse=int),
    Value(
        "engine.max_num_seqs",
        "--max-num-seqs --max-running-requests --max-batch-size",
        "sequences that run at once (default 256 on a GPU, 16 on a CPU)",
        parse=size,
    ),
    Value(
        "engine.max_num_batched_tokens",
        "--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens --max-num-tokens",
        "token budget of a step (default 8192 on a GPU, 256 on a CPU)",
        parse=size,
    ),
    Switch(
        "engine.enable_prefix_caching",
        "--enable-prefix-caching",
        "--no-enable-prefix-caching --disable-radix-cache",
        "compute shared prefixes anew each time",
        shown="off",
    ),
    Switch(
        "engine.overlap",
        "--async-scheduling",
        "--no-async-scheduling --disable-overlap-schedule",
        "wait for each step's tokens before the next is dispatched",
        shown="off",
    ),
    Switch(
        "engine.enforce_eager",
        "--enforce-eager --disable-cuda-graph",
        "--no-enforce-eager",
        "compile on first use instead of at start",
    ),
    Switch(
        "engine.compilation_cache",
        "--compilation-cache",
        "--no-compilation-cache",
        "keep no compiled programs on disk",
        shown="off",
    ),
    Switch(
        "engine.progress",
        "--progress --use-tqdm-on-load",
        "--no-progress --no-use-tqdm-on-load",
        "show no progress bars",
        shown="off",
    ),
    Holds("--enable-chunked-prefill"),
    Absent("--no-enable-chunked-prefill", "long prompts are always computed in chunks"),
    Absent("--max-total-tokens", "give the cache's size in pages with --num-gpu-blocks-override"),
    Absent("-tp --tensor-parallel-size --tp --tp-size", "a model runs on one device", holds=("1",)),
    Absent("-dp --data-parallel-size --dp --dp-size", "a model runs on one device", holds=("1",)),
    Absent("-pp --pipeline-parallel-size --pp --pp-size", "a model runs on one device", holds=("1",)),
    Absent("--ep-size --ep", "a model runs on one device", holds=("1",)),
    Absent("--enable-expert-parallel", "a model runs on one device"),
    Absent("--kv-cache-dtype", "the cache has the activations' dtype", holds=("auto",)),
    Absent("--speculative-config", "there is no speculative decoding"),
    Absent("--speculative-algorithm", "there is no speculative decoding"),
    Absent("--speculative-draft-model-path", "there is no speculative decoding"),
    Absent("--speculative-num-steps", "there is no speculative decoding"),
    Absent("--speculative-eagle-topk", "there is no speculative decoding"),
    Absent("--speculative-num-draft-tokens", "there is no speculative decoding"),
    Absent("--enable-lora", "there are no adapters"),
    Absent("--lora-modules --lora-paths", "there are no adapters"),
    Absent("--max-loras --max-loras-per-batch", "there are no adapters"),
    Absent("--max-lora-rank", "there are no adapters"),
    Absent(
        "--scheduling-policy --schedule-policy", "requests run by priority, then by arrival", holds=("fcfs", "priority")
    ),
    Absent("--logprobs-mode", "log-probabilities are those of the raw logits", holds=("raw_logprobs",)),
    Absent("--max-logprobs", "at most 20 alternatives are reported", holds=("20",)),
)

_HTTP: tuple[Flag, ...] = (
    Value("server.host", "--host", f"address to listen on (default {_SERVER.host})"),
    Value("server.port", "--port", f"0: any free one (default {_SERVER.port})", parse=int),
    Value("server.uds", "--uds", "a Unix socket to listen on instead of host and port"),
    Many("server.api_keys", "--api-key", "keys that clients must send; also TOKENSPEED_API_KEY"),
    Many("server.served_model_names", "--served-model-name", "names clients may use; the first is echoed"),
    Many("server.allowed_origins", "--allowed-origins", "of browsers (default any)"),
    Many("server.allowed_methods", "--allowed-methods", "of browsers (default any)"),
    Many("server.allowed_headers", "--allowed-headers", "of browsers (default any)"),
    Switch("server.allow_credentials", "--allow-credentials", "--no-allow-credentials", "let browsers send cookies"),
    Value("server.root_path", "--root-path", "path under which a proxy exposes the server"),
    Value("server.ssl_keyfile", "--ssl-keyfile", "private key for HTTPS"),
    Value("server.ssl_certfile", "--ssl-certfile", "certificate for HTTPS"),
    Value("server.ssl_ca_certs", "--ssl-ca-certs", "certificates clients are checked against"),
    Value(
        "server.shutdown_timeout",
        "--shutdown-timeout",
        f"seconds to finish requests after SIGTERM (default {_SERVER.shutdown_timeout:g})",
        parse=float,
    ),
    Value(
        "server.sse_keep_alive_interval",
        "--sse-keep-alive-interval",
        "seconds of silence before a stream sends a comment; 15 suits most proxies (default 0: never)",
        parse=float,
    ),
    Value("server.max_body_bytes", "--max-body", "largest request body, e.g. 64M", parse=size),
    Value("server.max_n", "--max-n", f"largest n of a request (default {_SERVER.max_n})", parse=int),
    Value(
        "server.max_stop_strings",
        "--max-stop-strings",
        f"most stop strings of a request (default {_SERVER.max_stop_strings})",
        parse=int,
    ),
    Value(
        "server.max_num_queued_reqs",
        "--max-num-queued-reqs --max-queued-requests",
        "requests that may wait; more get 503 (default any number)",
        parse=size,
    ),
    Value("server.metrics_prefix", "--metrics-prefix", "of the metrics' names; vllm for existing dashboards"),
    Switch(
        "server.enable_force_include_usage",
        "--enable-force-include-usage --stream-response-default-include-usage",
        "--no-enable-force-include-usage",
        "end every stream with its usage",
    ),
    Switch(
        "server.enable_request_id_headers",
        "--enable-request-id-headers",
        "--no-enable-request-id-headers",
        "send X-Request-Id with every response",
    ),
    Value("server.response_role", "--response-role", f"role of the answers (default {_SERVER.response_role})"),
    Value(
        "server.watchdog_timeout",
        "--watchdog-timeout",
        f"seconds without a step before /health fails (default {_SERVER.watchdog_timeout:g})",
        parse=float,
    ),
    Value(
        "server.uvicorn_log_level",
        "--uvicorn-log-level --log-level",
        f"(default {_SERVER.uvicorn_log_level})",
        choices=get_args(get_type_hints(ServerConfig)["uvicorn_log_level"]),
    ),
    Switch(
        "server.access_log",
        "--access-log",
        "--disable-uvicorn-access-log --disable-access-log",
        "log no line a request",
        shown="off",
    ),
    Holds("--enable-auto-tool-choice"),
    Holds("--enable-prompt-tokens-details --enable-cache-report"),
    Holds("--enable-metrics"),
    Holds("--disable-log-stats"),
    Absent("--admin-api-key", "there is one kind of key, --api-key"),
    Absent("--tool-call-parser", "tool calls are not parsed"),
    Absent("--reasoning-parser", "reasoning is not parsed"),
    Absent("--default-chat-template-kwargs", "send chat_template_kwargs with each request"),
    Absent("--trust-request-chat-template", "a request cannot bring a template"),
    Absent("--structured-outputs-config.backend", "output cannot be constrained", holds=("auto", "none")),
    Absent("--guided-decoding-backend --grammar-backend", "output cannot be constrained", holds=("auto", "none")),
    Absent("--max-num-queued-tokens", "limit the queue with --max-num-queued-reqs"),
    Absent("--stream-interval", "every token is sent at once", holds=("1",)),
    Absent("--enable-log-requests --log-requests", "prompts are not logged"),
    Absent("--max-log-len", "prompts are not logged"),
    Absent("--decode-log-interval", "read /metrics instead"),
    Absent("--middleware", "put a proxy in front of the server"),
)

SAMPLING: tuple[Flag, ...] = (
    Value("sampling.max_tokens", "--max-tokens --max-new-tokens", "longest output, in tokens", parse=size),
    Value("sampling.min_tokens", "--min-tokens --min-new-tokens", "shortest output, in tokens", parse=size),
    Value("sampling.temperature", "--temperature", "in [0, 2]; 0: always the most likely token", parse=float),
    Value("sampling.top_p", "--top-p", "in (0, 1]: mass of the tokens chosen from", parse=float),
    Value("sampling.top_k", "--top-k", "number of tokens chosen from; 0: all", parse=int),
    Value("sampling.min_p", "--min-p", "in [0, 1]: least probability relative to the largest", parse=float),
    Value("sampling.repetition_penalty", "--repetition-penalty", "above 0; 1: none", parse=float),
    Value("sampling.presence_penalty", "--presence-penalty", "in [-2, 2]", parse=float),
    Value("sampling.frequency_penalty", "--frequency-penalty", "in [-2, 2]", parse=float),
    Value("sampling.logit_bias", "--logit-bias", 'JSON such as {"42": -5}', parse=biases),
    Many("sampling.allowed_token_ids", "--allowed-token-ids", "the only ids to choose from, 1,2,3", parse=token_ids),
    Many("sampling.banned_token_ids", "--banned-token-ids", "ids never chosen, 1,2,3", parse=token_ids),
    Value("sampling.seed", "--sampling-seed", "of the first sample; --seed is the engine's", parse=int),
    Many("sampling.stop", "--stop", "strings that end the output"),
    Many("sampling.stop_token_ids", "--stop-token-ids", "ids that end the output, 1,2,3", parse=token_ids),
    Switch("sampling.ignore_eos", "--ignore-eos", "--no-ignore-eos", "go on after the end of sequence"),
    Switch(
        "sampling.include_stop_str_in_output",
        "--include-stop-str-in-output --no-stop-trim",
        "--no-include-stop-str-in-output",
        "keep the stop string",
    ),
    Switch(
        "sampling.skip_special_tokens",
        "--skip-special-tokens",
        "--no-skip-special-tokens",
        "show special tokens in the text",
        shown="off",
    ),
)

SAMPLES: tuple[Flag, ...] = (
    Value("sampling.n", "-n --n", "samples a prompt", parse=int),
    Value("sampling.logprobs", "--logprobs", "alternatives reported a token, with --json", parse=int),
    Value("sampling.prompt_logprobs", "--prompt-logprobs", "the same for the prompt", parse=int),
)
"""Sampling of which a plain text can show nothing, or more than one."""

ENGINE: dict[str, tuple[Flag, ...]] = {"model": _MODEL, "memory and batching": _ENGINE_FLAGS}
SERVER: dict[str, tuple[Flag, ...]] = {**ENGINE, "server": _HTTP}
