"""Parser of UCX's log of selected transports, in the format of UCX 1.23."""

from __future__ import annotations

import pytest

from baton.kv_transfer.transports.ucx_log import SelectedTransport, find_write_transport

STAMP = "[1795258562.834488] [host:15005:1]   "


def a_log(*lines: str) -> str:
    return "".join(f"{STAMP}{line}\n" for line in lines)


def a_table(endpoint: str, operation: str, *rows: str) -> str:
    rule = "+--------+-------------+-----------------------------------+"
    head = "| Range  | Description |              Config               |"
    return a_log(rule, f"| {endpoint} |", f"| {operation} |", rule, head, rule, *rows, rule)


PEER = "b62e3dba71c70170dfc1e113 intra-node cfg#1                "
WRITE = "remote memory write by ucp_put* from host memory to host"
SELF = a_table("7e8d self cfg#0", WRITE, "| 0..inf | zero-copy   | self/memory |")
CMA = a_table(PEER, WRITE, "| 0..inf | zero-copy   | cma/memory                        |")
TCP = a_table(PEER, WRITE, "| 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |")


def test_the_transport_of_writes_to_another_process_is_found() -> None:
    assert find_write_transport(SELF + CMA, 32768) == SelectedTransport(
        "intra-node", "zero-copy", "cma/memory"
    )


def test_multiple_devices_are_reported_with_their_ucx_names() -> None:
    chosen = find_write_transport(TCP, 32768)

    assert chosen is not None
    assert chosen.transport == "52% on tcp/lo and 48% on tcp/eth0"
    assert chosen.transport_description == "TCP"


def test_the_last_selection_applies_and_other_operations_are_ignored() -> None:
    message = a_table(PEER, "active message by ucp_am_send* from host memory", "| 0 | short | x |")

    chosen = find_write_transport(TCP + CMA + message + SELF, 1)

    assert chosen is not None
    assert chosen.transport == "cma/memory"


@pytest.mark.parametrize(
    ("num_bytes", "transport"), [(0, "tcp/lo"), (8184, "tcp/lo"), (8185, "a"), (70_000, "b")]
)
def test_the_transport_is_the_one_selected_for_the_size(num_bytes: int, transport: str) -> None:
    rows = ("| 0..8184 | short | tcp/lo |", "| 8185..64K | copy | a |", "| 65537..inf | copy | b |")
    chosen = find_write_transport(a_table(PEER, WRITE, *rows), num_bytes)

    assert chosen is not None
    assert chosen.transport == transport


@pytest.mark.parametrize("log", ["", SELF, "hello\n", a_log("| cut", "off")])
def test_a_log_without_a_transport_yields_none(log: str) -> None:
    assert find_write_transport(log, 32768) is None
