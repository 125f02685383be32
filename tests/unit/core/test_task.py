"""Tasks of requests."""

from __future__ import annotations

import pytest

from baton.core.kv_hints import NO_KV_HINTS, KvHints
from baton.core.request import GENERATE, PREFETCH, Task, TaskOutput, task_of


@pytest.mark.parametrize(
    ("hints", "task"), [(NO_KV_HINTS, GENERATE), (KvHints(prefetch=True), PREFETCH)]
)
def test_hints_choose_the_task(hints: KvHints, task: Task) -> None:
    assert task_of(hints) is task


def test_only_a_task_that_generates_tokens_migrates() -> None:
    for task in (GENERATE, PREFETCH):
        assert task.has_decode_leg == (task.output is TaskOutput.TOKENS)
