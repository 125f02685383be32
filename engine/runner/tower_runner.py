"""Runner of an encode node: turns pictures into encodings in KV blocks. Owns a vision tower.

Its requests are prompts that store an encoding (`core.media.StoredPicture`). Each token stands for
bytes of blocks. A request ends with one token that means nothing, like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from baton.core.ids import RequestId
from baton.engine.errors import OutOfOrder
from baton.engine.plan import FinishedPass, Pending, Plan, PlanRow, RunResult
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.batch.encodings import EncodingBlocks, Encodings, PictureEncoder
from baton.engine.runner.device.device import Device, FencedHook
from baton.engine.runner.loaded_runner import CachingRunner
from baton.engine.runner.model_info import KvMemory, ModelInfo

END = 0  # token that a request ends with


@dataclass(slots=True)
class _Row:
    """A request in the batch."""

    row: PlanRow
    num_computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_computed = self.row.num_computed_tokens


class TowerRunner(CachingRunner):
    """Runner of a tower without its decoder."""

    def __init__(
        self,
        info: ModelInfo,
        tower: PictureEncoder,
        stored: EncodingBlocks,
        memory: KvMemory,
        blocks: KvBlocks,
        device: Device,
    ) -> None:
        group = memory.layout.lasting_group
        if group is None:
            raise ValueError("a KV cache that forgets all tokens stores no encodings")
        super().__init__(info)
        self.kv_memory = memory
        self.blocks = blocks
        self.device = device
        self._group = group
        self._stored = stored
        self._encodings = Encodings(tower, stored)
        self._rows: dict[RequestId, _Row] = {}

    def __exit__(self, *error: object) -> None:
        self.blocks.close()
        # A reference to the runner that outlives the block must not keep the memory alive.
        del self.blocks, self._stored, self._encodings

    def launch(self, plan: Plan) -> Pending:
        """Encode the pictures that the plan orders, and store what it schedules."""
        hook = None
        if self.hook is not None:
            # As in a retry, layers are progress only: nothing is sent.
            hook = FencedHook(self.hook, self.device, is_retry=True)
        with torch.inference_mode():
            layer_done = None if hook is None else hook.layer_done
            encode_s = self._encodings.apply(plan.media, layer_done)
            result = self._store(plan, encode_s)
        if hook is not None and plan.num_scheduled_tokens:
            hook.pass_done()
        self.device.record().wait()
        return FinishedPass(result)

    def _store(self, plan: Plan, encode_s: dict[RequestId, float]) -> RunResult:
        for request_id in plan.dropped:
            self._rows.pop(request_id, None)
        self._rows |= {row.request_id: _Row(row) for row in plan.started}
        result = RunResult(encode_s=encode_s)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self._rows[request_id]
            end = row.num_computed + num_tokens
            if end > len(row.row.token_ids):
                raise OutOfOrder(f"{request_id}: token {end} of {len(row.row.token_ids)} is due")
            self._store_tokens(row.row, row.num_computed, end)
            row.num_computed = end
            if end == len(row.row.token_ids):
                result.token_ids[request_id] = [END]
        return result

    def _store_tokens(self, row: PlanRow, start: int, end: int) -> None:
        """Write the blocks of these tokens; one that is not full is written again later."""
        size = self.kv_memory.blocks.block_size
        for segment in row.media:
            last = min(end, segment.num_tokens)
            if start < last:
                places = range(start // size, -(-last // size))
                block_ids = row.block_tables[self._group][places.start : places.stop]
                self._stored.write(self._encodings.of(segment.digest), places, block_ids)
