"""Hypothesis profiles. BATON_HYPOTHESIS_PROFILE=long runs many more examples."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# The same examples on every machine, so that failures in CI are reproducible.
settings.register_profile(
    "short",
    derandomize=True,
    deadline=None,
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "long",
    settings.get_profile("short"),
    derandomize=False,
    max_examples=10_000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("BATON_HYPOTHESIS_PROFILE", "short"))
