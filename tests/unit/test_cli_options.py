"""What people write on the command line."""

from __future__ import annotations

import pytest

from baton.cli.serve import parse_cpus
from engine.errors import InvalidConfig
from serving.server import parse_announcement


def test_cpus_are_written_as_numbers_and_ranges() -> None:
    assert parse_cpus("0-3,6") == (0, 1, 2, 3, 6)
    assert parse_cpus("") == ()


@pytest.mark.parametrize("written", ["a", "1-", "-1", "1-b", "1;2"])
def test_other_ways_to_write_cpus_are_refused(written: str) -> None:
    with pytest.raises(InvalidConfig, match="--cpus"):
        parse_cpus(written)


def test_only_the_line_that_announces_an_address_is_taken_for_one() -> None:
    assert parse_announcement("baton ready: decode 127.0.0.1:5\n") == ("decode", "127.0.0.1:5")
    assert parse_announcement("INFO ready\n") is None
