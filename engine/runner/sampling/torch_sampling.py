"""Sampling with torch.

On the CPU, where reading a tensor costs nothing, top-p considers the likeliest tokens first and
sorts the whole vocabulary only if they are not enough. On a GPU it always sorts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.device.step_memory import NEW_MEMORY, Memory
from baton.engine.runner.model.pass_layout import Ints, TokenRun
from baton.engine.runner.sampling.constraints import Constraints
from baton.engine.runner.sampling.logits_processors import NEVER
from baton.engine.runner.sampling.logprobs import LogprobTensors, gather_logprobs
from baton.engine.runner.sampling.sampling import (
    BestTokens,
    FindPeaks,
    SampledRows,
    SamplingPass,
)

# Candidates that top-p considers before it sorts the whole vocabulary.
TOP_P_CANDIDATES = 1024
# Candidates drawn at once: as many as fit into the CPU's private cache.
DRAW_CHUNK_CANDIDATES = 1 << 17
MIN_TEMPERATURE = 1e-30  # smaller ones can underflow to zero in float32
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class SamplingBackend:
    """Constraints, random draws and logprobs in torch, from which other backends are derived."""

    def begin(self, rows: SampledRows, inputs: StepInputs) -> SamplingPass:
        """Put the arrays of a step. The pass can be used once the inputs have been sent."""
        return TorchSamplingPass(rows, inputs)

    def compute_logprobs(
        self,
        logits: Tensor,
        token_ids: Tensor,
        num_tops: int,
        rows: Tensor | None = None,
        memory: Memory = NEW_MEMORY,
    ) -> LogprobTensors:
        """Compute logprobs of these and of the top tokens from [rows, vocab_size] in float32.

        With `rows`, only those of these rows. The rank of a token is one plus the number of tokens
        with a higher logprob. Results can be in `memory`.
        """
        if rows is not None:
            logits, token_ids = logits[rows], token_ids[rows]
        logprobs = logits.log_softmax(dim=-1)
        num_tops = min(num_tops, logits.shape[1])
        return gather_logprobs(logprobs, token_ids, logprobs.topk(num_tops, dim=-1).indices)


class UndrawnPass:
    """Implements `SamplingPass` but for the draws."""

    def __init__(self, constraints: Constraints, find_peaks: FindPeaks) -> None:
        self._constraints = constraints
        self._find_peaks = find_peaks

    def constrain(self, logits: Tensor) -> Tensor:
        return self._constraints.apply(logits)

    def choose(self, scores: Tensor) -> BestTokens:
        token_ids = self._find_peaks(scores).token_ids
        best = scores.gather(1, token_ids[:, None]).squeeze(1)
        return BestTokens(token_ids, best.isneginf())


class TorchSamplingPass(UndrawnPass):
    """Implements `SamplingPass`. Rows with the same number of candidates are drawn together."""

    def __init__(self, rows: SampledRows, inputs: StepInputs) -> None:
        super().__init__(Constraints(rows, inputs), rows.find_peaks)
        runs = rows.runs
        is_on_cpu = rows.device.type == "cpu"
        by_count: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            if not run.row.sampling.is_greedy:
                count = _num_candidates(run.row.sampling, rows.vocab_size, is_on_cpu)
                by_count.setdefault(count, []).append(index)
        self._draws = [Draw.of(count, indices, runs, inputs) for count, indices in by_count.items()]

    def draw(self, scores: Tensor, token_ids: Tensor) -> None:
        for draw in self._draws:
            draw.apply(scores, token_ids)


def _num_candidates(sampling: SamplingParams, vocab_size: int, is_on_cpu: bool) -> int:
    """Return the number of likeliest tokens to consider, with room for ties at the last rank."""
    if sampling.top_k:
        return min(1 << (sampling.top_k + 15).bit_length(), vocab_size)
    return min(TOP_P_CANDIDATES, vocab_size) if sampling.top_p < 1 and is_on_cpu else vocab_size


class Draw(NamedTuple):
    """Draw of the rows with the same number of candidates. Arrays are [rows, 1]."""

    num_candidates: int
    rows: Tensor | None  # None: all rows of the step
    temperatures: Tensor
    keys: Tensor  # of random numbers
    min_p: Tensor | None  # if a row has it; the same holds for the others
    top_k: Tensor | None
    top_p: Tensor | None
    all_have_top_k: bool

    @classmethod
    def of(
        cls, num_candidates: int, indices: list[int], runs: Sequence[TokenRun], inputs: StepInputs
    ) -> Draw:
        drawn = [runs[index] for index in indices]
        params = [run.row.sampling for run in drawn]
        temperatures = [max(each.temperature, MIN_TEMPERATURE) for each in params]
        keys = draw_keys([run.row.seed for run in drawn], [run.end for run in drawn])
        min_p = [each.min_p for each in params]
        top_k = [min(each.top_k, num_candidates) for each in params]
        top_p = [each.top_p for each in params]

        def column(values: Sequence[float], dtype: type) -> Tensor:
            return inputs.put(np.array(values, dtype=dtype)[:, None])

        return cls(
            num_candidates,
            None if len(drawn) == len(runs) else inputs.put(np.array(indices, dtype=np.int64)),
            column(temperatures, np.float32),
            inputs.put(keys[:, None]),
            column(min_p, np.float32) if any(min_p) else None,
            column(top_k, np.int64) if any(top_k) else None,
            column(top_p, np.float32) if min(top_p) < 1 else None,
            all(top_k),
        )

    def apply(self, scores: Tensor, token_ids: Tensor) -> None:
        chosen = self._filters.draw(self._scale(scores), self.num_candidates)
        if self.rows is None:
            token_ids.copy_(chosen)
        else:
            token_ids[self.rows] = chosen

    def filter(self, scores: Tensor) -> Tensor:
        """Return scaled logits of the rows, with -inf for tokens that cannot be drawn.

        For draws that consider the whole vocabulary.
        """
        return self._filters.apply(self._scale(scores))

    @property
    def _filters(self) -> _Filters:
        return _Filters(self.keys, self.top_k, self.top_p, self.all_have_top_k)

    def _scale(self, scores: Tensor) -> Tensor:
        """Apply temperatures and min-p."""
        logits = scores if self.rows is None else scores[self.rows]
        # Distances to the largest logit cannot overflow, however small the temperature.
        distances = logits - logits.amax(dim=-1, keepdim=True)
        scaled = distances / self.temperatures
        if self.min_p is not None:
            # log 0 = -inf keeps all tokens.
            floor = scaled.amax(dim=-1, keepdim=True) + self.min_p.log()
            scaled = scaled.masked_fill(scaled < floor, NEVER)
        return scaled


class _Filters(NamedTuple):
    """Filters of some rows, and keys of their random numbers. Tensors are [rows, 1]."""

    keys: Tensor
    top_k: Tensor | None  # 0 keeps all
    top_p: Tensor | None
    all_have_top_k: bool

    def draw(self, scaled: Tensor, num_candidates: int) -> Tensor:
        """Draw one token for each row, among so many of its likeliest tokens."""
        if self.top_k is None and self.top_p is None:
            every = torch.arange(scaled.shape[1], device=scaled.device).expand_as(scaled)
            return _gumbel_max(scaled, every, self.keys)
        values, token_ids = _likeliest(scaled, num_candidates)
        if self.top_k is not None:
            values = _apply_top_k(values, self.top_k)
        if self.top_p is None:
            return _gumbel_max(values, token_ids, self.keys)
        mass = self._mass(values, scaled)
        chosen = _gumbel_max(_apply_top_p(values, mass, self.top_p), token_ids, self.keys)
        if num_candidates == scaled.shape[1] or self.all_have_top_k:
            return chosen
        # On the CPU only.
        short = (mass[:, -1:] < self.top_p).flatten().nonzero().flatten()
        if len(short):
            chosen[short] = self._select(short).draw(scaled[short], scaled.shape[1])
        return chosen

    def apply(self, scaled: Tensor) -> Tensor:
        """Return the logits with -inf for tokens that `draw` never chooses."""
        if self.top_k is None and self.top_p is None:
            return scaled
        values, token_ids = _likeliest(scaled, scaled.shape[1])
        if self.top_k is not None:
            values = _apply_top_k(values, self.top_k)
        if self.top_p is not None:
            values = _apply_top_p(values, self._mass(values, scaled), self.top_p)
        return scaled.scatter(1, token_ids, values)

    def _mass(self, values: Tensor, scaled: Tensor) -> Tensor:
        """Return the probability of the tokens up to each candidate."""
        if self.all_have_top_k:
            whole = values.logsumexp(dim=-1, keepdim=True)
        elif self.top_k is None:
            whole = scaled.logsumexp(dim=-1, keepdim=True)
        else:
            whole = torch.where(
                self.top_k > 0,
                values.logsumexp(dim=-1, keepdim=True),
                scaled.logsumexp(dim=-1, keepdim=True),
            )
        return (values - whole).exp().cumsum(dim=-1, dtype=torch.float64)

    def _select(self, rows: Tensor) -> _Filters:
        """Return the filters of rows without top-k."""
        return _Filters(
            self.keys[rows], None, None if self.top_p is None else self.top_p[rows], False
        )


def _likeliest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the top `count` values and token ids in an order that does not depend on torch.

    Largest values come first; equal values are ordered by token id.
    """
    if count < scaled.shape[1]:
        _, token_ids = scaled.topk(count, dim=-1, sorted=False)
        token_ids = token_ids.sort(dim=-1).values
        values = scaled.gather(1, token_ids)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        return values, token_ids.gather(1, order)
    return scaled.sort(dim=-1, descending=True, stable=True)


