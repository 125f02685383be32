"""Hypothesis profiles: how many random examples the tests run.

BATON_HYPOTHESIS_PROFILE selects one: `short` is the default, `make check` uses `quick`. The
examples of `random` and `long` differ in each run: `random` has as few as `quick`, for many runs
(`tools/repeat_properties.py`), and `long` many more.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SHORT_EXAMPLES = 100
PROFILE = os.environ.get("BATON_HYPOTHESIS_PROFILE", "short")

# The same examples on every machine, so that failures in CI are reproducible.
settings.register_profile(
    "short",
    derandomize=True,
    deadline=None,
    max_examples=SHORT_EXAMPLES,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("short"), max_examples=20)
settings.register_profile("random", settings.get_profile("quick"), derandomize=False, database=None)
settings.register_profile(
    "long",
    settings.get_profile("short"),
    derandomize=False,
    max_examples=10_000,
    stateful_step_count=100,
)


def num_examples(num_in_short: int) -> int:
    """Return the number of examples in the current profile, proportional to that in `short`."""
    return num_in_short * settings.get_profile(PROFILE).max_examples // SHORT_EXAMPLES
