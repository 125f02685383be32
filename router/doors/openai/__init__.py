"""OpenAI-compatible HTTP API in front of the same pipeline as gRPC."""
