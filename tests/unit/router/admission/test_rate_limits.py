"""Rate limits per client, with a clock of the test."""

from __future__ import annotations

import pytest

from baton.router.admission.rate_limits import ClientUsage, RateLimitConfig, RateLimits
from baton.router.http.exchange import duration, limit_headers
from baton.rpc.errors import RateLimited


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def one_request(usage: ClientUsage) -> None:
    with usage.admitting():
        """The request ends at once."""


def test_requests_at_a_time_are_those_that_have_not_ended() -> None:
    usage = RateLimits(RateLimitConfig(client_max_requests=2), Clock()).of("a")

    with usage.admitting():
        with usage.admitting(), pytest.raises(RateLimited, match="2 requests in progress"):
            one_request(usage)
        one_request(usage)


def test_requests_of_a_minute_return_continuously() -> None:
    clock = Clock()
    usage = RateLimits(RateLimitConfig(client_requests_per_minute=30), clock).of("a")
    for _ in range(30):
        one_request(usage)

    with pytest.raises(RateLimited, match="its 30 requests per minute") as refusal:
        one_request(usage)
    assert refusal.value.retry_after_s == pytest.approx(2)
    assert usage.allowances()["requests"].reset_s == pytest.approx(60)
    clock.now += 1.9
    with pytest.raises(RateLimited):
        one_request(usage)
    clock.now += 0.1
    one_request(usage)
    clock.now += 3600
    assert usage.allowances()["requests"].remaining == 30


def test_tokens_above_the_limit_are_waited_for() -> None:
    clock = Clock()
    usage = RateLimits(RateLimitConfig(client_tokens_per_minute=600), clock).of("a")
    with usage.admitting():
        usage.note_tokens(700)

    with pytest.raises(RateLimited, match="600 tokens per minute") as refusal:
        one_request(usage)
    assert refusal.value.retry_after_s == pytest.approx(10.1)
    assert usage.allowances()["tokens"].remaining == 0
    clock.now += refusal.value.retry_after_s
    one_request(usage)


def test_clients_have_limits_of_their_own() -> None:
    limits = RateLimits(RateLimitConfig(client_requests_per_minute=1), Clock())
    one_request(limits.of("a"))
    one_request(limits.of("b"))

    with pytest.raises(RateLimited):
        one_request(limits.of("a"))


def test_headers_are_those_of_openai() -> None:
    config = RateLimitConfig(client_requests_per_minute=60, client_tokens_per_minute=6000)
    usage = RateLimits(config, Clock()).of("a")
    with usage.admitting():
        usage.note_tokens(50)

    assert limit_headers(usage) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "5950",
        "x-ratelimit-reset-tokens": "500ms",
    }
    assert limit_headers(RateLimits(RateLimitConfig(), Clock()).of("a")) == {}


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0, "0ms"), (0.9996, "1s"), (6.25, "6.25s"), (60, "1m0s"), (95.5, "1m35.5s")],
)
def test_durations_are_written_as_openai_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds) == written
