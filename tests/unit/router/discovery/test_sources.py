"""Syntax of node sources and list files."""

from __future__ import annotations

import pytest

from baton.core.errors import InvalidConfig
from baton.router.discovery.sources import (
    DnsName,
    FixedNode,
    ListFile,
    check_single_role,
    parse_list,
    parse_sources,
)


def test_addresses_names_and_lists_can_be_combined() -> None:
    written = "10.0.0.1:50061, [::1]:7,dns:///prefill:50061,dns:other:1,file:///run/nodes"

    assert parse_sources(written) == (
        FixedNode("10.0.0.1:50061"),
        FixedNode("[::1]:7"),
        DnsName("prefill", 50061),
        DnsName("other", 1),
        ListFile("/run/nodes"),
    )
    assert parse_sources("") == ()


@pytest.mark.parametrize(
    "written",
    [
        "node",
        "node:",
        ":50061",
        "node:0",
        "node:65536",
        "node:http",
        "node:٣",
        "http://node:1",
        "a b:1",
        "::1:50061",
        "dns:///name",
        "dns:///",
        "dns://8.8.8.8/name:1",
        "file:nodes",
        "file://nodes",
    ],
)
def test_invalid_sources_are_refused_with_their_text(written: str) -> None:
    with pytest.raises(InvalidConfig) as refusal:
        parse_sources(f"10.0.0.1:50061,{written}")

    assert repr(written) in str(refusal.value)


def test_a_source_is_shown_as_written() -> None:
    for written in ("a:1", "dns:///a:1", "file:///a"):
        assert [str(source) for source in parse_sources(written)] == [written]


def test_a_list_has_an_address_on_each_line_and_comments() -> None:
    text = "# nodes\n10.0.0.1:5\n\n  10.0.0.2:5  # the new one\n10.0.0.1:5\n"

    assert parse_list(text) == {"10.0.0.1:5", "10.0.0.2:5"}
    with pytest.raises(InvalidConfig, match=r"'10\.0\.0\.3'"):
        parse_list("10.0.0.1:5\n10.0.0.3\n")


def test_one_source_cannot_have_both_roles() -> None:
    prefills, decodes = parse_sources("a:1,dns:///b:1"), parse_sources("c:1,dns:///b:1")

    with pytest.raises(InvalidConfig, match="dns:///b:1"):
        check_single_role(prefill=prefills, decode=decodes)
    check_single_role(prefill=prefills, decode=parse_sources("c:1"))
