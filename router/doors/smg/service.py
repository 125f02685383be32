"""SMG's gRPC service, if the options want it, and the facts about a model that it reports."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

from baton.checkpoint.hub import model_root, open_checkpoint
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import InvalidConfig
from baton.core.sampling import SamplingDefaults
from baton.router.orders.node_orders import NodeOrders
from baton.router.pipeline import Pipeline
from baton.router.request_scope import RequestScopes
from baton.rpc.server import Service


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts from the files of a model. The defaults are those of a process without the files."""

    path: str = ""
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    bos_token_id: int = 0


def read_model_facts(model: str) -> ModelFacts:
    """Read the facts of a folder or a name of the hub; empty: no files. Raises ModelError."""
    if not model:
        return ModelFacts()
    checkpoint = open_checkpoint(model)
    config = checkpoint.read_config()
    model_type, architectures = config.get("model_type"), config.get("architectures")
    return ModelFacts(
        path=model_root(model),
        model_type=model_type if isinstance(model_type, str) else "",
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        eos_token_ids=checkpoint.read_generation_defaults().eos_token_ids,
        pad_token_id=_token_id(config, "pad_token_id"),
        bos_token_id=_token_id(config, "bos_token_id"),
    )


def sampling_defaults_json(defaults: SamplingDefaults) -> str:
    """Return the model's defaults, which the gateway applies to requests; empty without any."""
    return json.dumps(defaults.given) if defaults.given else ""


def _token_id(config: JsonFields, name: str) -> int:
    found = config.get(name)
    return found if type(found) is int and found >= 0 else 0


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
