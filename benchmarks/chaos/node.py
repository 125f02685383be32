"""`python -m benchmarks.chaos.node FOLDER prefill|decode|encode …`: a node with KV transfer faults.

It is `baton serve` with fault-injecting wrappers around KV link and transport.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from baton.cli.commands.serve import node_command
from baton.cli.program import prepare

if TYPE_CHECKING:
    from baton.kv_transfer.config import KvWorkerConfig
    from baton.node.options import NodeOptions

# Real links do not lose single messages, so the default timeouts are long. Here they are short.
GIVE_UP_S, FENCE_AGE_S = 4.0, 3.0
MAX_COMM = 15  # characters of a thread's name in /proc


def run(folder: Path, role: str, options: NodeOptions) -> None:
    from baton.core.legs import LegKind
    from baton.node.kv.worker import Around
    from baton.node.run import run as serve
    from benchmarks.chaos.faulty_transport import FaultSwitch, FaultyLink, FaultyTransport

    fault_switch = FaultSwitch(folder / options.node_id)
    around = Around(
        lambda link: FaultyLink(link, fault_switch),
        lambda transport, region: FaultyTransport(transport, region, fault_switch),
    )
    options = replace(options, kv_worker=_with_short_timeouts(options.kv_worker))
    serve(LegKind(role), options, around)


def _with_short_timeouts(config: KvWorkerConfig) -> KvWorkerConfig:
    receiver = replace(config.receiver, give_up_s=GIVE_UP_S, fence_age_s=FENCE_AGE_S)
    return replace(config, receiver=receiver)


def _show_thread_name(_frame: FrameType, _event: str, _argument: object) -> None:
    """Give a new thread its Python name in /proc, where the benchmark reads its CPU time."""
    sys.setprofile(None)
    comm = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    comm.write_text(threading.current_thread().name[:MAX_COMM])


def main() -> None:
    threading.setprofile(_show_thread_name)
    folder = Path(sys.argv.pop(1))
    prepare()
    app = typer.Typer(pretty_exceptions_enable=False)
    for role in ("prefill", "decode", "encode"):
        app.command(role)(node_command(role, partial(run, folder, role)))
    app()


if __name__ == "__main__":
    main()
