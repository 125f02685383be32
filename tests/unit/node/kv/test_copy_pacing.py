from __future__ import annotations

from baton.core.ids import RequestId
from baton.kv_transfer.tiers.copy_pace import CopyPace
from baton.node.kv.tiers import CopyPacing
from tests.support.engines import an_engine, an_engine_request


def test_copies_are_limited_while_requests_decode() -> None:
    pace = CopyPace()
    engine = an_engine(observers=[CopyPacing(pace)])

    def is_limited_in_a_step() -> bool:
        engine.step()
        return pace.is_limited

    engine.scheduler.add(an_engine_request("a", max_tokens=3))
    assert not is_limited_in_a_step()  # computes the prompt
    assert is_limited_in_a_step()

    engine.scheduler.add(an_engine_request("b", max_tokens=3))
    assert is_limited_in_a_step()  # `a` decodes beside the prompt of `b`

    engine.scheduler.abort(RequestId("b"))
    assert not is_limited_in_a_step()
