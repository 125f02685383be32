"""Server reflection, as v1 for newer clients and as v1alpha for older ones."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.rpc import error_details_pb2
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1, V1_FILE = "grpc.reflection.v1", "grpc/reflection/v1/reflection.proto"
V1ALPHA = "grpc.reflection.v1alpha"
V1_SERVICE = f"{V1}.ServerReflection"
# Error details. No service's file imports this one, so it must be added to the pool explicitly.
ERROR_DETAILS_FILE = error_details_pb2.DESCRIPTOR.name


def enable_reflection(service_names: Sequence[str], server: aio.Server) -> None:
    """Enable reflection for these services and itself. Both versions have the same messages."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer(
        (*service_names, V1_SERVICE, reflection.SERVICE_NAME)
    )
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = grpc.method_handlers_generic_handler(V1_SERVICE, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handlers,))


def _describe_v1() -> None:
    """Add v1's file, which grpcio-reflection lacks, to the default descriptor pool."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(V1_FILE)
        return
    except KeyError:
        described = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    described.name, described.package = V1_FILE, V1
    for message in described.message_type:
        for field in (field for field in message.field if field.type_name):
            field.type_name = field.type_name.replace(f".{V1ALPHA}.", f".{V1}.")
    for service in described.service:
        for call in service.method:
            call.input_type = call.input_type.replace(f".{V1ALPHA}.", f".{V1}.")
            call.output_type = call.output_type.replace(f".{V1ALPHA}.", f".{V1}.")
    pool.AddSerializedFile(described.SerializeToString())