def _apply_top_k(values: Tensor, top_k: Tensor) -> Tensor:
    """Mask all but the top k values; ties with the k-th value are kept."""
    floor = values.gather(1, (top_k - 1).clamp_(min=0))
    return values.masked_fill((values < floor) & (top_k > 0), NEVER)


def _apply_top_p(values: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """Mask all but the shortest prefix that holds top_p."""
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
    return values.masked_fill((before >= top_p) & (top_p < 1), NEVER)


def _gumbel_max(values: Tensor, token_ids: Tensor, keys: Tensor) -> Tensor:
    """Draw a token by weight exp(value); `values` and `token_ids` are [rows, candidates].

    Divides probabilities by Exponential(1) numbers and takes the largest (Gumbel-max trick).
    """
    num_rows, num_candidates = values.shape
    at_once = num_rows
    if values.device.type == "cpu":
        at_once = max(1, DRAW_CHUNK_CANDIDATES // num_candidates)
    winners = []
    for start in range(0, num_rows, at_once):
        part = slice(start, start + at_once)
        times = exponential_numbers(keys[part], token_ids[part])
        ratios = values[part].softmax(dim=-1).div_(times)
        winners.append(token_ids[part].gather(1, ratios.argmax(dim=-1, keepdim=True)))
    return torch.cat(winners).squeeze(1)


TORCH_SAMPLING = SamplingBackend()


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> Ints:
    """Return a key of the random numbers of each row."""
    pairs = zip(seeds, positions, strict=True)
    keys = [_to_signed(_mix(_mix(seed) + position)) for seed, position in pairs]
    return np.array(keys, dtype=np.int64)


def exponential_numbers(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return Exponential(1) numbers for each row's tokens, [rows, tokens] in float32.

    The argmax of weight / number is a draw by weight (Gumbel-max trick). A token's number
    depends neither on the other rows nor on the other tokens of the row, and a small error in
    the weights changes the result only in a near tie. `keys`: [rows, 1].
    """
    bits = _mix_in_place(((token_ids + 1) * _to_signed(GOLDEN)).add_(keys))
    bits.bitwise_right_shift_(1).bitwise_and_(MASK >> 1)
    # 63 bits keep the precision near zero, where it matters; adding a half avoids zero.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-63)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mix(value: int) -> int:
    """Return the splitmix64 hash of an integer, modulo 2**64."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * FIRST) & MASK
    value = ((value ^ (value >> 27)) * SECOND) & MASK
    return value ^ (value >> 31)


def _mix_in_place(value: Tensor) -> Tensor:
    """Apply the splitmix64 finaliser to an int64 tensor.

    Products wrap as needed; shifts are arithmetic, so the copied sign bits are masked off.
    """
    shifted = torch.empty_like(value)
    for num_bits, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        torch.bitwise_right_shift(value, num_bits, out=shifted)
        value.bitwise_xor_(shifted.bitwise_and_(MASK >> num_bits)).mul_(_to_signed(factor))
    return value


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
