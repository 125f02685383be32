"""Calendar of steps."""

from __future__ import annotations

from baton.engine.step_calendar import StepCalendar


def test_entries_are_returned_once_in_their_step_in_insertion_order() -> None:
    calendar: StepCalendar[str] = StepCalendar()
    calendar.add(2, "a")
    calendar.add(3, "c")
    calendar.add(2, "b")

    found = [(calendar.begin_step(), calendar.step) for _ in range(4)]

    assert found == [([], 1), (["a", "b"], 2), (["c"], 3), ([], 4)]
