"""Sampler: turns logits into tokens. Each row depends only on its own parameters.

The order is that of vLLM V1, except that logprobs are taken from the raw logits before the grammar
mask: logprobs, grammar mask, allowed and banned tokens, min_tokens, logit bias, penalties, custom
logits processors. Greedy rows end here. Random rows go on with temperature, min-p, top-k and top-p
(renormalised after each), and the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runner.model.ops import Peaks, TorchOps
from engine.runner.sampling.constraints import SampleRow, constrain
from engine.runner.sampling.logits_processors import NO_PROCESSORS, Processors
from engine.runner.sampling.randomness import exponential_numbers
from engine.sampling import SamplingParams

# Candidates that top-p considers before it sorts the whole vocabulary.
TOP_P_CANDIDATES = 1024
# Candidates drawn at once: as many as fit into the CPU's private cache.
DRAW_CHUNK_CANDIDATES = 1 << 17
MIN_TEMPERATURE = 1e-30  # smaller ones can underflow to zero in float32
TORCH = TorchOps()
ALL_TOKENS_FORBIDDEN = "no token may be chosen: the allowed, banned and stop tokens leave none"
GRAMMAR_TOKENS_FORBIDDEN = (
    "no token may be chosen: all tokens that the grammar allows are banned or not allowed"
)
NOT_FINITE = "the model's logits are not finite"


class SamplingResult(NamedTuple):
    """A row's token, or the reason why it has none."""

    token_id: int | None
    error: str = ""
    is_refused: bool = False  # the request's own settings leave no token


class Sampler:
    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        processors: Processors = NO_PROCESSORS,
        find_peaks: Callable[[Tensor], Peaks] = TORCH.peaks,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._processors = processors
        self._find_peaks = find_peaks

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SamplingResult]:
        """Choose a token for each row of `logits`, [rows, vocab_size] in float32, not modified."""
        token_ids, are_finite = self._find_peaks(logits)
        finite = [index for index, is_finite in enumerate(are_finite.tolist()) if is_finite]
        if len(finite) == len(rows):
            return self._choose(logits, rows, token_ids)
        choices = [SamplingResult(None, NOT_FINITE)] * len(rows)
        chosen = self._choose(logits[finite], [rows[i] for i in finite], token_ids[finite])
        for index, choice in zip(finite, chosen, strict=True):
            choices[index] = choice
        return choices

    def _choose(
        self, logits: Tensor, rows: Sequence[SampleRow], token_ids: Tensor
    ) -> list[SamplingResult]:
        """Choose from finite logits. `token_ids`: the argmax of each row before constraints."""
        constrained = constrain(logits, rows, self._eos_token_ids, self._processors)
        if constrained.logits is not logits:
            token_ids = self._find_peaks(constrained.logits).token_ids
        best = constrained.logits.gather(1, token_ids[:, None])
        is_empty = best.isneginf().flatten().tolist()  # all tokens are forbidden
        random = [i for i, row in enumerate(rows) if not (row.sampling.is_greedy or is_empty[i])]
        if random:
            drawn = _draw(constrained.logits[random], [rows[i] for i in random])
            token_ids[random] = drawn
        return [
            _no_choice(row, constrained.failures.get(i))
            if is_empty[i]
            else SamplingResult(token_id)
            for i, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True))
        ]


