"""What a request forbids, favours and penalises, worked into its row of logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.runner.layout import Ints
from engine.runner.processors import NEVER, NO_PROCESSORS, Processors
from engine.sampling import SamplingParams


class ConstrainedRow(Protocol):
    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def known_tokens(self) -> Ints: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def allowed(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Constrained:
    """Logits to choose from; a row whose processor failed has none that is above -inf."""

    logits: Tensor
    failures: Mapping[int, str]  # why, by row


def constrain(
    logits: Tensor,
    rows: Sequence[ConstrainedRow],
    eos_token_ids: tuple[int, ...],
    processors: Processors = NO_PROCESSORS,
) -> Constrained:
    """A changed copy if any row asks for a change, else the logits themselves."""
    ruled = [place for place, row in enumerate(rows) if row.allowed is not None]
    asking = [place for place, row in enumerate(rows) if _asks(row)]
    if not (ruled or asking):
        return Constrained(logits, {})
    logits = logits.clone()
    if ruled:
        _keep_to_form(logits, rows, ruled)
    for place in asking:
        row, scores = rows[place], logits[place]
        _forbid(scores, row, eos_token_ids)
        for token_id, bias in row.sampling.logit_bias.items():
            scores[token_id] += bias
        _penalise(scores, row)
    return Constrained(logits, _process(logits, rows, asking, processors))


def _keep_to_form(logits: Tensor, rows: Sequence[ConstrainedRow], places: list[int]) -> None:
    allowed = torch.stack([mask for place in places if (mask := rows[place].allowed) is not None])
    logits[places] = logits[places].masked_fill(~allowed.to(logits.device), NEVER)


def _process(
    logits: Tensor,
    rows: Sequence[ConstrainedRow],
    asking: Sequence[int],
    processors: Processors,
) -> dict[int, str]:
    """Last, so that processors see what has been made of the logits, and why some failed."""
    failures = {}
    for place in asking:
        row, scores = rows[place], logits[place]
        given = row.sampling.extra_args
        failure = processors.apply(scores, row.known_tokens, row.num_prompt_tokens, given)
        if failure:
            failures[place] = failure
            scores.fill_(NEVER)
    return failures


def _asks(row: ConstrainedRow) -> bool:
    sampling = row.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.banned_token_ids
        or sampling.banned_sequences
        or sampling.logit_bias
        or _num_outputs(row) < sampling.min_tokens
        or _has_penalty(sampling)
        or sampling.extra_args
    )


def _num_outputs(row: ConstrainedRow) -> int:
    return len(row.known_tokens) - row.num_prompt_tokens


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _forbid(scores: Tensor, row: ConstrainedRow, eos_token_ids: tuple[int, ...]) -> None:
    sampling = row.sampling
    if sampling.allowed_token_ids is not None:
        allowed = _indices(sampling.allowed_token_ids, scores)
        kept = scores[allowed]
        scores.fill_(NEVER)
        scores[allowed] = kept
    scores[_indices(sampling.banned_token_ids, scores)] = NEVER
    scores[_indices(_ends_of_banned(sampling.banned_sequences, row.known_tokens), scores)] = NEVER
    if _num_outputs(row) < sampling.min_tokens:
        # What would end the answer; with ignore_eos the eos tokens do not.
        ending = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))
        _forbid_ending(scores, _indices(ending, scores), is_ruled=row.allowed is not None)


def _ends_of_banned(sequences: Sequence[tuple[int, ...]], known_tokens: Ints) -> list[int]:
    """The last tokens of those that prompt and answer have all of before it."""
    longest = max(map(len, sequences), default=0)
    known = known_tokens[max(0, len(known_tokens) + 1 - longest) :].tolist()
    return [last for *before, last in sequences if not before or known[-len(before) :] == before]


def _forbid_ending(scores: Tensor, ending: Tensor, *, is_ruled: bool) -> None:
    """An answer that is whole by its grammar ends, however short it is."""
    kept = scores[ending]
    scores[ending] = NEVER
    if is_ruled and scores.max() == NEVER:
        scores[ending] = kept


def _penalise(scores: Tensor, row: ConstrainedRow) -> None:
    """Repetition looks at prompt and outputs, presence and frequency at outputs alone."""
    sampling = row.sampling
    if not _has_penalty(sampling):
        return
    known = torch.from_numpy(row.known_tokens).to(scores.device)
    if sampling.repetition_penalty != 1.0:
        seen = known.unique()
        before, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    outputs, counts = known[row.num_prompt_tokens :].unique(return_counts=True)
    scores[outputs] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _indices(token_ids: Collection[int], scores: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=scores.device)
