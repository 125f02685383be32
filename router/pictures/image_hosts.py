"""Hosts from which images of URLs may be fetched. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import SECURITY, Option, check_options

PORTS = {"http": 80, "https": 443}
SUBDOMAINS = "*."
# A name or an IPv4 address, or an IPv6 address in brackets, and a port.
ENTRY = re.compile(r"((?:\*\.)?[a-z0-9_.-]+|\[[0-9a-f:.]+\])(?::(\d{1,5}))?", re.IGNORECASE)
NAT64 = IPv6Network("64:ff9b::/96")  # of IPv4 addresses, in networks without IPv4
IPV4_BYTES = 4


@dataclass(frozen=True, slots=True)
class AllowedHost:
    """Entry of a list of hosts."""

    name: str  # *.example.com: all names that end with .example.com
    port: int | None = None  # None: that of the URL's scheme
    may_be_private: bool = False

    def allows(self, scheme: str, host: str, port: int | None) -> bool:
        """Return whether an image may be fetched from there. `port` is None without one."""
        default = PORTS[scheme]
        if (port or default) != (self.port or default):
            return False
        if self.name.startswith(SUBDOMAINS):
            return host.endswith(self.name[1:])
        return host == self.name


def _parse(written: str, option: str, *, are_private: bool) -> tuple[AllowedHost, ...]:
    return tuple(
        _parse_entry(entry.strip(), option, is_private=are_private)
        for entry in written.split(",")
        if entry.strip()
    )


def _parse_entry(entry: str, option: str, *, is_private: bool) -> AllowedHost:
    found = ENTRY.fullmatch(entry)
    if found is None:
        raise InvalidConfig(
            f"{option}: {entry!r} is no host; give a name, *.NAME for its subdomains, or an "
            "address, each of which a :PORT may follow"
        )
    name, port = found.group(1).strip("[]").lower(), found.group(2)
    # An operator who writes an address means it, whatever network it is in.
    return AllowedHost(name, int(port) if port else None, is_private or is_address(name))


def parser_of(option: str, *, are_private: bool) -> Callable[[str], tuple[AllowedHost, ...]]:
    """Return a parser of a comma-separated list, which raises InvalidConfig."""
    return partial(_parse, option=option, are_private=are_private)


@dataclass(frozen=True, slots=True)
class ImageHosts:
    hosts: Annotated[
        tuple[AllowedHost, ...],
        Option(
            "Comma-separated hosts from which the router may fetch images of http and https URLs "
            "in messages: names, *.NAME for subdomains, or addresses; :PORT for other ports than "
            "80 and 443. Default: none.",
            SECURITY,
            name="image_hosts",
            default="",
            parse=parser_of("--image-hosts", are_private=False),
        ),
    ] = ()
    private_hosts: Annotated[
        tuple[AllowedHost, ...],
        Option(
            "Further hosts, as in --image-hosts, whose names may stand for private addresses, "
            "such as 10.0.0.0/8 or 127.0.0.1.",
            SECURITY,
            name="private_image_hosts",
            default="",
            parse=parser_of("private-image-hosts", are_private=True),
            is_setting=True,
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def allows_any(self) -> bool:
        return bool(self.hosts or self.private_hosts)

    def find(self, scheme: str, host: str, port: int | None) -> list[AllowedHost]:
        """Return the entries that allow a host."""
        entries = (*self.hosts, *self.private_hosts)
        return [entry for entry in entries if entry.allows(scheme, host, port)]


NO_IMAGE_HOSTS = ImageHosts()


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def usable_addresses(addresses: Sequence[str], entries: Iterable[AllowedHost]) -> list[str]:
    """Return the addresses of a host, which these entries allow, to which to connect."""
    if any(entry.may_be_private for entry in entries):
        return list(addresses)
    return list(filter(is_public, addresses))


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet.

    It is not if it is one of a private network, a host itself, a link, or a group, or if it stands
    for an IPv4 address that is.
    """
    ip = ip_address(address)
    embedded = _embedded(ip) if isinstance(ip, IPv6Address) else None
    ip = embedded or ip
    return ip.is_global and not ip.is_multicast


def _embedded(ip: IPv6Address) -> IPv4Address | None:
    if ip in NAT64:
        return IPv4Address(ip.packed[-IPV4_BYTES:])
    return ip.ipv4_mapped or ip.sixtofour
