"""Constraints, logit bias and penalties of requests, applied to rows of logits by torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.model.pass_layout import Ints, TokenRun
from baton.engine.runner.model.token_counts import TokenCounts
from baton.engine.runner.sampling.logits_processors import NEVER
from baton.engine.runner.sampling.sampling import SampledRows
from baton.engine.structured_output.grammar import Bits, num_words


def mask_rows(scores: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Forbid the tokens of these rows whose bit is not set."""
    allowed = unpack_bits(bits, scores.shape[1])
    scores[rows] = scores[rows].masked_fill(~allowed, NEVER)


MaskRows = Callable[[Tensor, Tensor, Tensor], None]  # of scores, by bits: see `mask_rows`


class Constraints:
    """Constraints of a step's rows. They are applied once the inputs have been sent."""

    def __init__(
        self,
        rows: SampledRows,
        inputs: StepInputs,
        mask: MaskRows = mask_rows,
        copy: Callable[[Tensor], Tensor] = torch.clone,
    ) -> None:
        runs, eos_token_ids = rows.runs, rows.eos_token_ids
        masked = [index for index, run in enumerate(runs) if run.allowed is not None]
        self._grammar_mask = _GrammarMask.of(runs, masked, inputs) if masked else None
        self._mask, self._copy = mask, copy
        self._edits = [
            (index, _RowEdits.of(run, eos_token_ids, inputs))
            for index, run in enumerate(runs)
            if is_constrained(run)
        ]

    def apply(self, logits: Tensor) -> Tensor:
        """Return a modified copy if any row has constraints, else the logits themselves."""
        if not (self._grammar_mask or self._edits):
            return logits
        scores = self._copy(logits)
        if self._grammar_mask is not None:
            self._mask(scores, *self._grammar_mask)
        for index, edits in self._edits:
            edits.apply(scores[index])
        return scores


def is_constrained(run: TokenRun) -> bool:
    """Return whether the row's logits are modified, except by a grammar mask."""
    return run.row.sampling.edits_logits or is_below_min_tokens(run)


def is_below_min_tokens(run: TokenRun) -> bool:
    return run.end - run.row.num_prompt_tokens < run.row.sampling.min_tokens


def depends_on_tokens(row: PlanRow) -> bool:
    """Return whether sampling a token needs those before it, the newest included."""
    sampling = row.sampling
    return bool(
        row.grammar is not None
        or sampling.banned_sequences
        or sampling.extra_args
        or sampling.has_penalty
    )


def forbidden_tokens(run: TokenRun) -> Sequence[int]:
    """Return the banned tokens, and the last tokens of banned sequences that have begun."""
    sampling = run.row.sampling
    banned = _last_tokens_of_banned(sampling.banned_sequences, run.known_tokens)
    return (*sampling.banned_token_ids, *banned)


def _last_tokens_of_banned(sequences: Sequence[tuple[int, ...]], known_tokens: Ints) -> list[int]:
    """Return the last token of each banned sequence whose other tokens are the newest tokens."""
    longest = max(map(len, sequences), default=0)
    known = known_tokens[max(0, len(known_tokens) + 1 - longest) :].tolist()
    return [last for *before, last in sequences if not before or known[-len(before) :] == before]


def stop_tokens(run: TokenRun, eos_token_ids: tuple[int, ...]) -> Sequence[int]:
    """Return the tokens that would end the generation before it has `min_tokens`."""
    if not is_below_min_tokens(run):
        return ()
    sampling = run.row.sampling
    # With ignore_eos, eos tokens do not end it.
    return (*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))


def token_mask(run: TokenRun, eos_token_ids: tuple[int, ...], vocab_size: int) -> Bits | None:
    """Return the tokens that a row allows as a bitmask, or None if it allows all."""
    listed = run.row.sampling.allowed_token_ids
    forbidden, stops = forbidden_tokens(run), stop_tokens(run, eos_token_ids)
    if listed is None and not forbidden and not stops:
        return run.allowed
    allowed = np.ones(num_words(vocab_size) * 32, dtype=np.bool_)
    if run.allowed is not None:
        allowed = np.unpackbits(run.allowed.view(np.uint8), bitorder="little").view(np.bool_)
    if listed is not None:
        allowed &= np.isin(np.arange(len(allowed)), listed)
    allowed[list(forbidden)] = False
    kept = allowed[list(stops)]
    allowed[list(stops)] = False
    if run.allowed is not None and not allowed[:vocab_size].any():
        allowed[list(stops)] = kept  # the grammar allows no other token
    return np.packbits(allowed, bitorder="little").view(np.int32)


