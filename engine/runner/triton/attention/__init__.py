"""Paged attention in Triton: writing keys and values, prompts, chunks and decodes."""
