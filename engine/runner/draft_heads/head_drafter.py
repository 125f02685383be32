"""Drafter by a draft head.

A pass over prompts also computes the head's layers, once its tokens are sampled, so that blocks
have the KV of these layers as they have that of the model's. For the tokens of answers, it only
keeps the states that the head reads: the layers are computed when drafts are wanted, or when a
block is full. So an answer without drafts costs one pass of the head per block.

Drafts are drawn with the random numbers of their positions and with the settings of their request,
as the model's own tokens are: they match these as often as the probabilities do, at any
temperature.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.engine.plan import PlanRow, RunResult
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens
from baton.engine.runner.device.step_inputs import StepInputs, make_inputs
from baton.engine.runner.drafting.draft_head import DraftHead
from baton.engine.runner.drafting.drafter import Drafter, DrafterParts
from baton.engine.runner.model.mixers import AttentionPass, ForwardPass
from baton.engine.runner.model.pass_layout import PassLayout, TokenRun
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.spec_decode.proposer import DraftRow, Drafts, PredictionsFirst
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

log = logging.getLogger(__name__)


class HeadDrafter:
    """Implements `Proposer` and `PassDrafter`."""

    def __init__(self, head: DraftHead, parts: DrafterParts) -> None:
        self._head = head
        self._batch = parts.batch
        self._attention = parts.attention
        self._sampler = parts.sampler
        self._grammar_masks = parts.grammar_masks  # from the first row with a grammar on
        self._place = parts.device.torch_device
        self._ropes = Ropes(head.config, self._place, parts.dtype)
        self._inputs = make_inputs(parts.device)
        self._dtype = parts.dtype
        self._later = 1 if head.reads_next_tokens else 0  # places from a token to its input
        self._newest: dict[RequestId, _NewestState] = {}
        self._waiting: dict[RequestId, _WaitingTokens] = {}
        self._rows: dict[RequestId, PlanRow] = {}  # as drafts are sampled

    @property
    def needs_all_tokens(self) -> bool:
        return self._head.needs_all_tokens

    # --- in a pass ------------------------------------------------------------------

    def begin(self, step: Step, inputs: StepInputs) -> DraftHeadPass:
        answers = [index for index in step.sampled if _is_of_answer(step.runs[index])]
        if len(answers) == len(step.runs):
            return DraftHeadPass(self, step.runs)
        if not answers:
            return DraftHeadPass(self, (), self._begin_pass(step.runs, step.layout, inputs))
        prompts = sorted(set(range(len(step.runs))).difference(answers))
        runs = [step.runs[index] for index in prompts]
        starts, counts = step.layout.query_starts, step.layout.num_queries
        spans = [np.arange(starts[index], starts[index] + counts[index]) for index in prompts]
        return DraftHeadPass(
            self,
            [step.runs[index] for index in answers],
            self._begin_pass(runs, self._batch.layout_of(runs), inputs),
            answer_places=inputs.put(starts[answers]),
            prompt_places=inputs.put(np.concatenate(spans)),
        )

    def row_of(self, request_id: RequestId) -> PlanRow | None:
        return self._batch.find_row(request_id)

    def states_of(self, hidden_states: HiddenStates) -> Tensor | None:
        """Return what the head reads of the tokens of a pass; None if it reads no states."""
        return self._head.states_of(hidden_states)

    def compute_prompts(
        self, begun: LayerPass, states: Tensor | None, sampled: SampledTokens | None
    ) -> Tensor:
        """Compute the layers for prompts, whose next tokens may have just been sampled."""
        if sampled is not None and self._head.reads_next_tokens:
            ends = begun.layout.last_token_indices(np.arange(len(begun.runs))).tolist()
            places = {(run.slot, run.end): end for run, end in zip(begun.runs, ends, strict=True)}
            sources = [i for i, run in enumerate(sampled.runs) if (run.slot, run.end) in places]
            runs = [sampled.runs[index] for index in sources]
            into = [places[run.slot, run.end] for run in runs]
            begun.token_ids[into] = sampled.token_ids[sources]
        return self._compute(begun, states)

    def note_prompt(self, run: TokenRun, state: Tensor, result: RunResult) -> None:
        """Keep the state after a prompt, also for the node that gets the request."""
        request_id = run.row.request_id
        self._newest[request_id] = _NewestState(run.end + self._later, state)
        if self._head.reads_next_tokens:
            state_bytes = state.view(torch.uint8).cpu().numpy().tobytes()
            result.draft_states[request_id] = state_bytes

    def note_answer(self, run: TokenRun, num_tokens: int, states: Sequence[Tensor]) -> bool:
        """Keep tokens, the last of the run first, and their states, to be computed later.

        Returns whether they have filled a block.
        """
        request_id, first = run.row.request_id, run.end - 1
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.end != first:
            waiting = self._waiting[request_id] = _WaitingTokens(first)
        waiting.end += num_tokens
        waiting.states += states
        block_size = self._batch.block_size
        return waiting.end // block_size > waiting.first // block_size

    def _begin_pass(
        self, runs: Sequence[TokenRun], layout: PassLayout, inputs: StepInputs
    ) -> LayerPass:
        """Put the arrays of a pass. Inputs that are not known yet are undefined."""
        later = self._later
        spans = [(run.end - run.num_tokens + later, run.end + later) for run in runs]
        tokens = [run.tokens[first:end] for run, (first, end) in zip(runs, spans, strict=True)]
        attention = self._attention.begin(layout, inputs)
        token_ids, positions = inputs.put(np.concatenate(tokens)), inputs.put(layout.positions)
        return LayerPass(runs, layout, token_ids, attention, positions)

    def _compute(self, begun: LayerPass, states: Tensor | None) -> Tensor:
        """Compute the layers from states of the model."""
        return self._forward(begun, None if states is None else self._head.inputs_of(states))

    def _forward(self, begun: LayerPass, states: Tensor | None) -> Tensor:
        angles = self._ropes.angles(begun.positions, None, int(begun.layout.positions.max()) + 1)
        forward_pass = ForwardPass(angles, begun.attention)
        return self._head.forward(begun.token_ids, states, begun.positions, forward_pass)

    # --- between passes -------------------------------------------------------------

    def complete_blocks(self, request_ids: Iterable[RequestId]) -> None:
        """Compute the layers for answers that have filled a block. A failure costs only drafts."""
        try:
            with torch.inference_mode():
                self.catch_up(request_ids)
        except Exception as failure:
            log.error("the draft head fails: later drafts will be worse", exc_info=failure)

    def catch_up(self, request_ids: Iterable[RequestId], *, is_to_draft: bool = False) -> None:
        """Compute the layers for tokens of answers that wait for it.

        Before drafts, a head that reads no states also computes the newest token.
        """
        runs: list[TokenRun] = []
        for request_id in request_ids:
            newest, waiting = self._batch.newest_run(request_id), self._waiting.get(request_id)
            num_tokens, end = 0, newest.end - 1
            if waiting is not None:
                num_tokens, end = waiting.end - waiting.first, waiting.end
            if is_to_draft and not self._head.reads_next_tokens:
                num_tokens, end = num_tokens + newest.end - end, newest.end
            if num_tokens:
                runs.append(newest._replace(num_tokens=num_tokens, end=end))
        if not runs:
            return
        runs.sort(key=lambda run: run.num_tokens != 1)
        states: list[Tensor] = []
        for run in runs:
            if (waiting := self._waiting.pop(run.row.request_id, None)) is not None:
                states += waiting.states
        layout = self._batch.layout_of(runs)
        self._inputs.begin()
        begun = self._begin_pass(runs, layout, self._inputs)
        self._inputs.send()
        computed = self._compute(begun, torch.stack(states) if states else None)
        ends = layout.last_token_indices(np.arange(len(runs))).tolist()
        for run, place in zip(runs, ends, strict=True):
            newest_state = _NewestState(run.end + self._later, computed[place])
            self._newest[run.row.request_id] = newest_state

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        wanted: dict[RequestId, int] = {}
        rows = list(rows)
        for row in rows:
            if length := min(row.max_tokens, max_tokens):
                wanted[row.request_id] = length
                max_tokens -= length
        if not wanted:
            return {}
        with torch.inference_mode():
            self.catch_up(wanted, is_to_draft=True)
            drafting = [
                _Drafting(row.request_id, state, wanted[row.request_id])
                for row in rows
                if row.request_id in wanted and (state := self._state_after(row)) is not None
            ]
            if drafting:
                self._draft(drafting)
        return {each.request_id: each.tokens for each in drafting}

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        for request_id in rows:
            self._newest.pop(request_id, None)
            self._waiting.pop(request_id, None)
            self._rows.pop(request_id, None)

    def _state_after(self, row: DraftRow) -> Tensor | None:
        """Return the state after the newest token, which another node may have computed."""
        kept = self._newest.get(row.request_id)
        if kept is not None:
            return kept.state if kept.num_known == len(row.known_tokens) else None
        received = self._batch.newest_run(row.request_id).row
        size = self._head.config.hidden_size
        is_newest = len(received.token_ids) == len(row.known_tokens)
        if not is_newest or len(received.draft_state) != size * self._dtype.itemsize:
            return None
        state = torch.frombuffer(bytearray(received.draft_state), dtype=self._dtype)
        return state.to(self._place)

    def _draft(self, drafting: Sequence[_Drafting]) -> None:
        """Add one token after the other to all drafts, until they have their lengths."""
        states = torch.stack([each.state for each in drafting])
        while True:
            found = [(i, run) for i, each in enumerate(drafting) if (run := self._run(each))]
            if not found:
                return
            kept, runs = [index for index, _ in found], [run for _, run in found]
            drafting, states = [drafting[index] for index in kept], states[kept]
            if drafting[0].tokens:  # all have as many
                states = self._advance(runs, states)
            for each, run, token_id in zip(drafting, runs, self._choose(runs, states), strict=True):
                run.tokens[run.end] = token_id
                each.tokens.append(token_id)

    def _run(self, drafting: _Drafting) -> TokenRun | None:
        """Return the run after which the next draft is sampled; None if there is none."""
        if len(drafting.tokens) >= drafting.length:
            return None
        newest = self._batch.newest_run(drafting.request_id)
        row = self._rows.get(drafting.request_id)
        if row is None:
            row = self._rows[drafting.request_id] = _as_drafted(newest.row)
        run = newest._replace(row=row, end=newest.end + len(drafting.tokens))
        if row.grammar is None:
            return run
        allowed = self._grammar_masks().mask_after(run, newest)
        return None if allowed is None else run._replace(allowed=allowed)

    def _choose(self, runs: Sequence[TokenRun], states: Tensor) -> list[int]:
        logits = self._head.logits(states)
        self._inputs.begin()
        begun = self._sampler.begin(runs, logits.shape[1], self._inputs)
        self._inputs.send()
        chosen: list[int] = self._sampler.launch(begun, logits).token_ids.tolist()
        return chosen

    def _advance(self, runs: Sequence[TokenRun], states: Tensor) -> Tensor:
        """Compute the layers with the newest drafts, from the states of the head before them."""
        runs = [run._replace(end=run.end - self._later) for run in runs]
        self._inputs.begin()
        begun = self._begin_pass(runs, self._batch.layout_of(runs), self._inputs)
        self._inputs.send()
        return self._forward(begun, states)


class LayerPass(NamedTuple):
    """Runs and arrays of a pass over the head's layers."""

    runs: Sequence[TokenRun]
    layout: PassLayout
    token_ids: Tensor  # the input of each token
    attention: AttentionPass
    positions: Tensor


