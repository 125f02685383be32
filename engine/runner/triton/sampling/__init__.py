"""Constraints, draws and logprobs in Triton."""
