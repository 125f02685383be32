"""Load of an attempt on its nodes, known to routing before the nodes report it. Pure."""

from __future__ import annotations

from baton.router.routing.node_table import NodeTable
from baton.router.routing.policy import Route


class Assignment:
    """Load and expected prefixes of one attempt."""

    def __init__(self, table: NodeTable, route: Route, adapter: str = "") -> None:
        """`adapter` is the id of that of the request; empty: none."""
        self._table = table
        self._route = route
        self._adapter = adapter
        self._last_load = table.node_load(route.last.node)
        self._prompt_load = table.node_load(route.first.node)
        self._addresses = [leg.node.address for leg in route.legs]
        self._is_prompt_done = False
        self._last_load.note_sent(adapter)
        self._prompt_load.num_sent_tokens += route.num_missing_tokens
        if route.is_split:
            self._prompt_load.note_sent(adapter)
        table.note_use(self._last_load, self._prompt_load)
        for address in self._addresses:
            table.prefixes.expect(address, route.block_names)

    def note_prompt_done(self) -> None:
        """Remove the prompt from the load once its KV is computed."""
        if self._is_prompt_done:
            return
        self._is_prompt_done = True
        self._prompt_load.num_sent_tokens -= self._route.num_missing_tokens
        if self._route.is_split:
            self._prompt_load.note_request_ended(self._adapter)

    def close(self) -> None:
        """Remove the attempt from the load. Call once.

        The prefix of a prompt that was not computed is no longer expected.
        """
        if not self._is_prompt_done:
            for address in self._addresses:
                self._table.prefixes.cancel_expected(address, self._route.block_names)
        self.note_prompt_done()
        self._last_load.note_request_ended(self._adapter)
