"""Transitions of a request's status, allowed and forbidden."""

from __future__ import annotations

import itertools

import pytest

from baton.engine.errors import OutOfOrder
from baton.engine.scheduler.request import RequestStatus as Status
from tests.support.requests import make_request

ALLOWED = {
    (Status.WAITING_FOR_FSM, Status.WAITING),
    (Status.WAITING_FOR_FSM, Status.FINISHED),
    (Status.WAITING, Status.WAITING_FOR_REMOTE_KVS),
    (Status.WAITING, Status.RUNNING),
    (Status.WAITING, Status.FINISHED),
    (Status.WAITING_FOR_REMOTE_KVS, Status.READY),
    (Status.WAITING_FOR_REMOTE_KVS, Status.WAITING),
    (Status.WAITING_FOR_REMOTE_KVS, Status.FINISHED),
    (Status.READY, Status.RUNNING),
    (Status.READY, Status.PREEMPTED),
    (Status.READY, Status.FINISHED),
    (Status.RUNNING, Status.PREEMPTED),
    (Status.RUNNING, Status.FINISHED),
    (Status.PREEMPTED, Status.RUNNING),
    (Status.PREEMPTED, Status.FINISHED),
}


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Status, Status)))
def test_a_status_changes_only_by_the_transition_table(start: Status, end: Status) -> None:
    request = make_request()
    request.status = start

    if (start, end) in ALLOWED:
        request.move(end)
        assert request.status is end
    else:
        with pytest.raises(OutOfOrder, match=f"cannot go from {start}"):
            request.move(end)
