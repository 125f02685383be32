"""Output head that turns the hidden states of a text into one vector, or one for each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.ids import RequestId
from baton.core.output import Failure
from baton.core.pooling import Pooling, PoolingKind
from baton.core.request import TaskOutput
from baton.engine.errors import OutOfOrder
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.device.device import CPU, Device
from baton.engine.runner.device.step_inputs import Array, StepInputs
from baton.engine.runner.device.step_outputs import Received, make_outputs
from baton.engine.runner.model.pass_layout import TokenRun
from baton.engine.runner.pooling.dense import LoadedDense, apply_dense
from baton.engine.runner.sampling.output_heads import HeadPass, HiddenStates
from baton.engine.runner.sampling.sampler import NOT_FINITE


class PoolingHead:
    """Implements `OutputHead` for pooled rows.

    A text can be computed in several chunks: the sum of its hidden states, the one of its first
    token, or all of them are carried from one to the next.
    """

    def __init__(
        self,
        pooling: Pooling,
        classifier: Tensor | None = None,
        device: Device = CPU,
        dense: Sequence[LoadedDense] = (),
    ) -> None:
        self.pooling = pooling
        self.outputs = make_outputs(device)
        self.carried: dict[RequestId, Tensor] = {}
        self._classifier = classifier
        self._dense = dense

    def drop_rows(self, plan: Plan) -> None:
        if plan.is_retry:
            return  # rows dropped by a failed pass are added again
        for request_id in plan.dropped:
            self.carried.pop(request_id, None)

    def needs_all_tokens(self, step: Step) -> bool:
        needs_all = self.pooling.needs_all_tokens
        tasks = [run.row.task for run in step.runs if run.row.task.is_pooling]
        return any(needs_all or task.output is TaskOutput.VECTORS for task in tasks)

    def begin(self, step: Step, inputs: StepInputs) -> HeadPass | None:
        texts = list(_texts(step))
        return _PooledPass(self, texts) if texts else None

    def finish(self, vectors: Tensor) -> Tensor:
        logits = None if self._classifier is None else vectors @ self._classifier.T
        return finish(apply_dense(vectors, self._dense), self.pooling, logits)


@dataclass(slots=True, eq=False)
class _PooledPass:
    """Implements `HeadPass`."""

    head: PoolingHead
    texts: Sequence[_Text]
    # Texts that end in this pass, with the number of their vectors.
    ended: dict[RequestId, int] = field(default_factory=dict)
    received: Received | None = None
    carried: dict[RequestId, Tensor] = field(default_factory=dict)  # out of this pass

    @property
    def sampled(self) -> None:
        """Return None: what this pass carries over is kept when it is collected."""

    def launch(self, hidden_states: HiddenStates) -> None:
        reduced = {text.request_id: self._reduce(text, hidden_states) for text in self.texts}
        vectors = {key: rows for key, rows in reduced.items() if rows is not None}
        self.ended = {key: len(rows) for key, rows in vectors.items()}
        if vectors:
            finished = self.head.finish(torch.cat(list(vectors.values())).float())
            self.received = self.head.outputs.send([finished])

    def collect(self, result: RunResult) -> None:
        if self.received is None:
            return
        [array] = self.received.read()
        add_vectors(self.ended, array, result)

    def commit(self) -> None:
        for request_id in self.ended:
            self.head.carried.pop(request_id, None)
        self.head.carried |= self.carried

    def _reduce(self, text: _Text, hidden_states: HiddenStates) -> Tensor | None:
        """Return the vectors of a text that ends in this pass; carry over those of another one."""
        kind = self.head.pooling.kind if text.is_pooled else PoolingKind.TOKENS
        if kind is PoolingKind.LAST:
            return None if text.sampled is None else hidden_states.sampled[text.sampled][None]
        if hidden_states.by_token is None:
            raise OutOfOrder("a pass with texts to pool has no hidden states of all tokens")
        rows = hidden_states.by_token[text.first : text.first + text.run.num_tokens]
        reduced = self._reduce_chunk(text, rows, kind)
        if text.sampled is None:
            self.carried[text.request_id] = reduced
            return None
        return reduced / text.run.end if kind is PoolingKind.MEAN else reduced

    def _reduce_chunk(self, text: _Text, rows: Tensor, kind: PoolingKind) -> Tensor:
        carried = self.head.carried.get(text.request_id)
        if kind is PoolingKind.TOKENS:
            return torch.cat([rows] if carried is None else [carried, rows])
        if kind is PoolingKind.CLS:
            return rows[:1] if carried is None else carried
        total = rows.sum(0, keepdim=True, dtype=torch.float32)
        return total if carried is None else carried + total


def finish(vectors: Tensor, pooling: Pooling, logits: Tensor | None) -> Tensor:
    """Return the results of texts: scores of labels, or embeddings. All are float32."""
    if logits is not None and pooling.gives_logits:
        return logits
    if logits is not None:
        return logits.sigmoid() if pooling.num_labels == 1 else logits.softmax(-1)
    return torch.nn.functional.normalize(vectors, dim=-1) if pooling.normalizes else vectors


def add_vectors(num_by_request: Mapping[RequestId, int], vectors: Array, result: RunResult) -> None:
    """Add finite vectors to a result, and failures for the others."""
    end = 0
    for request_id, num_vectors in num_by_request.items():
        vector, end = vectors[end : end + num_vectors], end + num_vectors
        if np.isfinite(vector).all():
            result.vectors[request_id] = vector.astype("<f4").tobytes()
        else:
            result.failures[request_id] = Failure(NOT_FINITE)


class _Text(NamedTuple):
    """A pooled row's tokens in a step."""

    run: TokenRun
    first: int  # index of the first token in the flat batch
    sampled: int | None  # index of its last token among the sampled ones, if its text ends here

    @property
    def request_id(self) -> RequestId:
        return self.run.row.request_id

    @property
    def is_pooled(self) -> bool:
        return self.run.row.task.output is not TaskOutput.VECTORS


def _texts(step: Step) -> Iterator[_Text]:
    sampled = {index: place for place, index in enumerate(step.sampled)}
    first = 0
    for index, run in enumerate(step.runs):
        if run.row.task.is_pooling:
            yield _Text(run, first, sampled.get(index))
        first += run.num_tokens


def choose_pooling(name: str, checkpoint: Checkpoint, own: Pooling | None) -> Pooling | None:
    """Return the model's own pooling, as classifiers have, or that of the settings or the files."""
    if own is not None or name == "none":
        return own
    return checkpoint.read_pooling() if name == "auto" else Pooling(PoolingKind(name))
