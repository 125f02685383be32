"""Sampling in Triton: constraints, draws and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.device.step_memory import NEW_MEMORY, Memory
from baton.engine.runner.model.pass_layout import Ints, TokenRun
from baton.engine.runner.sampling.constraints import (
    is_constrained,
    token_mask,
)
from baton.engine.runner.sampling.logprobs import LogprobTensors
from baton.engine.runner.sampling.sampling import BestTokens, SampledRows, SamplingPass
from baton.engine.runner.sampling.torch_sampling import MIN_TEMPERATURE, SamplingBackend, draw_keys
from baton.engine.runner.triton.launching import launch, row_contiguous
from baton.engine.runner.triton.sampling.sampling_kernels import (
    constrain_kernel,
    count_tokens_kernel,
    draw_kernel,
    find_best_kernel,
    scatter_bias_kernel,
)
from baton.engine.runner.triton.sampling.triton_logprobs import (
    ROW_WARPS,
    compute_logprobs,
    row_columns,
)
from baton.engine.structured_output.grammar import Bits, num_words

PIECE_COLUMNS = 1024  # of a row or a list, that one program computes


class TritonSampling(SamplingBackend):
    """Sampling with kernels."""

    def begin(self, rows: SampledRows, inputs: StepInputs) -> SamplingPass:
        return TritonSamplingPass(rows, inputs)

    def compute_logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_tops: int,
        rows: Tensor | None = None,
        memory: Memory = NEW_MEMORY,
    ) -> LogprobTensors:
        return compute_logprobs(row_contiguous(logits), token_ids, num_tops, rows, memory)


class TritonSamplingPass:
    """Implements `SamplingPass`."""

    def __init__(self, rows: SampledRows, inputs: StepInputs) -> None:
        runs = rows.runs
        are_free = not any(run.allowed is not None or is_constrained(run) for run in runs)
        self._constraints = None if are_free else _Constraints(rows, inputs)
        random = [index for index, run in enumerate(runs) if not run.row.sampling.is_greedy]
        self._draws = _Draws.of(random, rows, inputs) if random else None
        self._memory = rows.memory

    def constrain(self, logits: Tensor) -> Tensor:
        if self._constraints is None:
            return logits
        return self._constraints.apply(row_contiguous(logits), self._memory)

    def choose(self, scores: Tensor) -> BestTokens:
        num_rows, vocab_size = scores.shape
        token_ids = self._memory.take("token ids", scores, (num_rows,), torch.int64)
        are_empty = self._memory.take("are empty", scores, (num_rows,), torch.bool)
        launch(
            find_best_kernel,
            (num_rows,),
            token_ids,
            are_empty,
            scores,
            scores.stride(0),
            vocab_size,
            num_columns=row_columns(vocab_size),
            num_warps=ROW_WARPS,
        )
        return BestTokens(token_ids, are_empty)

    def draw(self, scores: Tensor, token_ids: Tensor) -> None:
        if self._draws is not None:
            self._draws.apply(scores, token_ids)


class _Constraints:
    """Constraints of a step. A row has a slot in the arrays of each kind that it uses."""

    def __init__(self, rows: SampledRows, inputs: StepInputs) -> None:
        runs, vocab_size = rows.runs, rows.vocab_size
        masks = [token_mask(run, rows.eos_token_ids, vocab_size) for run in runs]
        biased = [run for run in runs if run.row.sampling.logit_bias]
        penalised = [run for run in runs if run.row.sampling.has_penalty]
        slots = [
            _slots([mask is not None for mask in masks]),
            _slots([bool(run.row.sampling.logit_bias) for run in runs]),
            _slots([run.row.sampling.has_penalty for run in runs]),
        ]
        self._slots = inputs.put(np.stack(slots, axis=1))
        self._masks = inputs.put(_stacked([mask for mask in masks if mask is not None], vocab_size))
        self._biases = _Biases.of(biased, inputs)
        self._histories = _Histories.of(penalised, inputs)

    def apply(self, logits: Tensor, memory: Memory) -> Tensor:
        num_rows, vocab_size = logits.shape
        scores = memory.take("scores", logits, (num_rows, vocab_size), torch.float32)
        masks = self._masks
        launch(
            constrain_kernel,
            (num_rows, _num_pieces(vocab_size)),
            scores,
            logits,
            self._slots,
            masks,
            self._biases.scatter(logits, memory),
            self._histories.count_tokens(logits, memory),
            self._histories.penalties,
            logits.stride(0),
            vocab_size,
            masks.shape[1],
            num_columns=PIECE_COLUMNS,
        )
        return scores


def _slots(has_one: list[bool]) -> Ints:
    """Number the rows that have a slot; -1 for the others."""
    return np.where(has_one, np.cumsum(has_one) - 1, -1)


def _stacked(masks: list[Bits], vocab_size: int) -> Bits:
    return np.stack(masks) if masks else np.zeros((0, num_words(vocab_size)), dtype=np.int32)


class _Lists(NamedTuple):
    """Lists of token ids of some rows, one after the other."""

    token_ids: Tensor
    bounds: Tensor  # [rows, 2]: start and end
    num_rows: int
    max_len: int

    @classmethod
    def of(cls, lists: Sequence[Ints], inputs: StepInputs) -> _Lists:
        lengths = [len(each) for each in lists]
        ends = np.cumsum(lengths, dtype=np.int64)
        token_ids = np.concatenate([np.zeros(0, dtype=np.int64), *lists]).astype(np.int32)
        bounds = np.stack((ends - lengths, ends), axis=1)
        return cls(inputs.put(token_ids), inputs.put(bounds), len(lists), max(lengths, default=0))

    @property
    def grid(self) -> tuple[int, int]:
        """Grid of programs that each compute a piece of a list."""
        return self.num_rows, _num_pieces(self.max_len)


class _Biases(NamedTuple):
    lists: _Lists
    values: Tensor

    @classmethod
    def of(cls, runs: Sequence[TokenRun], inputs: StepInputs) -> _Biases:
        biases = [run.row.sampling.logit_bias for run in runs]
        values = [value for bias in biases for value in bias.values()]
        lists = _Lists.of([np.array(list(bias), dtype=np.int64) for bias in biases], inputs)
        return cls(lists, inputs.put(np.array(values, dtype=np.float32)))

    def scatter(self, logits: Tensor, memory: Memory) -> Tensor:
        """Return the biases of all tokens, [biased rows, vocab_size]."""
        vocab_size = logits.shape[1]
        shape = self.lists.num_rows, vocab_size
        dense = memory.take("biases", logits, shape, torch.float32)
        if self.lists.num_rows:
            dense.zero_()
            launch(
                scatter_bias_kernel,
                self.lists.grid,
                dense,
                self.lists.token_ids,
                self.values,
                self.lists.bounds,
                vocab_size,
                num_columns=PIECE_COLUMNS,
            )
        return dense


class _Histories(NamedTuple):
    """Tokens that penalties depend on: of the prompt, for repetition only, and outputs."""

    lists: _Lists
    first_outputs: Tensor  # index of a row's first output in its list
    penalties: Tensor  # [penalised rows, 3]: repetition, presence, frequency

    @classmethod
    def of(cls, runs: Sequence[TokenRun], inputs: StepInputs) -> _Histories:
        params = [run.row.sampling for run in runs]
        penalties = [
            (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
            for each in params
        ]
        num_prompt = [
            run.row.num_prompt_tokens if run.row.sampling.repetition_penalty != 1.0 else 0
            for run in runs
        ]
        known = [
            run.known_tokens[run.row.num_prompt_tokens - num :]
            for run, num in zip(runs, num_prompt, strict=True)
        ]
        return cls(
            _Lists.of(known, inputs),
            inputs.put(np.array(num_prompt, dtype=np.int64)),
            inputs.put(np.array(penalties, dtype=np.float32)),
        )

    def count_tokens(self, logits: Tensor, memory: Memory) -> Tensor:
        """Return counts of outputs, with flags of prompt tokens: [penalised rows, vocab_size]."""
        vocab_size = logits.shape[1]
        shape = self.lists.num_rows, vocab_size
        counts = memory.take("counts", logits, shape, torch.int32)
        if self.lists.num_rows:
            counts.zero_()
            launch(
                count_tokens_kernel,
                self.lists.grid,
                counts,
                self.lists.token_ids,
                self.lists.bounds,
                self.first_outputs,
                vocab_size,
                num_columns=PIECE_COLUMNS,
            )
        return counts


class _Draws(NamedTuple):
    """Draws of the random rows."""

    integers: Tensor  # [rows, 3]: row, key, top-k
    floats: Tensor  # [rows, 3]: temperature, greatest distance that min-p keeps, top-p
    num_rows: int

    @classmethod
    def of(cls, indices: list[int], rows: SampledRows, inputs: StepInputs) -> _Draws:
        runs = [rows.runs[index] for index in indices]
        params = [run.row.sampling for run in runs]
        keys = draw_keys([run.row.seed for run in runs], [run.end for run in runs])
        top_k = [min(each.top_k, rows.vocab_size) for each in params]
        temperatures = [max(each.temperature, MIN_TEMPERATURE) for each in params]
        farthest = -torch.tensor([each.min_p for each in params]).log().numpy()
        top_p = [each.top_p for each in params]
        return cls(
            inputs.put(np.stack((indices, keys, top_k), axis=1)),
            inputs.put(np.stack((temperatures, farthest, top_p), axis=1).astype(np.float32)),
            len(indices),
        )

    def apply(self, scores: Tensor, token_ids: Tensor) -> None:
        scores = row_contiguous(scores)
        launch(
            draw_kernel,
            (self.num_rows,),
            token_ids,
            scores,
            self.integers,
            self.floats,
            scores.stride(0),
            scores.shape[1],
            num_columns=row_columns(scores.shape[1]),
            num_warps=ROW_WARPS,
        )


def _num_pieces(size: int) -> int:
    return -(-size // PIECE_COLUMNS)
