"""Prefill node: computes prompts and pushes their KV to decode nodes."""

from __future__ import annotations

from functools import partial

from baton.core.ids import HandoffId
from baton.node.call_server import CallServer
from baton.node.kv.worker import NO_NODE_DECORATORS, Around
from baton.node.options import NodeOptions
from baton.node.run import Role, run
from baton.node.smg.service import smg_services
from baton.node.wiring import NodeComponents
from baton.prefill_node.servicer import PendingSends, PrefillServicer
from baton.rpc.node_info import NodeRole
from baton.rpc.server import Service
from baton.v1 import node_pb2_grpc


def build_services(node: NodeComponents) -> tuple[Service, ...]:
    def withdraw(handoff_id: HandoffId) -> None:
        reason = "the call was cancelled"
        node.engine.post(lambda: node.scheduler.withdraw_completed(handoff_id, reason))

    sends = PendingSends(withdraw)
    node.ledger.on_sent = sends.mark_ended
    calls = CallServer(node.state, node.ledger, node.tracing, sends.expect_send)
    prefill = PrefillServicer(calls)
    add_prefill = partial(node_pb2_grpc.add_PrefillServiceServicer_to_server, prefill)
    service = Service("baton.v1.PrefillService", add_prefill)
    return service, *smg_services(node, calls)


# No speculation: requests end with their first token.
PREFILL = Role(NodeRole.PREFILL, build_services, speculates=False)


def main(options: NodeOptions, around: Around = NO_NODE_DECORATORS) -> None:
    """Serve until SIGTERM or a Drain call. Raise a named error if the options cannot work."""
    run(PREFILL, options, around)


if __name__ == "__main__":
    raise SystemExit("use `baton serve prefill`, which has the options")
