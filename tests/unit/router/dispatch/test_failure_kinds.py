"""Failure kinds of a call: the node reported a failure, vanished, or was never reachable."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from baton.router.dispatch.node_calls import failure_kind
from baton.rpc.errors import FailureKind
from baton.rpc.status import RemoteError


@pytest.mark.parametrize(
    ("remote", "kind"),
    [
        (RemoteError(StatusCode.UNAVAILABLE, "x", "ENGINE_STOPPED"), FailureKind.ENGINE_FAILED),
        (RemoteError(StatusCode.UNAVAILABLE, "x", "ENGINE_KILLED"), FailureKind.VANISHED),
        (RemoteError(StatusCode.UNAVAILABLE, "x", "ENGINE_GONE"), FailureKind.OTHER),
        (RemoteError(StatusCode.INTERNAL, "x", "PASS_FAILED"), FailureKind.PASS_FAILED),
        (RemoteError(StatusCode.RESOURCE_EXHAUSTED, "x", "QUEUE_FULL"), FailureKind.OTHER),
        (RemoteError(StatusCode.UNAVAILABLE, "Socket closed"), FailureKind.VANISHED),
        (
            RemoteError(StatusCode.UNAVAILABLE, "recvmsg:Connection reset by peer (104)"),
            FailureKind.VANISHED,
        ),
        (
            RemoteError(StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error"),
            FailureKind.OTHER,
        ),
        (RemoteError(StatusCode.UNKNOWN, "ZeroDivisionError: a bug"), FailureKind.OTHER),
    ],
    ids=lambda one: getattr(one, "message", None) or str(one),
)
def test_remote_errors_have_failure_kinds(remote: RemoteError, kind: FailureKind) -> None:
    assert failure_kind(remote) is kind
