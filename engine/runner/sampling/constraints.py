"""Applies a request's constraints, logit bias and penalties to its row of logits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.engine.runner.layout import Ints, TokenRun
from baton.engine.runner.sampling.logits_processors import NEVER, NO_PROCESSORS, Processors


@dataclass(frozen=True, slots=True)
class Constrained:
    """Constrained logits. A row whose logits processor failed has only -inf."""

    logits: Tensor
    failures: Mapping[int, str]  # reasons by row


def constrain(
    logits: Tensor,
    runs: Sequence[TokenRun],
    eos_token_ids: tuple[int, ...],
    processors: Processors = NO_PROCESSORS,
) -> Constrained:
    """Return a modified copy if any row has constraints, else the logits themselves."""
    masked = [index for index, run in enumerate(runs) if run.allowed is not None]
    constrained = [index for index, run in enumerate(runs) if _is_constrained(run)]
    if not (masked or constrained):
        return Constrained(logits, {})
    logits = logits.clone()
    if masked:
        _apply_grammar_masks(logits, runs, masked)
    failures = {}
    for index in constrained:
        run, scores = runs[index], logits[index]
        _forbid(scores, run, eos_token_ids)
        for token_id, bias in run.row.sampling.logit_bias.items():
            scores[token_id] += bias
        _penalise(scores, run)
        extra_args, num_prompt_tokens = run.row.sampling.extra_args, run.row.num_prompt_tokens
        failure = processors.apply(scores, run.known_tokens, num_prompt_tokens, extra_args)
        if failure:
            failures[index] = failure
            scores.fill_(NEVER)
    return Constrained(logits, failures)


def _apply_grammar_masks(logits: Tensor, runs: Sequence[TokenRun], indices: list[int]) -> None:
    allowed = torch.stack([mask for index in indices if (mask := runs[index].allowed) is not None])
    logits[indices] = logits[indices].masked_fill(~allowed.to(logits.device), NEVER)


def _is_constrained(run: TokenRun) -> bool:
    sampling = run.row.sampling
    return bool(
        sampling.allowed_token_ids is not None
        or sampling.banned_token_ids
        or sampling.banned_sequences
        or sampling.logit_bias
        or _num_outputs(run) < sampling.min_tokens
        or _has_penalty(sampling)
        or sampling.extra_args
    )


def _num_outputs(run: TokenRun) -> int:
    return run.end - run.row.num_prompt_tokens


def _has_penalty(sampling: SamplingParams) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def _forbid(scores: Tensor, run: TokenRun, eos_token_ids: tuple[int, ...]) -> None:
    sampling = run.row.sampling
    if sampling.allowed_token_ids is not None:
        allowed = _indices(sampling.allowed_token_ids, scores)
        kept = scores[allowed]
        scores.fill_(NEVER)
        scores[allowed] = kept
    scores[_indices(sampling.banned_token_ids, scores)] = NEVER
    banned = _last_tokens_of_banned(sampling.banned_sequences, run.known_tokens)
    scores[_indices(banned, scores)] = NEVER
    if _num_outputs(run) < sampling.min_tokens:
        # Tokens that would end the generation; with ignore_eos, eos tokens do not end it.
        stops = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))
        _forbid_stops(scores, _indices(stops, scores), has_grammar=run.allowed is not None)


def _last_tokens_of_banned(sequences: Sequence[tuple[int, ...]], known_tokens: Ints) -> list[int]:
    """Return the last token of each banned sequence whose other tokens are the newest tokens."""
    longest = max(map(len, sequences), default=0)
    known = known_tokens[max(0, len(known_tokens) + 1 - longest) :].tolist()
    return [last for *before, last in sequences if not before or known[-len(before) :] == before]


def _forbid_stops(scores: Tensor, stops: Tensor, *, has_grammar: bool) -> None:
    """Forbid tokens that end the generation, unless the grammar allows no other token."""
    kept = scores[stops]
    scores[stops] = NEVER
    if has_grammar and scores.max() == NEVER:
        scores[stops] = kept


def _penalise(scores: Tensor, run: TokenRun) -> None:
    """Apply penalties: repetition to prompt and outputs, presence and frequency to outputs only."""
    sampling = run.row.sampling
    if not _has_penalty(sampling):
        return
    known = torch.from_numpy(run.known_tokens).to(scores.device)
    if sampling.repetition_penalty != 1.0:
        seen = known.unique()
        before, penalty = scores[seen], sampling.repetition_penalty
        scores[seen] = torch.where(before > 0, before / penalty, before * penalty)
    outputs, counts = known[run.row.num_prompt_tokens :].unique(return_counts=True)
    scores[outputs] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _indices(token_ids: Collection[int], scores: Tensor) -> Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64, device=scores.device)
