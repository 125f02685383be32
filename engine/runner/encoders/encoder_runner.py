"""Runner of an encoder: turns plans into vectors. Owns the weights.

A text is computed in one pass, whole, and its vectors do not depend on the other texts of the
pass. No keys and values are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.pooling import Pooling, PoolingKind
from baton.core.request import TaskOutput
from baton.engine.errors import OutOfOrder
from baton.engine.plan import FinishedPass, Pending, Plan, PlanRow, RunResult
from baton.engine.runner.device.device import CPU, FencedHook
from baton.engine.runner.encoders.encoder import Encoder
from baton.engine.runner.encoders.packed_texts import PackedTexts, pack_texts
from baton.engine.runner.loaded_runner import LoadedRunner
from baton.engine.runner.model_info import ModelInfo
from baton.engine.runner.pooling.dense import LoadedDense, apply_dense
from baton.engine.runner.pooling.pooling_head import add_vectors, finish


class EncoderRunner(LoadedRunner):
    """Runner without a KV cache."""

    def __init__(
        self, info: ModelInfo, encoder: Encoder, dense: Sequence[LoadedDense] = ()
    ) -> None:
        super().__init__(info)
        self.encoder = encoder
        self._dense = dense
        self._rows: dict[RequestId, PlanRow] = {}

    def __exit__(self, *error: object) -> None:
        # A reference to the runner that outlives the block must not keep the memory alive.
        del self.encoder

    def launch(self, plan: Plan) -> Pending:
        """Compute the texts that the plan schedules."""
        for request_id in plan.dropped:
            self._rows.pop(request_id, None)
        self._rows |= {row.request_id: row for row in plan.started}
        result = RunResult()
        rows = [self._whole_row(*scheduled) for scheduled in plan.num_scheduled_tokens.items()]
        if rows and self.info.pooling is not None:
            with torch.inference_mode():
                self._compute(pack_texts(rows), self.info.pooling, result)
        return FinishedPass(result)

    def _whole_row(self, request_id: RequestId, num_tokens: int) -> PlanRow:
        row = self._rows[request_id]
        if num_tokens != len(row.token_ids) or not row.task.is_pooling:
            raise OutOfOrder(
                f"{request_id}: {num_tokens} of {len(row.token_ids)} tokens are scheduled; an "
                "encoder computes whole texts, into vectors"
            )
        return row

    def _compute(self, texts: PackedTexts, pooling: Pooling, result: RunResult) -> None:
        hook = None
        if self.hook is not None:
            # As in a retry, layers are progress only: nothing is sent.
            hook = FencedHook(self.hook, CPU, is_retry=True)
        layer_done = None if hook is None else hook.layer_done
        vectors, counts = _vectors(self.encoder.forward(texts, layer_done), texts, pooling.kind)
        logits = self.encoder.classify(vectors)
        vectors = finish(apply_dense(vectors, self._dense), pooling, logits)
        num_by_request = {
            row.request_id: count for row, count in zip(texts.rows, counts, strict=True)
        }
        add_vectors(num_by_request, vectors.numpy(), result)
        if hook is not None:
            hook.pass_done()


def _vectors(
    hidden_states: Tensor, texts: PackedTexts, kind: PoolingKind
) -> tuple[Tensor, list[int]]:
    """Return the vectors of all texts, [vectors, hidden_size] in float32, and those of each."""
    are_pooled = [row.task.output is not TaskOutput.VECTORS for row in texts.rows]
    if all(are_pooled):
        return _pool(hidden_states, texts, kind), [1] * len(are_pooled)
    by_text = list(hidden_states.float().split(np.diff(texts.starts).tolist()))
    if any(are_pooled):
        pooled = _pool(hidden_states, texts, kind).split(1)
        by_text = [
            one if is_pooled else rows
            for one, rows, is_pooled in zip(pooled, by_text, are_pooled, strict=True)
        ]
    return torch.cat(by_text), list(map(len, by_text))


def _pool(hidden_states: Tensor, texts: PackedTexts, kind: PoolingKind) -> Tensor:
    """[tokens, hidden_size] → [texts, hidden_size] in float32."""
    starts = torch.from_numpy(texts.starts)
    if kind is PoolingKind.CLS:
        return hidden_states[starts[:-1]].float()
    if kind is PoolingKind.LAST:
        return hidden_states[starts[1:] - 1].float()
    means = [
        hidden_states[group.first : group.end]
        .unflatten(0, (group.num_texts, group.num_tokens))
        .sum(1, dtype=torch.float32)
        .div_(group.num_tokens)
        for group in texts.groups
    ]
    return torch.cat(means)
