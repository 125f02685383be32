from __future__ import annotations

import pytest

from baton.kv_transfer.tiers.tier_status import PAUSE_S, Outage

DISK_FULL = OSError(28, "No space left on device")


class OutageWorld:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.outage = Outage("stored in the file tier", lambda: self.now_s)

    def state(self) -> str:
        if self.outage.is_over:
            return "works"
        return "paused" if self.outage.is_paused else "tries again"


def test_an_error_begins_a_pause_and_a_success_ends_the_outage() -> None:
    it = OutageWorld()
    assert it.state() == "works"

    it.outage.note_error(DISK_FULL)
    assert it.state() == "paused"
    it.now_s += PAUSE_S
    assert it.state() == "tries again"

    it.outage.note_success()
    assert it.state() == "works"


def test_each_cause_is_logged_once_until_a_success(caplog: pytest.LogCaptureFixture) -> None:
    it = OutageWorld()
    for _ in range(3):
        it.outage.note_error(DISK_FULL)
    assert caplog.text.count("No space left on device") == 1

    it.outage.note_error(OSError(5, "Input/output error"))
    assert caplog.text.count("Input/output error") == 1

    it.outage.note_success()
    it.outage.note_error(DISK_FULL)
    assert caplog.text.count("No space left on device") == 2
