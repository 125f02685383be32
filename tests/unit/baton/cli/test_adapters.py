"""Table of `baton adapters list`."""

from __future__ import annotations

import io

from rich.console import Console

from baton.cli.commands.adapters import table_of_adapters
from baton.client.node_status import AdapterStatus
from baton.core.ids import AdapterRef


def test_one_adapter_on_one_node_is_written_in_the_singular() -> None:
    for number, adapters, nodes in ((1, "1 adapter", "1 of 1 node"), (2, "2 adapters", "2 nodes")):
        screen = Console(width=100, record=True, file=io.StringIO())
        status = AdapterStatus(AdapterRef("sql", "a" * 40, "sql"), "demo", number, number, 1000)

        screen.print(table_of_adapters([status] * number))

        words = screen.export_text().split()
        assert " ".join(words[:2]) == adapters
        assert nodes in " ".join(words)
