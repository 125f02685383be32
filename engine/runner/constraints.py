"""What a request forbids, favours and penalises, worked into its row of logits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.runner.layout import Ints
from engine.sampling import SamplingParams

NEVER = float("-inf")


class ConstrainedRow(Protocol):
    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def known_tokens(self) -> Ints: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def allowed(self) -> Tensor | None: ...


def constrain(
    logits: Tensor, rows: Sequence[ConstrainedRow], eos_token_ids: tuple[int, ...]
) -> Tensor:
    """A changed copy if any row asks for a change, else the logits themselves."""
    ruled = [place for place, row in enumerate(rows) if row.allowed is not None]
    asking = [place for place, row in enumerate(rows) if _asks(row)]
    if not (ruled or asking):
        return logits
    logits = logits.clone()
    if ruled:
        allowed = torch.stack([row.allowed for row in rows if row.allowed is not None])
        logits[ruled] = logits[ruled].masked_fill(~allowed.to(logits.device), NEVER)
    for place in asking:
        row, scores = rows[place], logits[place]
        _forbid(scores, row, eos_token_ids)
        for token_id, bias in row.sampling.logit_bias.items():
            scores[token_id] += bias
        _penalise(scores, row)
    return logits


def _asks(row: ConstrainedRow) -> bool:
    sampling = row.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.banned_token_ids
        or sampling.logit_bias
        or _num_outputs(row) < sampling.min_tokens
        or _has_penalty(sampling)
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
    if _num_outputs(row) < sampling.min_tokens:
        # What would end the answer; with ignore_eos the eos tokens do not.
        ending = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))
        _forbid_ending(scores, _indices(ending, scores), is_ruled=row.allowed is not None)


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
