"""Output heads: what the runner makes of the hidden states of a pass. The sampler is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from baton.core.output import Failure
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.input_batch import Step
from baton.engine.runner.layout import TokenRun
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.logprobs import token_logprobs
from baton.engine.runner.sampling.sampler import Choice, Sampler
from baton.engine.runner.sampling.spec_decode import accepted_indices


class HiddenStates(NamedTuple):
    """Hidden states of a pass, normalised, in the order of its runs."""

    sampled: Tensor  # [sampled runs, hidden_size], of the last token of each
    by_token: Tensor | None = None  # [tokens, hidden_size], if a head needs all of them


class OutputHead(Protocol):
    """Turns the hidden states of a pass into results of its rows.

    A pass can fail at any point and is then repeated: state that outlives it changes in `commit`.
    """

    def drop_rows(self, plan: Plan) -> None:
        """Forget the rows that leave the batch. A retry adds some of them again."""
        ...

    def needs_all_tokens(self, step: Step) -> bool:
        """Return whether hidden states of more than the sampled tokens are needed."""
        ...

    def collect(self, step: Step, hidden_states: HiddenStates, result: RunResult) -> None:
        """Add the results of this head's rows."""
        ...

    def commit(self) -> None:
        """Keep the state of the collected pass: all heads have added their results."""
        ...


class SamplingHead:
    """Samples the next tokens of rows whose scheduled tokens reach their last known one."""

    def __init__(self, decoder: Decoder, sampler: Sampler, vocab_size: int) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._grammar_masks = GrammarMasks(vocab_size)

    def drop_rows(self, plan: Plan) -> None:
        self._grammar_masks.forget(plan.dropped)

    def needs_all_tokens(self, step: Step) -> bool:
        return False

    def collect(self, step: Step, hidden_states: HiddenStates, result: RunResult) -> None:
        if not step.sampled:
            return
        logits = self._decoder.logits(hidden_states.sampled)
        runs = [step.runs[index] for index in step.sampled]
        runs = self._grammar_masks.apply_masks(runs, result.failures)
        choices = self._sampler.choose(logits, runs)
        accepted = accepted_indices(runs, choices, step.drafts)
        _add_logprobs(logits, runs, choices, accepted, result)
        for index in accepted:
            request_id, choice = runs[index].row.request_id, choices[index]
            if request_id in result.failures:
                continue
            if isinstance(choice, Failure):
                result.failures[request_id] = choice
            else:
                result.token_ids.setdefault(request_id, []).append(choice)

    def commit(self) -> None:
        """Do nothing: a row's matcher consumes its outputs when it is sampled the next time."""


def _add_logprobs(
    logits: Tensor,
    runs: Sequence[TokenRun],
    choices: list[Choice],
    accepted: Sequence[int],
    result: RunResult,
) -> None:
    requested = [(i, choices[i]) for i in accepted if runs[i].row.sampling.logprobs is not None]
    chosen = [(i, choice) for i, choice in requested if not isinstance(choice, Failure)]
    if not chosen:
        return
    indices = [index for index, _ in chosen]
    num_tops = [runs[index].row.sampling.logprobs or 0 for index in indices]
    found = token_logprobs(logits[indices], [token for _, token in chosen], num_tops)
    for index, logprobs in zip(indices, found, strict=True):
        result.logprobs.setdefault(runs[index].row.request_id, []).append(logprobs)