class _NewestState(NamedTuple):
    """State of the head from which a sequence of `num_known` tokens is continued."""

    num_known: int
    state: Tensor


@dataclass(slots=True, eq=False)
class _WaitingTokens:
    """Tokens of an answer for which the layers are not computed yet."""

    first: int  # position
    end: int = field(init=False)
    states: list[Tensor] = field(default_factory=list)  # that the head reads, by token

    def __post_init__(self) -> None:
        self.end = self.first


@dataclass(slots=True, eq=False)
class _Drafting:
    request_id: RequestId
    state: Tensor
    length: int
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class DraftHeadPass:
    """Implements `DraftPass`."""

    drafter: HeadDrafter
    answers: Sequence[TokenRun]  # each of one token
    prompt_pass: LayerPass | None = None
    # In the flat batch. None: all of its tokens are of answers, or of prompts.
    answer_places: Tensor | None = None
    prompt_places: Tensor | None = None
    answer_states: Tensor | None = None  # that the head reads, by run
    prompt_states: Tensor | None = None  # of the head, by token

    def launch(self, hidden_states: HiddenStates, sampled: SampledTokens | None) -> None:
        states = prompt_states = self.drafter.states_of(hidden_states)
        if states is not None and self.answers:
            self.answer_states = states
            if self.answer_places is not None:
                self.answer_states = states[self.answer_places]
                prompt_states = states[self.prompt_places]
        if self.prompt_pass is not None:
            self.prompt_states = self.drafter.compute_prompts(
                self.prompt_pass, prompt_states, sampled
            )

    def commit(self, result: RunResult) -> None:
        if self.prompt_pass is not None:
            self._commit_prompts(self.prompt_pass, result)
        if self.answers:
            self._commit_answers(result)

    def _commit_prompts(self, launched: LayerPass, result: RunResult) -> None:
        assert self.prompt_states is not None
        ends = launched.layout.last_token_indices(np.arange(len(launched.runs))).tolist()
        for run, place in zip(launched.runs, ends, strict=True):
            if run.row.request_id in result.token_ids:  # the prompt has ended
                self.drafter.note_prompt(run, self.prompt_states[place].clone(), result)

    def _commit_answers(self, result: RunResult) -> None:
        places = {(run.slot, run.end): place for place, run in enumerate(self.answers)}
        first: dict[RequestId, TokenRun] = {}
        for run in self.answers:
            found = first.get(run.row.request_id)
            if found is None or run.end < found.end:
                first[run.row.request_id] = run
        full: list[RequestId] = []
        for request_id, run in first.items():
            num_accepted = len(result.token_ids.get(request_id, ()))
            if not num_accepted or self.drafter.row_of(request_id) is not run.row:
                continue
            states: list[Tensor] = []
            if self.answer_states is not None:
                ends = range(run.end, run.end + num_accepted)
                states = [self.answer_states[places[run.slot, end]] for end in ends]
            if self.drafter.note_answer(run, num_accepted, states):
                full.append(request_id)
        if full:
            self.drafter.complete_blocks(full)


def _is_of_answer(run: TokenRun) -> bool:
    return run.num_tokens == 1 and run.end > run.row.num_prompt_tokens


def _as_drafted(row: PlanRow) -> PlanRow:
    """Return a row without what only the model's own tokens have."""
    return replace(row, sampling=replace(row.sampling, logprobs=None, extra_args={}))


def make_head_drafter(parts: DrafterParts) -> Drafter:
    assert parts.head is not None
    drafter = HeadDrafter(parts.head, parts)
    return Drafter(PredictionsFirst(SuffixProposer(parts.speculation), drafter), drafter)
