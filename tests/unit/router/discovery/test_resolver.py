"""Repeated resolution of node sources, with a scripted resolver."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.router.discovery.resolver import SourceFailed, find_addresses, follow
from baton.router.discovery.sources import DnsName, FixedNode, ListFile, NodeSource

PATIENCE_S = 30
NAME = DnsName("nodes", 5)
ONE, TWO = frozenset({"10.0.0.1:5"}), frozenset({"10.0.0.1:5", "10.0.0.2:5"})


class Resolver:
    """Resolver that returns the given answers in order and then blocks."""

    def __init__(self, *answers: frozenset[str] | None) -> None:
        self._answers = list(answers)
        self.is_spent = asyncio.Event()

    async def find(self, source: NodeSource) -> frozenset[str]:
        if not self._answers:
            self.is_spent.set()
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if answer is None:
            raise SourceFailed("no name server answers")
        return answer


async def reported_changes(*answers: frozenset[str] | None) -> list[frozenset[str]]:
    resolver, reported = Resolver(*answers), []

    async def note(source: NodeSource, found: frozenset[str]) -> None:
        assert source == NAME
        reported.append(found)

    following = asyncio.ensure_future(follow(NAME, resolver.find, 0.0, note))
    await resolver.is_spent.wait()
    following.cancel()
    return reported


@pytest.mark.parametrize(
    ("answers", "reported"),
    [
        ((ONE, TWO, ONE), [ONE, TWO, ONE]),
        ((ONE, ONE, ONE), [ONE]),
        ((None, None, ONE), [ONE]),
        ((TWO, None, None, TWO), [TWO]),
        ((TWO, None, ONE), [TWO, ONE]),
        ((ONE, frozenset(), ONE), [ONE, frozenset(), ONE]),
    ],
)
def test_changes_are_reported_and_failures_are_not(
    answers: tuple[frozenset[str] | None, ...], reported: list[frozenset[str]]
) -> None:
    assert asyncio.run(asyncio.wait_for(reported_changes(*answers), PATIENCE_S)) == reported


def test_an_empty_list_is_read_again_soon() -> None:
    empty, reported = frozenset[str](), asyncio.Event()
    lists = Resolver(empty, ONE)

    async def note(_: NodeSource, found: frozenset[str]) -> None:
        if found:
            reported.set()

    async def follow_until_reported() -> None:
        following = asyncio.ensure_future(follow(ListFile("list"), lists.find, 3600.0, note))
        await asyncio.wait_for(reported.wait(), PATIENCE_S)
        following.cancel()

    asyncio.run(follow_until_reported())


def test_a_failure_is_logged_once_until_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(asyncio.wait_for(reported_changes(None, None, ONE, None), PATIENCE_S))

    kept = [record for record in caplog.records if "are kept" in record.message]
    assert len(kept) == 2


def find(source: NodeSource) -> frozenset[str]:
    return asyncio.run(asyncio.wait_for(find_addresses(source), PATIENCE_S))


def test_the_system_resolver_returns_every_address_with_the_port() -> None:
    assert "127.0.0.1:5" in find(DnsName("localhost", 5))
    assert find(DnsName("127.0.0.1", 5)) == {"127.0.0.1:5"}
    assert find(DnsName("::1", 5)) == {"[::1]:5"}
    assert find(FixedNode("a:1")) == {"a:1"}


@pytest.mark.parametrize("host", ["a" * 70, "a..b"])
def test_an_unresolvable_name_is_named(host: str) -> None:
    with pytest.raises(SourceFailed) as failure:
        find(DnsName(host, 5))

    assert host in str(failure.value)


def test_a_list_file_is_read_and_its_errors_are_named(tmp_path: Path) -> None:
    listed = tmp_path / "nodes"
    source = ListFile(str(listed))

    with pytest.raises(SourceFailed, match="nodes"):
        find(source)
    listed.write_text("10.0.0.1:5\n", encoding="utf-8")
    assert find(source) == ONE
    listed.write_text("10.0.0.1\n", encoding="utf-8")
    with pytest.raises(SourceFailed, match=r"'10\.0\.0\.1'"):
        find(source)
