"""Node membership under random events: discovery, loss, unreadiness and removal."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from baton.core.legs import LegKind
from baton.router.discovery.node_reports import Membership
from baton.router.discovery.sources import DnsName, ListFile, NodeSource
from baton.router.routing.node_table import NodeTable
from baton.rpc.node_info import NodeLoad
from tests.support.node_calls import a_card

ADDRESSES = [f"10.0.0.{number}:5" for number in range(4)]
SOURCES: list[NodeSource] = [DnsName("nodes", 5), ListFile("/nodes")]
addresses = st.sampled_from(ADDRESSES)


class Nodes(RuleBasedStateMachine):
    """Drives membership and table like the watches do, and compares them with a model."""

    def __init__(self) -> None:
        super().__init__()
        self.membership, self.table = Membership(), NodeTable()
        self.last_answer: dict[NodeSource, frozenset[str]] = {}
        self.joined: dict[str, str] = {}  # name by address, in the order they joined
        self.unready: set[str] = set()
        self.draining: set[str] = set()

    @rule(source=st.sampled_from(SOURCES), found=st.frozensets(addresses))
    def answer(self, source: NodeSource, found: frozenset[str]) -> None:
        self.membership.set_listed(source, found)
        self.last_answer[source] = found
        self.settle()

    @rule(address=addresses, name=st.sampled_from(["d1", "d2", "d3"]))
    def join(self, address: str, name: str) -> None:
        if address not in self.membership.watched:
            return  # no watch on this source
        self.table.join(address, a_card(LegKind.DECODE, name))
        self.membership.note_joined(address)
        self.joined.pop(address, None)
        self.joined[address] = name
        self.unready.discard(address)
        self.draining.discard(address)

    @rule(address=addresses, is_ready=st.booleans(), is_draining=st.booleans())
    def hear(self, address: str, is_ready: bool, is_draining: bool) -> None:
        if address not in self.joined:
            return
        self.table.note_ready(address, is_ready=is_ready)
        self.table.note_load(address, NodeLoad(is_draining=is_draining))
        (self.unready.discard if is_ready else self.unready.add)(address)
        (self.draining.add if is_draining else self.draining.discard)(address)

    @rule(address=addresses)
    def lose(self, address: str) -> None:
        if self.joined.pop(address, None) is None:
            return
        self.table.lose(address)
        self.membership.note_lost(address)
        self.unready.discard(address)
        self.draining.discard(address)
        self.settle()

    def settle(self) -> None:
        self.table.note_unlisted(self.membership.unlisted)

    @property
    def named(self) -> frozenset[str]:
        return frozenset().union(*self.last_answer.values())

    @invariant()
    def watched_nodes_are_those_named_or_present(self) -> None:
        assert self.membership.watched == self.named | self.joined.keys()

    @invariant()
    def present_nodes_are_known(self) -> None:
        assert {node.address for node in self.table.nodes} == self.joined.keys()

    @invariant()
    def new_requests_go_to_named_healthy_nodes(self) -> None:
        newest = {name: address for address, name in self.joined.items()}
        expected = (self.named & set(newest.values())) - self.unready - self.draining
        groups = self.table.groups()
        assert {node.address for group in groups for node in group.decodes} == expected
        assert [one.address for one in self.table.open_nodes(LegKind.DECODE)] == sorted(expected)


TestNodes = Nodes.TestCase
