"""canitoolcall's fixtures: answers of many models, read by their parsers.

docs/openai.md has the count.
"""

from __future__ import annotations

from typing import Any

import canitoolcall.adapters.base as adapters
import pytest
from canitoolcall import checks, fixtures, results

from tests.support.replayed_answers import parsing_of, replay, splits_of

FAMILIES = fixtures.load_families()
GOOD = ("pass", "soft_pass")


def result_of(fixture: Any, chunks: list[str]) -> Any:
    """Return the answer that these chunks of a fixture's text are read as."""
    given = adapters.ReplayInput.from_fixture(fixture, FAMILIES[fixture.family])
    parsing = parsing_of(fixture.family, given.model)
    assert parsing is not None, f"{given.model} is missing in PARSINGS"
    answer = replay(
        chunks,
        parsing,
        fixture.tools,
        given.generation_prompt or "",
        is_cut_off=fixture.truncated,
    )
    calls = tuple(results.ParsedToolCall(call.name, call.arguments) for call in answer.calls)
    return results.ParseResult(answer.content or None, answer.reasoning or None, calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_of_a_family_is_misread(family: str) -> None:
    for fixture in fixtures.load_fixtures(families=[family]):
        text = fixture.raw_output
        streams = {
            f"split {number}": result_of(fixture, chunks)
            for number, chunks in enumerate(splits_of(text))
        }
        whole = result_of(fixture, [text])
        seen = results.Observation(whole, streams)
        rows = checks.run_checks(fixture, FAMILIES[family], seen)
        wrong = [row for row in rows if row.status.value not in GOOD]
        assert not wrong, (fixture.id, wrong)
