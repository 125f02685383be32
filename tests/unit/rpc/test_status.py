"""Mapping of named errors to gRPC statuses."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode

from baton.core.errors import ContextLengthExceeded, InvalidConfig, InvalidRequest, ModelError
from baton.rpc import errors as service_errors
from baton.rpc.status import (
    CODE_AND_REASON,
    code_and_reason,
    invalid_request_in,
    remote_error_in,
    status_of,
)

STOP_THE_PROCESS = {
    InvalidConfig,
    ModelError,
    service_errors.AddressInUse,
}


def test_the_status_carries_code_message_and_reason() -> None:
    status = status_of(InvalidRequest("top_p is 2"), {"request_id": "a"})

    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (status.code, status.message) == (StatusCode.INVALID_ARGUMENT.value[0], "top_p is 2")
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "baton")
    assert dict(info.metadata) == {"request_id": "a"}


@pytest.mark.parametrize(
    "refusal",
    [
        InvalidRequest("top_p is 2", "top_p"),
        InvalidRequest("no field of its own"),
        ContextLengthExceeded.of_prompt(9, 8, "messages"),
    ],
)
def test_a_refusal_keeps_its_kind_and_its_field_between_processes(refusal: InvalidRequest) -> None:
    received = invalid_request_in(remote_error_in(status_of(refusal)))

    assert type(received) is type(refusal)
    assert (str(received), received.field) == (str(refusal), refusal.field)


def test_every_service_error_of_a_call_is_in_the_table() -> None:
    kinds = {
        kind
        for kind in vars(service_errors).values()
        if isinstance(kind, type) and issubclass(kind, service_errors.ServiceError)
    }

    unlisted = kinds - set(CODE_AND_REASON) - STOP_THE_PROCESS

    assert unlisted == {service_errors.ServiceError}


def test_reasons_are_unique() -> None:
    reasons = [reason for _, reason in CODE_AND_REASON.values()]

    assert len(set(reasons)) == len(reasons)


def test_a_subclass_of_a_named_error_has_its_status() -> None:
    class TooLong(InvalidRequest):
        pass

    assert code_and_reason(TooLong("x")) == (StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


def test_a_full_queue_returns_a_retry_delay() -> None:
    status = status_of(service_errors.QueueFull("full", 1.5))

    retry = error_details_pb2.RetryInfo()
    assert status.code == StatusCode.RESOURCE_EXHAUSTED.value[0]
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1500
