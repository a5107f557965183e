"""Text: prompts to token ids, and token ids to what a user reads."""
