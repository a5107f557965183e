"""tokenspeed: an LLM inference engine for coding agents, as pure JAX programs."""

__version__ = "0.1.0"
