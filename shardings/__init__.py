"""Where weights and activations live: one TOML file a strategy, `[mesh]` sizes and `[axes]` from logical to mesh axes."""
