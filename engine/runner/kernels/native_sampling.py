"""Native grammar masks, draws and logprobs of tokens on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.device.step_memory import NEW_MEMORY, Memory
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.sampling.constraints import Constraints
from baton.engine.runner.sampling.logprobs import LogprobTensors
from baton.engine.runner.sampling.sampling import SampledRows, SamplingPass
from baton.engine.runner.sampling.torch_sampling import (
    MIN_TEMPERATURE,
    SamplingBackend,
    UndrawnPass,
    draw_keys,
)


class NativeSampling(SamplingBackend):
    """Sampling with kernels. Bans, biases and penalties are torch's."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def begin(self, rows: SampledRows, inputs: StepInputs) -> SamplingPass:
        return NativeSamplingPass(rows, inputs, self._kernels)

    def compute_logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_tops: int,
        rows: Tensor | None = None,
        memory: Memory = NEW_MEMORY,
    ) -> LogprobTensors:
        if rows is None:
            rows = torch.arange(len(logits))
        else:
            token_ids = token_ids[rows]
        logits, count = logits.contiguous(), len(rows)
        num_tops = min(num_tops, logits.shape[1])
        chosen, top = torch.empty(count), torch.empty(count, num_tops)
        ranks = torch.empty(count, dtype=torch.int64)
        top_ids = torch.empty(count, num_tops, dtype=torch.int64)
        self._kernels.call(
            "baton_logprobs",
            logits=logits,
            rows=rows,
            token_ids=token_ids,
            chosen=chosen,
            top=top,
            ranks=ranks,
            top_ids=top_ids,
            num_rows=count,
            size=logits.shape[1],
            num_tops=num_tops,
        )
        return LogprobTensors(token_ids, chosen, ranks, top_ids, top)


class NativeSamplingPass(UndrawnPass):
    """Implements `SamplingPass`."""

    def __init__(self, rows: SampledRows, inputs: StepInputs, kernels: Kernels) -> None:
        constraints = Constraints(rows, inputs, self._mask, self._copy)
        super().__init__(constraints, rows.find_peaks)
        self._kernels, self._memory = kernels, rows.memory
        drawn = [index for index, run in enumerate(rows.runs) if not run.row.sampling.is_greedy]
        self._num_drawn = len(drawn)
        if not drawn:
            return
        runs = [rows.runs[index] for index in drawn]
        params = [run.row.sampling for run in runs]

        def numbers(read: Callable[[SamplingParams], float]) -> Any:
            return np.array([read(each) for each in params], dtype=np.float32)

        self._arrays = {
            "rows": np.array(drawn, dtype=np.int64),
            "keys": draw_keys([run.row.seed for run in runs], [run.end for run in runs]),
            "temperatures": numbers(lambda each: max(each.temperature, MIN_TEMPERATURE)),
            "min_p": numbers(lambda each: each.min_p),
            "top_p": numbers(lambda each: each.top_p),
            "top_k": np.array([each.top_k for each in params], dtype=np.int64),
        }

    def _copy(self, logits: Tensor) -> Tensor:
        """Copy into the memory of the step before: pages of new memory would cost more."""
        scores = self._memory.take("scores", logits, logits.shape, logits.dtype)
        return scores.copy_(logits)

    def _mask(self, scores: Tensor, rows: Tensor, bits: Tensor) -> None:
        num_masks, num_words = bits.shape
        self._kernels.call(
            "baton_mask",
            scores=scores,
            bits=bits,
            rows=rows,
            num_masks=num_masks,
            num_words=num_words,
            size=scores.shape[1],
        )

    def draw(self, scores: Tensor, token_ids: Tensor) -> None:
        if not self._num_drawn:
            return
        scores = scores.contiguous()
        self._kernels.call(
            "baton_draw",
            logits=scores,
            token_ids=token_ids,
            num_rows=self._num_drawn,
            size=scores.shape[1],
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
