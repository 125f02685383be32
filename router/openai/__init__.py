"""The OpenAI dialect over HTTP, in front of the same pipeline as gRPC."""
