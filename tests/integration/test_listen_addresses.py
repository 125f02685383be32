"""Listening addresses of a cluster: loopback only, unless configured otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from baton.client import Client
from baton.cluster import LocalCluster
from tests.support.models import prompt_of

LISTENS = "0A"


def listening_hosts(pid: int) -> set[str]:
    """Return the hosts on which the process's TCP sockets listen."""
    mine = set(sockets_of(pid))
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        for row in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return {host_of(row[1]) for row in rows if row[3] == LISTENS and f"socket:[{row[9]}]" in mine}


def sockets_of(pid: int) -> Iterator[str]:
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            yield os.readlink(entry.path)


def host_of(written: str) -> str:
    """Parse an address of /proc/net/tcp: 32-bit words in the machine's byte order."""
    digits = written.partition(":")[0]
    words = [bytes.fromhex(digits[place : place + 8])[::-1] for place in range(0, len(digits), 8)]
    address = ip_address(b"".join(words))
    return str(getattr(address, "ipv4_mapped", None) or address)


def test_a_local_cluster_listens_on_loopback_only(cluster: LocalCluster, client: Client) -> None:
    answer = client.generate(prompt_of(40, seed=70))  # UCX is in use by then

    assert answer.finish is not None
    assert answer.finish.served.kv_bytes > 0
    hosts = {child.name: listening_hosts(child.process.pid) for child in cluster.children}
    assert all(hosts.values()), hosts
    assert all(ip_address(host).is_loopback for reported in hosts.values() for host in reported), (
        hosts
    )