def _no_choice(row: SampleRow, failure: str | None) -> SamplingResult:
    """Report a row without a token. `failure`: of a logits processor, a server-side error."""
    if failure is not None:
        return SamplingResult(None, failure)
    return SamplingResult(
        None,
        ALL_TOKENS_FORBIDDEN if row.allowed is None else GRAMMAR_TOKENS_FORBIDDEN,
        is_refused=True,
    )


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw one token for each row; rows with the same number of candidates are drawn together."""
    temperatures = [[max(row.sampling.temperature, MIN_TEMPERATURE)] for row in rows]
    # Distances to the largest logit cannot overflow, however small the temperature.
    distances = logits - logits.amax(dim=-1, keepdim=True)
    scaled = distances / torch.tensor(temperatures, device=logits.device)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    by_count: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_count.setdefault(_num_candidates(row.sampling, logits.shape[1]), []).append(index)
    for count, indices in by_count.items():
        chosen[indices] = _draw_among(count, scaled[indices], [rows[i] for i in indices])
    return chosen


def _num_candidates(sampling: SamplingParams, vocab_size: int) -> int:
    """Return the number of likeliest tokens to consider, with room for ties at the last rank."""
    if sampling.top_k:
        return min(1 << (sampling.top_k + 15).bit_length(), vocab_size)
    return min(TOP_P_CANDIDATES, vocab_size) if sampling.top_p < 1 else vocab_size


def _draw_among(count: int, scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    scaled = _min_p(scaled, rows)
    if all(row.sampling.top_p == 1 and not row.sampling.top_k for row in rows):
        token_ids = torch.arange(scaled.shape[1], device=scaled.device).expand_as(scaled)
        return _gumbel_max(scaled, token_ids, rows)
    values, token_ids = _likeliest(scaled, count)
    values = _top_k(values, rows)
    enough, values = _top_p(values, scaled, rows)
    chosen = _gumbel_max(values, token_ids, rows)
    short = [index for index, is_enough in enumerate(enough) if not is_enough]
    if short:
        vocab_size = scaled.shape[1]
        chosen[short] = _draw_among(vocab_size, scaled[short], [rows[i] for i in short])
    return chosen


def _min_p(scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    if not any(row.sampling.min_p for row in rows):
        return scaled
    min_p = torch.tensor([[row.sampling.min_p] for row in rows], device=scaled.device)
    floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()  # log 0 = -inf keeps all tokens
    return scaled.masked_fill(scaled < floor, float("-inf"))


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


def _top_k(values: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Mask all but the top k values; ties with the k-th value are kept."""
    width = values.shape[1]
    last = [[min(row.sampling.top_k or width, width) - 1] for row in rows]
    floor = values.gather(1, torch.tensor(last, device=values.device))
    return values.masked_fill(values < floor, float("-inf"))


def _top_p(values: Tensor, scaled: Tensor, rows: Sequence[SampleRow]) -> tuple[list[bool], Tensor]:
    """Mask all but the shortest prefix that holds top_p.

    Also returns, by row, whether the candidates contain the whole prefix.
    """
    top_p = torch.tensor([[row.sampling.top_p] for row in rows], device=values.device)
    has_top_k = torch.tensor([[row.sampling.top_k > 0] for row in rows], device=values.device)
    whole = torch.where(
        has_top_k,
        values.logsumexp(dim=-1, keepdim=True),
        scaled.logsumexp(dim=-1, keepdim=True),
    )
    upto = (values - whole).exp().cumsum(dim=-1, dtype=torch.float64)
    before = torch.cat((torch.zeros_like(upto[:, :1]), upto[:, :-1]), dim=-1)
    is_all = has_top_k | (top_p == 1) | (upto[:, -1:] >= top_p)
    if values.shape[1] == scaled.shape[1]:
        is_all = torch.ones_like(is_all)
    cut = (before >= top_p) & (top_p < 1)
    return is_all.flatten().tolist(), values.masked_fill(cut, float("-inf"))


def _gumbel_max(values: Tensor, token_ids: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Draw a token by weight exp(value); `values` and `token_ids` are [rows, candidates].

    Divides probabilities by Exponential(1) numbers and takes the largest (Gumbel-max trick).
    """
    seeds = [row.seed for row in rows]
    positions = [len(row.known_tokens) for row in rows]
    winners = []
    at_once = max(1, DRAW_CHUNK_CANDIDATES // values.shape[1])
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        times = exponential_numbers(seeds[part], positions[part], token_ids[part])
        ratios = values[part].softmax(dim=-1).div_(times)
        winners.append(token_ids[part].gather(1, ratios.argmax(dim=-1, keepdim=True)))
    return torch.cat(winners).squeeze(1)
