"""Service for SMG gateways, if the options want it."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec

from baton.core.errors import InvalidConfig
from baton.router.doors.smg.model_facts import read_model_facts
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.rpc.server import Service


def smg_services(
    pipeline: Pipeline, scopes: RequestScopes, orders: NodeOrders, model: str, *, is_on: bool
) -> tuple[Service, ...]:
    """Return the service; nothing unless it is on. `model` is a folder or a name of the hub.

    Raises InvalidConfig if the package of its messages is not installed.
    """
    if not is_on:
        return ()
    if find_spec("smg_grpc_proto") is None:
        raise InvalidConfig("--smg needs the package smg-grpc-proto: pip install 'baton[smg]'")
    # Imported late: their messages are in a package of an extra.
    from smg_grpc_proto.generated import vllm_engine_pb2_grpc

    from baton.router.doors.smg.servicer import SERVICE, SmgServicer

    servicer = SmgServicer(pipeline, scopes, orders, read_model_facts(model))
    add = partial(vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer)
    return (Service(SERVICE, add),)
