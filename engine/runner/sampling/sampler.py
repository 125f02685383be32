"""Sampler: turns logits into tokens. Each row depends only on its own parameters.

The order is that of vLLM V1, except that logprobs are taken from the raw logits before the grammar
mask: logprobs, grammar mask, allowed and banned tokens, min_tokens, logit bias, penalties, custom
logits processors. Greedy rows end here. Random rows go on with temperature, min-p, top-k and top-p
(renormalised after each), and the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.core.output import Failure, FailureCause
from baton.core.sampling import SamplingParams
from baton.engine.runner.layout import TokenRun
from baton.engine.runner.model.ops import Peaks
from baton.engine.runner.model.torch_ops import TorchOps
from baton.engine.runner.sampling.constraints import constrain
from baton.engine.runner.sampling.logits_processors import NO_PROCESSORS, Processors
from baton.engine.runner.sampling.randomness import exponential_numbers

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


Choice = int | Failure  # a row's token, or the reason why it has none


class Sampler:
    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        processors: Processors = NO_PROCESSORS,
        find_peaks: Callable[[Tensor], Peaks] = TORCH.find_peaks,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._processors = processors
        self._find_peaks = find_peaks

    def choose(self, logits: Tensor, runs: Sequence[TokenRun]) -> list[Choice]:
        """Choose a token for each row of `logits`, [rows, vocab_size] in float32, not modified."""
        token_ids, are_finite = self._find_peaks(logits)
        finite = [index for index, is_finite in enumerate(are_finite.tolist()) if is_finite]
        if len(finite) == len(runs):
            return self._choose(logits, runs, token_ids)
        choices: list[Choice] = [Failure(NOT_FINITE)] * len(runs)
        chosen = self._choose(logits[finite], [runs[i] for i in finite], token_ids[finite])
        for index, choice in zip(finite, chosen, strict=True):
            choices[index] = choice
        return choices

    def _choose(self, logits: Tensor, runs: Sequence[TokenRun], token_ids: Tensor) -> list[Choice]:
        """Choose from finite logits. `token_ids`: the argmax of each row before constraints."""
        constrained = constrain(logits, runs, self._eos_token_ids, self._processors)
        if constrained.logits is not logits:
            token_ids = self._find_peaks(constrained.logits).token_ids
        best = constrained.logits.gather(1, token_ids[:, None])
        is_empty = best.isneginf().flatten().tolist()  # all tokens are forbidden
        random = [
            i for i, run in enumerate(runs) if not (run.row.sampling.is_greedy or is_empty[i])
        ]
        if random:
            drawn = _draw(constrained.logits[random], [runs[i] for i in random])
            token_ids[random] = drawn
        return [
            _no_choice(run, constrained.failures.get(i)) if is_empty[i] else token_id
            for i, (run, token_id) in enumerate(zip(runs, token_ids.tolist(), strict=True))
        ]


def _no_choice(run: TokenRun, failure: str | None) -> Failure:
    """Report a row without a token. `failure`: of a logits processor, a server-side error."""
    if failure is not None:
        return Failure(failure)
    reason = ALL_TOKENS_FORBIDDEN if run.allowed is None else GRAMMAR_TOKENS_FORBIDDEN
    return Failure(reason, FailureCause.REQUEST)


def _draw(logits: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    """Draw one token for each row; rows with the same number of candidates are drawn together."""
    temperatures = [[max(run.row.sampling.temperature, MIN_TEMPERATURE)] for run in runs]
    # Distances to the largest logit cannot overflow, however small the temperature.
    distances = logits - logits.amax(dim=-1, keepdim=True)
    scaled = distances / torch.tensor(temperatures, device=logits.device)
    chosen = torch.empty(len(runs), dtype=torch.int64, device=logits.device)
    by_count: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        by_count.setdefault(_num_candidates(run.row.sampling, logits.shape[1]), []).append(index)
    for count, indices in by_count.items():
        chosen[indices] = _draw_among(count, scaled[indices], [runs[i] for i in indices])
    return chosen


def _num_candidates(sampling: SamplingParams, vocab_size: int) -> int:
    """Return the number of likeliest tokens to consider, with room for ties at the last rank."""
    if sampling.top_k:
        return min(1 << (sampling.top_k + 15).bit_length(), vocab_size)
    return min(TOP_P_CANDIDATES, vocab_size) if sampling.top_p < 1 else vocab_size


def _draw_among(count: int, scaled: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    scaled = _min_p(scaled, runs)
    if all(run.row.sampling.top_p == 1 and not run.row.sampling.top_k for run in runs):
        token_ids = torch.arange(scaled.shape[1], device=scaled.device).expand_as(scaled)
        return _gumbel_max(scaled, token_ids, runs)
    values, token_ids = _likeliest(scaled, count)
    values = _top_k(values, runs)
    enough, values = _top_p(values, scaled, runs)
    chosen = _gumbel_max(values, token_ids, runs)
    short = [index for index, is_enough in enumerate(enough) if not is_enough]
    if short:
        vocab_size = scaled.shape[1]
        chosen[short] = _draw_among(vocab_size, scaled[short], [runs[i] for i in short])
    return chosen


def _min_p(scaled: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    if not any(run.row.sampling.min_p for run in runs):
        return scaled
    min_p = torch.tensor([[run.row.sampling.min_p] for run in runs], device=scaled.device)
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


def _top_k(values: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    """Mask all but the top k values; ties with the k-th value are kept."""
    width = values.shape[1]
    last = [[min(run.row.sampling.top_k or width, width) - 1] for run in runs]
    floor = values.gather(1, torch.tensor(last, device=values.device))
    return values.masked_fill(values < floor, float("-inf"))


def _top_p(values: Tensor, scaled: Tensor, runs: Sequence[TokenRun]) -> tuple[list[bool], Tensor]:
    """Mask all but the shortest prefix that holds top_p.

    Also returns, by row, whether the candidates contain the whole prefix.
    """
    top_p = torch.tensor([[run.row.sampling.top_p] for run in runs], device=values.device)
    has_top_k = torch.tensor([[run.row.sampling.top_k > 0] for run in runs], device=values.device)
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


def _gumbel_max(values: Tensor, token_ids: Tensor, runs: Sequence[TokenRun]) -> Tensor:
    """Draw a token by weight exp(value); `values` and `token_ids` are [rows, candidates].

    Divides probabilities by Exponential(1) numbers and takes the largest (Gumbel-max trick).
    """
    seeds = [run.row.seed for run in runs]
    positions = [run.end for run in runs]
    winners = []
    at_once = max(1, DRAW_CHUNK_CANDIDATES // values.shape[1])
    for start in range(0, len(runs), at_once):
        part = slice(start, start + at_once)
        times = exponential_numbers(seeds[part], positions[part], token_ids[part])
        ratios = values[part].softmax(dim=-1).div_(times)
        winners.append(token_ids[part].gather(1, ratios.argmax(dim=-1, keepdim=True)))
    return torch.cat(winners).squeeze(1)
