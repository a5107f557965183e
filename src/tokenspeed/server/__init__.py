"""The HTTP server: OpenAI's API over a Starlette application, and nothing that computes."""
