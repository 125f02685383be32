"""Research benchmarks and the chaos harness. Not part of the installed package."""
