"""Direct calls to nodes, bypassing the router, and waits for their state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import grpc

from baton.cluster import Child, LocalCluster
from baton.core.legs import LegKind, Legs
from baton.core.pause_mode import PauseMode
from baton.engine.kv_cache.block_hashes import BlockHash
from baton.rpc.adapters import NodeAdapters
from baton.rpc.cached_prefixes import unpack_names
from baton.rpc.messages.calls import KIND, PAUSE_MODE
from baton.rpc.node_info import (
    CARD,
    GET_NODE,
    LOAD,
    NodeCard,
    NodeLoad,
    adapters_from,
    changes_from,
)
from baton.rpc.security.token import authorization
from baton.v1 import cluster_pb2, cluster_pb2_grpc, node_pb2, node_pb2_grpc


def card_at(address: str) -> NodeCard:
    with grpc.insecure_channel(address) as channel:
        return CARD.from_message(node_pb2_grpc.NodeServiceStub(channel).GetNode(GET_NODE))


def drain(address: str, operator_token: str = "") -> None:
    shown = (authorization(operator_token),) if operator_token else ()
    with grpc.insecure_channel(address) as channel:
        node_pb2_grpc.NodeServiceStub(channel).Drain(node_pb2.DrainRequest(), metadata=shown)


def set_legs(address: str, wanted: Sequence[LegKind], drain_timeout_s: float) -> Legs:
    """Have the node offer other legs, and return all that it then offers."""
    with grpc.insecure_channel(address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        kinds = [KIND.to_message(kind) for kind in wanted]
        request = node_pb2.SetLegsRequest(legs=kinds, drain_timeout_s=drain_timeout_s)
        return tuple(KIND.from_message(kind) for kind in stub.SetLegs(request).legs)


def set_pause(address: str, mode: PauseMode | None) -> None:
    """Pause the node, and return when it computes nothing, or resume it."""
    with grpc.insecure_channel(address) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        stub.SetPause(node_pb2.SetPauseRequest(mode=PAUSE_MODE.to_message(mode)))


def legs_at(address: str) -> Legs:
    return card_at(address).legs


def load_at(address: str) -> NodeLoad:
    with grpc.insecure_channel(address) as channel:
        watch = node_pb2_grpc.NodeServiceStub(channel).Watch(node_pb2.WatchRequest())
        load = LOAD.from_message(next(watch))
        watch.cancel()
    return load


def prefixes_at(address: str) -> frozenset[BlockHash]:
    with grpc.insecure_channel(address) as channel:
        watch = node_pb2_grpc.NodeServiceStub(channel).Watch(node_pb2.WatchRequest())
        changes = changes_from(next(watch))
        watch.cancel()
    assert changes is not None
    assert changes.is_snapshot
    return unpack_names(changes.stored)


def adapters_at(address: str) -> NodeAdapters:
    with grpc.insecure_channel(address) as channel:
        watch = node_pb2_grpc.NodeServiceStub(channel).Watch(node_pb2.WatchRequest())
        adapters = adapters_from(next(watch))
        watch.cancel()
    assert adapters is not None
    return adapters


def await_reported(router_address: str, node_address: str) -> None:
    """Wait until the router has received the current load and prefixes of the node."""
    wanted = load_at(node_address).totals.num_sampled_tokens
    with grpc.insecure_channel(router_address) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        watch = stub.WatchNodes(cluster_pb2.WatchNodesRequest(interval_s=0.1), timeout=30)
        node = None
        with suppress(grpc.RpcError):
            for message in watch:
                node = next((one for one in message.nodes if one.address == node_address), None)
                is_ready = node is not None and node.state == cluster_pb2.NODE_STATE_READY
                if node is not None and is_ready and node.totals.num_sampled_tokens >= wanted:
                    watch.cancel()
                    return
    raise AssertionError(f"{wanted} sampled tokens were not reported within 30 s. Last: {node}")


def is_busy(load: NodeLoad) -> bool:
    return load.num_running + load.num_waiting > 0


def await_load(address: str, is_wanted: Callable[[NodeLoad], bool], timeout_s: float = 30) -> None:
    """Wait until the node reports a load that satisfies `is_wanted`."""
    load = None
    with grpc.insecure_channel(address) as channel:
        watch = node_pb2_grpc.NodeServiceStub(channel).Watch(
            node_pb2.WatchRequest(), timeout=timeout_s
        )
        with suppress(grpc.RpcError):
            for message in watch:
                load = LOAD.from_message(message)
                if is_wanted(load):
                    watch.cancel()
                    return
    raise AssertionError(f"not within {timeout_s:g} s. Last load of {address}: {load}")


def await_all_free(address: str) -> None:
    """Wait until the node has no request and all its blocks are free."""
    num_blocks = card_at(address).num_blocks
    await_load(address, lambda load: not is_busy(load) and load.num_free_blocks == num_blocks)


def kill_the_writer(cluster: LocalCluster) -> Child:
    """Kill and return the decode node that serves all of the router's requests."""
    address = writer_at(cluster.address)
    [writer] = [one for one in cluster.decodes if one.address == address]
    writer.process.kill()
    writer.process.wait()
    return writer


def writer_at(router_address: str) -> str:
    """Return the address of the decode node that serves all of the router's requests.

    Raises `AssertionError` when there is none within 30 s.
    """
    num_sent: dict[str, int] = {}
    with grpc.insecure_channel(router_address) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        watch = stub.WatchNodes(cluster_pb2.WatchNodesRequest(interval_s=0.1), timeout=30)
        with suppress(grpc.RpcError):
            for message in watch:
                decodes = [one for one in message.nodes if node_pb2.LEG_KIND_DECODE in one.legs]
                num_sent = {one.address: one.num_sent for one in decodes}
                writers = [address for address, number in num_sent.items() if number]
                if len(writers) == 1:
                    watch.cancel()
                    return writers[0]
    raise AssertionError(f"not one decode node serves requests: {num_sent}")
