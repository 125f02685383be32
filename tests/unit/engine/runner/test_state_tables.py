"""State blocks of rows: a slot that is used again starts with nothing of the row before it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.ids import BlockId, RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow, StateBlocks
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.state.state_tables import NO_SNAPSHOTS, StateTables

FIRST, SECOND, SNAPSHOT = (BlockId(3),), (BlockId(5),), (BlockId(8),)


def row(*, snapshot: tuple[BlockId, ...] = ()) -> PlanRow:
    state = StateBlocks((FIRST, SECOND), snapshot)
    return PlanRow(RequestId("r"), (1,) * 20, 20, 10, ((),), SamplingParams(), 0, state=state)


@pytest.mark.parametrize("num_passes", [0, 1, 2])
@pytest.mark.parametrize("snapshot", [(), SNAPSHOT])
def test_a_reused_slot_starts_on_its_first_side(
    num_passes: int, snapshot: tuple[BlockId, ...]
) -> None:
    tables = StateTables(max_num_seqs=1, num_blocks=1)
    tables.start(0, row(snapshot=snapshot))
    for _ in range(num_passes):
        tables.advance(0)

    tables.start(0, row())
    run = TokenRun(row(), slot=0, num_tokens=3, end=13, tokens=np.zeros(20, np.int64))
    layout = tables.layout([run], NO_SNAPSHOTS)

    assert layout.reads.tolist() == [list(FIRST)]
    assert layout.writes.tolist() == [list(SECOND)]
