"""From logits to tokens. Each row is treated by its own parameters alone.

The order is vLLM V1's, but that logprobs are of the raw logits whatever a grammar allows: then
comes the grammar; then allowed and banned tokens, min_tokens, logit bias, penalties, and
processors of people's own; greedy rows end there; then temperature, min-p, top-k, top-p
(renormalised after each), and the draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.runner.constraints import constrain
from engine.runner.layout import Ints
from engine.runner.ops import Peaks, TorchOps
from engine.runner.processors import NO_PROCESSORS, Processors
from engine.runner.randomness import waiting_times
from engine.sampling import SamplingParams

# How many candidates top-p looks at before it sorts the whole vocabulary.
FIRST_LOOK = 1024
# As many as the processor's own cache holds.
RACERS_AT_ONCE = 1 << 17
SMALLEST_TEMPERATURE = 1e-30  # in float32 the next ones are none
TORCH = TorchOps()
NO_TOKEN_LEFT = "no token may be chosen: the allowed, banned and stop tokens leave none"
NO_TOKEN_FITS = "no token may be chosen: what the form asks for is not allowed, or banned"
NOT_FINITE = "the model's logits are not finite"


class SampleRow(NamedTuple):
    """What the choice of one token depends on, beside the logits."""

    sampling: SamplingParams
    seed: int
    known_tokens: Ints  # prompt and outputs; the new token's position is their number
    num_prompt_tokens: int
    allowed: Tensor | None = None  # [vocab_size] booleans, by its grammar


class Choice(NamedTuple):
    """A row's token, or why there is none."""

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

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[Choice]:
        """logits: [rows, vocab_size] in float32; left as they are."""
        token_ids, are_finite = self._find_peaks(logits)
        good = [place for place, is_finite in enumerate(are_finite.tolist()) if is_finite]
        if len(good) == len(rows):
            return self._choose(logits, rows, token_ids)
        choices = [Choice(None, NOT_FINITE)] * len(rows)
        chosen = self._choose(logits[good], [rows[place] for place in good], token_ids[good])
        for place, choice in zip(good, chosen, strict=True):
            choices[place] = choice
        return choices

    def _choose(self, logits: Tensor, rows: Sequence[SampleRow], token_ids: Tensor) -> list[Choice]:
        """`token_ids`: of the largest, as long as nothing is constrained."""
        constrained = constrain(logits, rows, self._eos_token_ids, self._processors)
        if constrained.logits is not logits:
            token_ids = self._find_peaks(constrained.logits).token_ids
        best = constrained.logits.gather(1, token_ids[:, None])
        is_empty = best.isneginf().flatten().tolist()  # everything is forbidden
        random = [i for i, row in enumerate(rows) if not (row.sampling.is_greedy or is_empty[i])]
        if random:
            drawn = _draw(constrained.logits[random], [rows[i] for i in random])
            token_ids[random] = drawn
        return [
            _no_choice(row, constrained.failures.get(i)) if is_empty[i] else Choice(token_id)
            for i, (row, token_id) in enumerate(zip(rows, token_ids.tolist(), strict=True))
        ]


def _no_choice(row: SampleRow, failure: str | None) -> Choice:
    """`failure`: of a logits processor, which is the server's and not the client's fault."""
    if failure is not None:
        return Choice(None, failure)
    return Choice(None, NO_TOKEN_LEFT if row.allowed is None else NO_TOKEN_FITS, is_refused=True)


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """One token for each row; rows that look at equally many candidates go together."""
    temperatures = [[max(row.sampling.temperature, SMALLEST_TEMPERATURE)] for row in rows]
    # Distances to the largest: these cannot overflow, however small the temperature.
    distances = logits - logits.amax(dim=-1, keepdim=True)
    scaled = distances / torch.tensor(temperatures, device=logits.device)
    chosen = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    by_count: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_count.setdefault(_num_candidates(row.sampling, logits.shape[1]), []).append(place)
    for count, places in by_count.items():
        chosen[places] = _draw_among(count, scaled[places], [rows[i] for i in places])
    return chosen


def _num_candidates(sampling: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest must be in sight, with room for ties at the last place."""
    if sampling.top_k:
        return min(1 << (sampling.top_k + 15).bit_length(), vocab_size)
    return min(FIRST_LOOK, vocab_size) if sampling.top_p < 1 else vocab_size


def _draw_among(count: int, scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    scaled = _min_p(scaled, rows)
    if all(row.sampling.top_p == 1 and not row.sampling.top_k for row in rows):
        token_ids = torch.arange(scaled.shape[1], device=scaled.device).expand_as(scaled)
        return _race(scaled, token_ids, rows)
    values, token_ids = _likeliest(scaled, count)
    values = _top_k(values, rows)
    enough, values = _top_p(values, scaled, rows)
    chosen = _race(values, token_ids, rows)
    short = [place for place, is_enough in enumerate(enough) if not is_enough]
    if short:
        all_of_them = scaled.shape[1]
        chosen[short] = _draw_among(all_of_them, scaled[short], [rows[i] for i in short])
    return chosen


def _min_p(scaled: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    if not any(row.sampling.min_p for row in rows):
        return scaled
    min_p = torch.tensor([[row.sampling.min_p] for row in rows], device=scaled.device)
    floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()  # log 0 keeps all
    return scaled.masked_fill(scaled < floor, float("-inf"))


def _likeliest(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Largest first, and lower token ids first among equals: no choice is left to torch."""
    if count < scaled.shape[1]:
        _, token_ids = scaled.topk(count, dim=-1, sorted=False)
        token_ids = token_ids.sort(dim=-1).values
        values = scaled.gather(1, token_ids)
        values, order = values.sort(dim=-1, descending=True, stable=True)
        return values, token_ids.gather(1, order)
    return scaled.sort(dim=-1, descending=True, stable=True)


def _top_k(values: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Equals of the k-th stay."""
    width = values.shape[1]
    last = [[min(row.sampling.top_k or width, width) - 1] for row in rows]
    floor = values.gather(1, torch.tensor(last, device=values.device))
    return values.masked_fill(values < floor, float("-inf"))


def _top_p(values: Tensor, scaled: Tensor, rows: Sequence[SampleRow]) -> tuple[list[bool], Tensor]:
    """The shortest run from the top that holds top_p; and by row, whether all of it is in sight."""
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


def _race(values: Tensor, token_ids: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """values and token_ids: [rows, candidates]. The draw itself, by weight exp(value)."""
    seeds = [row.seed for row in rows]
    positions = [len(row.known_tokens) for row in rows]
    winners = []
    at_once = max(1, RACERS_AT_ONCE // values.shape[1])
    for start in range(0, len(rows), at_once):
        part = slice(start, start + at_once)
        times = waiting_times(seeds[part], positions[part], token_ids[part])
        ratios = values[part].softmax(dim=-1).div_(times)
        winners.append(token_ids[part].gather(1, ratios.argmax(dim=-1, keepdim=True)))
    return torch.cat(winners).squeeze(1)
