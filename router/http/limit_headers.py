"""Headers that report rate limits to clients, as OpenAI names them."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from baton.router.admission.rate_limits import ClientUsage

MINUTE_MS = 60_000


@contextmanager
def admitting(usage: ClientUsage, headers: MutableMapping[str, str]) -> Iterator[None]:
    """Count a request until the end of the block, and add the client's limits to its headers.

    Raises RateLimited.
    """
    try:
        with usage.admitting():
            headers.update(limit_headers(usage))
            yield
    except BaseException:
        headers.update(limit_headers(usage))
        raise


def limit_headers(usage: ClientUsage) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, allowance in usage.allowances().items():
        found[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
        found[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
        found[f"x-ratelimit-reset-{name}"] = duration(allowance.reset_s)
    return found


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: `120ms`, `6.5s`, `1m30s`."""
    ms = round(seconds * 1000)
    if ms < 1000:
        return f"{ms}ms"
    minutes, rest_ms = divmod(ms, MINUTE_MS)
    rest = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
