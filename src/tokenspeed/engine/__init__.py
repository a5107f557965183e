"""The host side of serving: which sequence computes what in each step, and who holds which page of KV cache (no jax)."""
