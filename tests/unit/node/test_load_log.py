"""Log of the progress of loading weights, which `baton up` shows."""

from __future__ import annotations

import logging

import pytest

from baton.cli.commands.up import LOADED
from baton.engine.runner.model_info import LoadProgress
from baton.node.run import LoadLog


def test_progress_is_logged_every_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((100.0, 101.9, 102.1, 104.0, 104.2, 104.3))
    note = LoadLog(lambda: next(times))

    with caplog.at_level(logging.INFO, "baton.node.run"):
        for percent in (5, 10, 15, 50, 100):
            note(LoadProgress(percent, 100))

    assert caplog.messages == ["loaded 10 % of the weights", "loaded 50 % of the weights"]
    assert all(LOADED.search(message) for message in caplog.messages)


def test_a_model_without_weights_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 3.0))
    with caplog.at_level(logging.INFO, "baton.node.run"):
        LoadLog(lambda: next(times))(LoadProgress(0, 0))

    assert caplog.messages == ["loaded 0 % of the weights"]
