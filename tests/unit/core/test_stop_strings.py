"""Stop strings: cases that the property tests do not cover."""

from __future__ import annotations

from baton.core.stop_strings import StopRule, StopWatcher


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    watcher = StopWatcher(StopRule(("END",)))

    reported = [watcher.push(chunk, 9) for chunk in ("some E", "N", "x", "EN", "D")]

    assert reported == ["some ", "", "ENx", "", ""]
    assert watcher.found == "END"


def test_stop_strings_are_ignored_before_min_tokens() -> None:
    watcher = StopWatcher(StopRule(("stop",), min_tokens=2))

    reported = watcher.push("stop", 1) + watcher.push(" and stop", 3)

    assert reported == "stop and "
    assert watcher.found == "stop"