class _GrammarMask(NamedTuple):
    rows: Tensor
    bits: Tensor  # [masked rows, words]; in int32, the lowest bit first

    @classmethod
    def of(cls, runs: Sequence[TokenRun], masked: list[int], inputs: StepInputs) -> _GrammarMask:
        bits = np.stack([mask for index in masked if (mask := runs[index].allowed) is not None])
        return cls(inputs.put(np.array(masked, dtype=np.int64)), inputs.put(bits))


def unpack_bits(bits: Tensor, vocab_size: int) -> Tensor:
    """Unpack bit masks, [rows, words], into booleans, [rows, vocab_size]."""
    if bits.device.type == "cpu":
        # Ten times faster than torch.
        unpacked = np.unpackbits(bits.numpy().view(np.uint8), axis=-1, bitorder="little")
        return torch.from_numpy(unpacked[:, :vocab_size].view(np.bool_))
    places = torch.arange(32, dtype=torch.int32, device=bits.device)
    flags = (bits[:, :, None] >> places).bitwise_and_(1).flatten(1)
    return flags[:, :vocab_size] != 0


class _RowEdits(NamedTuple):
    """Changes to a row of logits, in this order."""

    allowed: Tensor | None
    forbidden: Tensor | None
    stops: _Stops | None
    bias: _Bias | None
    penalties: _Penalties | None

    @classmethod
    def of(cls, run: TokenRun, eos_token_ids: tuple[int, ...], inputs: StepInputs) -> _RowEdits:
        sampling = run.row.sampling
        stops = _token_ids(stop_tokens(run, eos_token_ids), inputs)
        return cls(
            _token_ids(sampling.allowed_token_ids or (), inputs),
            _token_ids(forbidden_tokens(run), inputs),
            None if stops is None else _Stops(stops, has_grammar=run.allowed is not None),
            _Bias.of(sampling, inputs) if sampling.logit_bias else None,
            _Penalties.of(run, inputs) if sampling.has_penalty else None,
        )

    def apply(self, scores: Tensor) -> None:
        if self.allowed is not None:
            kept = scores[self.allowed]
            scores.fill_(NEVER)
            scores[self.allowed] = kept
        if self.forbidden is not None:
            scores.index_fill_(0, self.forbidden, NEVER)
        for edit in (self.stops, self.bias, self.penalties):
            if edit is not None:
                edit.apply(scores)


class _Stops(NamedTuple):
    """Tokens that end the generation, forbidden unless the grammar allows no other token."""

    token_ids: Tensor
    has_grammar: bool

    def apply(self, scores: Tensor) -> None:
        stops = self.token_ids
        if not self.has_grammar:
            scores.index_fill_(0, stops, NEVER)
            return
        kept = scores[stops]
        scores.index_fill_(0, stops, NEVER)
        is_empty = scores.amax() == NEVER
        scores[stops] = kept.masked_fill(~is_empty, NEVER)


class _Bias(NamedTuple):
    token_ids: Tensor
    values: Tensor

    @classmethod
    def of(cls, sampling: SamplingParams, inputs: StepInputs) -> _Bias:
        biases = sampling.logit_bias
        token_ids = np.fromiter(biases, dtype=np.int64, count=len(biases))
        values = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        return cls(inputs.put(token_ids), inputs.put(values))

    def apply(self, scores: Tensor) -> None:
        token_ids = self.token_ids
        scores[token_ids] = scores[token_ids] + self.values


class _Penalties(NamedTuple):
    """Penalties: repetition for prompt and outputs, presence and frequency for outputs only."""

    sampling: SamplingParams
    token_ids: Tensor  # the distinct tokens of both
    counts: Tensor  # of each among the outputs

    @classmethod
    def of(cls, run: TokenRun, inputs: StepInputs) -> _Penalties:
        kept = run.counts or TokenCounts(run.row.num_prompt_tokens)
        token_ids, counts = kept.count(run.known_tokens)
        return cls(run.row.sampling, inputs.put(token_ids), inputs.put(counts))

    def apply(self, scores: Tensor) -> None:
        sampling, token_ids = self.sampling, self.token_ids
        numbers, penalty = scores[token_ids], sampling.repetition_penalty
        if penalty != 1.0:
            numbers = torch.where(numbers > 0, numbers / penalty, numbers * penalty)
        if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
            penalties = sampling.frequency_penalty * self.counts
            penalties = penalties + sampling.presence_penalty
            numbers = torch.where(self.counts > 0, numbers - penalties, numbers)
        scores[token_ids] = numbers


def _token_ids(token_ids: Collection[int], inputs: StepInputs) -> Tensor | None:
    if not token_ids:
        return None
    return inputs.put(np.array(list(token_ids), dtype=np.int64))
