"""Retry policy of clients: which errors are retried, and after which pause."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from baton.client.retries import Retries
from baton.core.errors import InvalidConfig
from baton.rpc.status import RemoteError

UNAVAILABLE = RemoteError(StatusCode.UNAVAILABLE, "gone", "NO_NODES")
FULL = RemoteError(StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL", retry_after_s=7.5)
ID_IN_USE = RemoteError(StatusCode.ALREADY_EXISTS, "in use", "REQUEST_ID_IN_USE")


def test_backoff_doubles_up_to_its_maximum_and_has_half_jitter() -> None:
    retries = Retries(max_attempts=9, first_pause_s=1.0, max_pause_s=5.0)

    longest = [retries.pause_s(UNAVAILABLE, number, 1.0) for number in range(1, 6)]
    shortest = [retries.pause_s(UNAVAILABLE, number, 0.0) for number in range(1, 6)]

    assert longest == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert shortest == [0.5, 1.0, 2.0, 2.5, 2.5]


def test_no_retry_follows_the_last_attempt() -> None:
    assert Retries(max_attempts=2).pause_s(UNAVAILABLE, 1, 0.5) is not None
    assert Retries(max_attempts=2).pause_s(UNAVAILABLE, 2, 0.5) is None
    assert Retries(max_attempts=1).pause_s(UNAVAILABLE, 1, 0.5) is None


@pytest.mark.parametrize(
    "code", [code for code in StatusCode if code is not StatusCode.UNAVAILABLE]
)
def test_only_unavailable_is_retried(code: StatusCode) -> None:
    assert Retries().pause_s(RemoteError(code, "no", retry_after_s=1.0), 1, 0.5) is None


def test_waits_when_full_makes_the_client_wait_for_the_retry_delay() -> None:
    assert Retries(waits_when_full=True).pause_s(FULL, 1, 0.0) == 7.5
    assert Retries().pause_s(FULL, 1, 0.0) is None


def test_a_message_that_is_too_large_is_never_retried() -> None:
    too_large = RemoteError(StatusCode.RESOURCE_EXHAUSTED, "too large", "MESSAGE_TOO_LARGE")

    assert Retries(waits_when_full=True).pause_s(too_large, 1, 0.0) is None


def test_request_id_in_use_is_retried_only_after_a_failed_attempt() -> None:
    assert Retries().pause_s(ID_IN_USE, 1, 0.5) is None
    assert Retries().pause_s(ID_IN_USE, 2, 0.5) is not None


@pytest.mark.parametrize(
    "settings", [{"max_attempts": 0}, {"first_pause_s": -1.0}, {"max_pause_s": 0.01}]
)
def test_invalid_retry_settings_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        Retries(**settings)  # type: ignore[arg-type]
