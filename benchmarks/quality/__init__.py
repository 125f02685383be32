"""Benchmarks of quality: what quantization loses."""
