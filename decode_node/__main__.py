"""Decode node: receives KV from prefill nodes and decodes."""

from __future__ import annotations

from functools import partial

from baton.decode_node.servicer import DecodeServicer
from baton.node.call_server import CallServer
from baton.node.kv.peer_warmup import PeerWarmup, link_up, read_role
from baton.node.kv.worker import NO_NODE_DECORATORS, Around
from baton.node.options import NodeOptions
from baton.node.run import Role, run
from baton.node.smg.service import smg_services
from baton.node.wiring import NodeComponents
from baton.rpc.node_info import NodeRole
from baton.rpc.server import Service
from baton.v1 import node_pb2_grpc


def build_services(node: NodeComponents) -> tuple[Service, ...]:
    warmup = PeerWarmup(
        partial(read_role, node.options.tls), partial(link_up, node.engine, node.worker)
    )
    calls = CallServer(node.state, node.ledger, node.tracing)
    decode = DecodeServicer(calls, node.state, warmup.connect)
    add_decode = partial(node_pb2_grpc.add_DecodeServiceServicer_to_server, decode)
    service = Service("baton.v1.DecodeService", add_decode)
    return service, *smg_services(node, calls)


DECODE = Role(NodeRole.DECODE, build_services, speculates=True)


def main(options: NodeOptions, around: Around = NO_NODE_DECORATORS) -> None:
    """Serve until SIGTERM or a Drain call. Raise a named error if the options cannot work."""
    run(DECODE, options, around)


if __name__ == "__main__":
    raise SystemExit("use `baton serve decode`, which has the options")
