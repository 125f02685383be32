"""Hashes of KV blocks in Triton."""
