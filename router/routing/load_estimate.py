"""Load of a node, from its reports and from this router's own requests. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.rpc.node_info import NodeLoad


@dataclass(slots=True)
class LoadEstimate:
    """Load of a node, as reported by it and as known from this router's own requests."""

    reported: NodeLoad = NodeLoad()
    num_sent: int = 0  # requests of this router in flight there
    num_sent_tokens: int = 0  # prompt tokens of these that the node has yet to compute
    num_ended: int = 0  # requests of this router that ended since the last report
    last_use: int = 0  # NodeTable's sequence number of the last request sent there
    sent_adapters: Counter[str] = field(default_factory=Counter)  # ids, of those in flight

    @property
    def num_reported(self) -> int:
        """Requests on the node by its last report, less those of this router that ended since."""
        return max(0, self.reported.num_running + self.reported.num_waiting - self.num_ended)

    def note_report(self, reported: NodeLoad) -> None:
        self.reported = reported
        self.num_ended = 0

    def note_sent(self, adapter: str) -> None:
        """Count a request of this router, with the id of its adapter."""
        self.num_sent += 1
        if adapter:
            self.sent_adapters[adapter] += 1

    def note_request_ended(self, adapter: str) -> None:
        """Count a request that ended on the node before the node has reported it."""
        self.num_sent -= 1
        self.num_ended += 1
        if adapter:
            self.sent_adapters[adapter] -= 1
            if not self.sent_adapters[adapter]:
                del self.sent_adapters[adapter]

    @property
    def num_requests(self) -> int:
        """Requests on the node: own ones at once, those of other routers when reported."""
        return max(self.num_reported, self.num_sent)
