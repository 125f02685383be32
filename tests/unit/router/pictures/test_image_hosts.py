"""Hosts from which images may be fetched, and addresses that are public."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.router.pictures.image_hosts import ImageHosts, is_public, parser_of, usable_addresses

parse = parser_of("--image-hosts", are_private=False)


@pytest.mark.parametrize(
    ("listed", "scheme", "host", "port", "is_allowed"),
    [
        ("a.test", "https", "a.test", None, True),
        ("a.test", "http", "a.test", 80, True),
        ("a.test", "https", "a.test", 80, False),
        ("a.test", "https", "a.test", 8443, False),
        ("a.test:8443", "https", "a.test", 8443, True),
        ("a.test:8443", "https", "a.test", None, False),
        ("a.test", "https", "b.a.test", None, False),
        ("a.test", "https", "a.test.evil", None, False),
        ("*.a.test", "https", "b.a.test", None, True),
        ("*.a.test", "https", "c.b.a.test", None, True),
        ("*.a.test", "https", "a.test", None, False),
        ("*.a.test", "https", "nota.test", None, False),
        ("B.test , A.test", "https", "a.test", None, True),
        ("[2001:db8::1]:8080", "http", "2001:db8::1", 8080, True),
        ("", "https", "a.test", None, False),
    ],
)
def test_a_host_is_allowed_by_name_and_port(
    listed: str, scheme: str, host: str, port: int | None, *, is_allowed: bool
) -> None:
    assert bool(ImageHosts(parse(listed)).find(scheme, host, port)) is is_allowed


@pytest.mark.parametrize("listed", ["https://a.test", "a.test/x", "*", "a test", "a.test:x", "::1"])
def test_what_is_no_host_is_refused(listed: str) -> None:
    with pytest.raises(InvalidConfig, match=r"--image-hosts: .* is no host"):
        parse(listed)


def test_an_address_that_is_named_literally_may_be_private() -> None:
    entries = parse("10.0.0.1,[::1],a.test")

    assert [entry.may_be_private for entry in entries] == [True, True, False]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),
        *(
            (address, False)
            for address in (
                *("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
                *("100.64.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "192.0.2.1"),
                *("::", "::1", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1"),
                *("2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
            )
        ),
    ],
)
def test_only_addresses_of_the_internet_are_public(address: str, *, expected: bool) -> None:
    assert is_public(address) is expected


def test_of_a_host_with_several_addresses_the_public_ones_are_used() -> None:
    addresses = ["10.0.0.1", "93.184.216.34", "::1"]

    assert usable_addresses(addresses, parse("a.test")) == ["93.184.216.34"]
    assert usable_addresses(addresses, parse("a.test,10.0.0.1")) == addresses
