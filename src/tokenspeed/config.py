"""What the user asked for (`EngineConfig`) and what a model family is (`ModelConfig`): frozen, validated, the only defaults."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenspeed.types import ConfigError

DEFAULT_MODEL = "smollm2"
"""The embedded default; see weights/catalog."""

Activation = Literal["silu", "gelu_tanh"]
RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding of one kind of layer.

    `factor` and the fields after it are those of Hugging Face's `rope_scaling`; each is None where the type has none.
    """

    theta: float
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a dense decoder. Differences inside the family are fields here, not classes."""

    architecture: str
    """Hugging Face class name, e.g. `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    rope_local: Rope | None = None
    """Rope of the sliding-window layers, where it differs (Gemma 3)."""
    activation: Activation = "silu"
    sliding_windows: tuple[int | None, ...] = ()
    """One a layer: tokens a query sees, itself included; None sees all. Empty: all layers see all."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys, before RoPE."""
    norm_plus_one: bool = False
    """RMSNorm multiplies by 1 + weight (Gemma)."""
    sandwich_norms: bool = False
    """Norms after attention and after the MLP too (Gemma)."""
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    """None: head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    checkpoint_dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    name_or_path: str = ""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        ):
            value: int = getattr(self, name)
            if value < 1:
                raise ConfigError(f"the model's {name} must be at least 1, got {value}; its config is damaged")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"the model's num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; its config is damaged"
            )
        if self.sliding_windows and len(self.sliding_windows) != self.num_layers:
            raise ConfigError(
                f"the model's config names {len(self.sliding_windows)} attention windows for {self.num_layers} layers; it is damaged"
            )

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, or None."""
        return self.sliding_windows[layer] if self.sliding_windows else None

    def layer_rope(self, layer: int) -> Rope:
        """The rope of a layer."""
        return self.rope_local if self.rope_local is not None and self.window(layer) is not None else self.rope


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Sampling defaults a model ships (generation_config.json); None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for. `tokenspeed serve --help` documents each field under vLLM's flag name.

    Raises:
      ConfigError: a value cannot be used; the text names the flag and the remedy.
    """

    model: str = DEFAULT_MODEL
    """A name of the catalog, a folder, a .gguf file or a Hugging Face hub id."""
    tokenizer: str | None = None
    """A folder, a tokenizer.json or a hub id; None: the model's own."""
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: Dtype = "auto"
    """auto: on a GPU the checkpoint's (float32 becomes bfloat16); on a CPU float32, with GGUF weights kept packed where the kernels for that can be built."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: the model's own limit (on a CPU at most 8192)."""
    gpu_memory_utilization: float = 0.92
    """Share of the device's memory for weights, cache and temporaries. On a CPU the cache gets a sixteenth of the machine's memory at most."""
    kv_cache_memory_bytes: int | None = None
    num_pages: int | None = None
    """Pages in the pool; overrides what memory would allow."""
    page_size: int | None = None
    """Tokens a page of KV cache; None: 16 on a GPU, 32 on a CPU."""
    max_num_seqs: int | None = None
    """Sequences that run at once; None: 256 on a GPU, 16 on a CPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None: 8192 on a GPU, 256 on a CPU."""
    enable_prefix_caching: bool = True
    overlap: bool = True
    """Dispatch the next step before the last one's tokens are known."""
    enforce_eager: bool = False
    """Compile on first use instead of at start."""
    seed: int = 0
    """Of the seeds drawn for requests that bring none, and of dummy weights."""
    download_dir: str | None = None
    """Where models are kept; None: `TOKENSPEED_HOME` or ~/.cache/tokenspeed; hub models in Hugging Face's own cache."""
    compilation_cache: bool = True
    """Keep compiled programs on disk, under the cache folder."""
    chat_template: str | None = None
    """A file or the template's text; None: the model's own."""
    generation_config: str = "auto"
    """auto: the model's sampling defaults; vllm: the server's; or a folder that holds a generation_config.json."""
    hf_overrides: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)
    """Keys of config.json to replace."""
    progress: bool = True
    """Show progress bars."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model must not be empty; leave it out to serve the embedded default")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization:g}")
        for name, value in (
            ("max-model-len", self.max_model_len),
            ("max-num-seqs", self.max_num_seqs),
            ("max-num-batched-tokens", self.max_num_batched_tokens),
            ("kv-cache-memory-bytes", self.kv_cache_memory_bytes),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, got {value}")
        if self.num_pages is not None and self.num_pages < 2:
            raise ConfigError(f"--num-gpu-blocks-override must be at least 2 (one is scratch), got {self.num_pages}")
        if self.page_size is not None and self.page_size not in (16, 32, 64, 128):
            raise ConfigError(f"--block-size must be 16, 32, 64 or 128, got {self.page_size}")
        if (
            self.max_num_seqs is not None
            and self.max_num_batched_tokens is not None
            and self.max_num_batched_tokens < self.max_num_seqs
        ):
            raise ConfigError(
                f"--max-num-batched-tokens={self.max_num_batched_tokens} is smaller than --max-num-seqs={self.max_num_seqs}; "
                "each running sequence needs a token a step: raise the one or lower the other"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How the HTTP server listens and what it allows. `tokenspeed serve --help` documents each field under vLLM's flag name.

    Raises:
      ConfigError: a value cannot be used; the text names the flag and the remedy.
    """

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8000
    """0: any free port."""
    uds: str | None = None
    """A Unix socket to listen on instead of host and port."""
    api_keys: tuple[str, ...] = ()
    """Any of these is accepted as `Authorization: Bearer` or `x-api-key`; empty: no key is asked for."""
    served_model_names: tuple[str, ...] = ()
    """Names clients may use; the first is echoed. Empty: the model as it was named to the engine."""
    allowed_origins: tuple[str, ...] = ("*",)
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    """Path under which a proxy exposes this server."""
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    sse_keep_alive_interval: float = 0.0
    """Seconds of silence after which a stream sends a comment; 0: never. 15 suits most proxies."""
    max_body_bytes: int = 64 * 2**20
    """Largest request body."""
    max_n: int = 128
    """Largest `n` of a request."""
    max_stop_strings: int = 4
    """Most stop strings of a request."""
    max_num_queued_reqs: int | None = None
    """Requests that may wait for the engine; more are told to come back later. None: any number."""
    metrics_prefix: str = "tokenspeed"
    """Prefix of the metrics' names; `vllm` for existing dashboards."""
    enable_force_include_usage: bool = False
    """End every stream with the usage chunk, asked for or not."""
    enable_request_id_headers: bool = False
    """Send `X-Request-Id` with every response."""
    response_role: str = "assistant"
    """Role of the answers to chat requests."""
    watchdog_timeout: float = 300.0
    """Seconds without a step, while requests wait, after which /health reports failure."""
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug", "trace"] = "info"
    access_log: bool = True
    """Log a line a request."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be in [0, 65535], got {self.port}")
        for name, value in (
            ("shutdown-timeout", self.shutdown_timeout),
            ("sse-keep-alive-interval", self.sse_keep_alive_interval),
        ):
            if not 0 <= value < math.inf:
                raise ConfigError(f"--{name} must be at least 0 seconds, got {value:g}")
        if not 0 < self.watchdog_timeout < math.inf:
            raise ConfigError(f"--watchdog-timeout must be above 0 seconds, got {self.watchdog_timeout:g}")
        for name, count in (
            ("max-body", self.max_body_bytes),
            ("max-n", self.max_n),
            ("max-stop-strings", self.max_stop_strings),
        ):
            if count < 1:
                raise ConfigError(f"--{name} must be at least 1, got {count}")
        if self.max_num_queued_reqs is not None and self.max_num_queued_reqs < 0:
            raise ConfigError(f"--max-num-queued-reqs must be at least 0, got {self.max_num_queued_reqs}")
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", self.metrics_prefix):
            raise ConfigError(
                f"--metrics-prefix must be letters, digits and underscores, got {self.metrics_prefix!r}; try vllm"
            )
        if any(not key for key in self.api_keys):
            raise ConfigError("--api-key must not be empty; leave it out to ask for no key")
        if any(not name for name in self.served_model_names):
            raise ConfigError("--served-model-name must not be empty; leave it out to use the model's own name")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile belong together; give both or neither")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must start with a slash and not end with one, got {self.root_path!r}")


@dataclass(frozen=True)
class Environment:
    """The environment variables this project reads; read here and nowhere else."""

    home: Path
    """Models, compiled programs and built kernels live here."""
    api_keys: tuple[str, ...]


def environment() -> Environment:
    """Reads the environment now."""
    home = os.environ.get("TOKENSPEED_HOME")
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(home) if home else (Path(cache) if cache else Path.home() / ".cache") / "tokenspeed"
    key = os.environ.get("TOKENSPEED_API_KEY")
    return Environment(home=base, api_keys=(key,) if key else ())
