"""OpenAI's routes: JSON to the engine's requests, and token deltas back to JSON."""
