"""First steps of a runner at start, on a batch that checks the slots of each row."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.plan import Pending, Plan, RunResult
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.device.warm_up import warm_up


class BatchOnly:
    """Runner that samples token 0, and notes how many rows each pass has."""

    def __init__(self, batch: PersistentBatch, num_blocks: int) -> None:
        self.num_rows: list[int] = []
        self._batch = batch
        self._num_blocks = num_blocks
        self._result = RunResult()

    def launch(self, plan: Plan) -> Pending:
        for row in plan.started:
            assert all(block < self._num_blocks for table in row.block_tables for block in table)
        self._batch.apply(plan)
        self._result = RunResult({key: [0] for key in plan.num_scheduled_tokens})
        if plan.num_scheduled_tokens:
            step = self._batch.step(plan.num_scheduled_tokens)
            self.num_rows.append(len(step.sampled))
            self._batch.advance(step)
        return self

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        for request_id, token_ids in self._result.token_ids.items():
            self._batch.append(request_id, token_ids)
        return self._result


@given(st.integers(1, 40), st.sampled_from([1, 4, 16, 32]), st.integers(1, 3), st.integers(1, 50))
def test_first_steps_fit_any_limits(
    num_blocks: int, block_size: int, max_num_seqs: int, max_model_len: int
) -> None:
    batch = PersistentBatch(max_num_seqs, max_model_len, block_size)
    runner = BatchOnly(batch, num_blocks)

    warm_up(runner, num_blocks, block_size, max_num_seqs, max_model_len, CacheLayout())

    assert runner.num_rows in ([], [min(2, max_num_seqs)] * 2)
    assert not len(batch)
    if num_blocks * block_size >= 20 and max_model_len >= 2:
        assert runner.num_rows
