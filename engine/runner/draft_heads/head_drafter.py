"""Drafter by a draft head.

In each pass, after its tokens are sampled, the head computes the tokens of the pass, so that the
blocks have the KV of its layer as they have that of the model's. Before the next pass, it drafts
from the states of the newest accepted tokens. Drafts are drawn with the random numbers of their
positions and with the settings of their request, as the model's own tokens are: they match these
as often as the probabilities do, at any temperature.
"""

from __future__ import annotations

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
from baton.engine.spec_decode.predictions_first import PredictionsFirst
from baton.engine.spec_decode.proposer import DraftRow, Drafts
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

Place = tuple[int, int]  # slot of a row, and the length of its sequence up to a token


class HeadDrafter:
    """Implements `Proposer` and `PassDrafter`."""

    def __init__(self, head: DraftHead, parts: DrafterParts) -> None:
        self._head = head
        self._batch = parts.batch
        self._attention = parts.attention
        self._sampler = parts.sampler
        self._grammar_masks = parts.grammar_masks  # from the first row with a grammar on
        self._place = parts.device.place
        self._ropes = Ropes(head.config, self._place, parts.dtype)
        self._inputs = make_inputs(parts.device)
        self._dtype = parts.dtype
        self._states: dict[RequestId, _NewestState] = {}
        self._rows: dict[RequestId, PlanRow] = {}  # as drafts are sampled

    @property
    def needs_all_tokens(self) -> bool:
        return self._head.needs_all_tokens

    # --- in a pass ------------------------------------------------------------------

    def begin(self, step: Step, inputs: StepInputs) -> DraftHeadPass:
        later = 1 if self._head.reads_next_tokens else 0
        spans = [(run.end - run.num_tokens + later, run.end + later) for run in step.runs]
        tokens = [run.tokens[first:end] for run, (first, end) in zip(step.runs, spans, strict=True)]
        ends = step.layout.last_token_indices(np.arange(len(step.runs))).tolist()
        places = {(run.slot, run.end): end for run, end in zip(step.runs, ends, strict=True)}
        token_ids = inputs.put(np.concatenate(tokens))
        layer = self._begin_layer(step.layout, inputs)
        return DraftHeadPass(self, step, places, token_ids, layer)

    @property
    def reads_next_tokens(self) -> bool:
        return self._head.reads_next_tokens

    def _begin_layer(self, layout: PassLayout, inputs: StepInputs) -> LayerPass:
        attention, positions = self._attention.begin(layout, inputs), inputs.put(layout.positions)
        return LayerPass(attention, positions, int(layout.positions.max()) + 1)

    def compute(self, token_ids: Tensor, states: Tensor, layer: LayerPass) -> Tensor:
        angles = self._ropes.angles(layer.positions, None, layer.max_len)
        forward_pass = ForwardPass(angles, layer.attention)
        return self._head.forward(token_ids, states, layer.positions, forward_pass)

    def states_of(self, hidden_states: HiddenStates) -> Tensor:
        return self._head.states_of(hidden_states)

    def keep(self, request_id: RequestId, num_known: int, state: Tensor) -> bool:
        """Keep the newest state of a row. Returns whether it is the first one."""
        is_first = request_id not in self._states
        self._states[request_id] = _NewestState(num_known, state)
        return is_first

    # --- between passes -------------------------------------------------------------

    def propose(self, rows: Iterable[DraftRow], max_tokens: int) -> Drafts:
        drafting: list[_Drafting] = []
        for row in rows:
            length = min(row.max_tokens, max_tokens)
            state = self._state_after(row) if length > 0 else None
            if state is not None:
                drafting.append(_Drafting(row.request_id, state, length))
                max_tokens -= length
        if not drafting:
            return {}
        with torch.inference_mode():
            self._draft(drafting)
        return {each.request_id: each.tokens for each in drafting}

    def forget(self, rows: Mapping[RequestId, DraftRow]) -> None:
        for request_id in rows:
            self._states.pop(request_id, None)
            self._rows.pop(request_id, None)

    def _state_after(self, row: DraftRow) -> Tensor | None:
        """Return the state after the newest token, which another node may have computed."""
        kept = self._states.get(row.request_id)
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
            if drafting[0].tokens or not self.reads_next_tokens:  # all have as many
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
        """Compute the layers with the newest tokens, at the positions where they are inputs."""
        before = 1 if self.reads_next_tokens else 0
        layout = self._batch.layout_of([run._replace(end=run.end - before) for run in runs])
        self._inputs.begin()
        layer = self._begin_layer(layout, self._inputs)
        token_ids = self._inputs.put(np.array([run.tokens[run.end - 1] for run in runs]))
        self._inputs.send()
        return self.compute(token_ids, states, layer)


class LayerPass(NamedTuple):
    """Arrays of a pass over the head's layer."""

    attention: AttentionPass
    positions: Tensor
    max_len: int


class _NewestState(NamedTuple):
    """State from which a sequence of `num_known` tokens is continued."""

    num_known: int
    state: Tensor


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
    step: Step
    places: dict[Place, int]  # in the flat batch
    # The input at each place. Undefined where only the device has it, or will have it.
    token_ids: Tensor
    layer: LayerPass
    states: Tensor | None = None

    def launch(self, hidden_states: HiddenStates, sampled: SampledTokens | None) -> None:
        """Compute all tokens of the pass."""
        token_ids, unknown = self.token_ids, self.step.unknown
        if not self.drafter.reads_next_tokens:
            if unknown is not None:
                token_ids[unknown.places.tolist()] = unknown.sampled[unknown.sources.tolist()]
        elif sampled is not None:
            places = [self.places[run.slot, run.end] for run in sampled.runs]
            token_ids[places] = sampled.token_ids
        states = self.drafter.states_of(hidden_states)
        self.states = self.drafter.compute(token_ids, states, self.layer)

    def commit(self, result: RunResult) -> None:
        """Keep the state of the newest accepted token of each row."""
        if self.states is None:
            return
        first_ends: dict[RequestId, tuple[int, int]] = {}
        for run in (self.step.runs[index] for index in self.step.sampled):
            found = first_ends.get(run.row.request_id)
            if found is None or run.end < found[1]:
                first_ends[run.row.request_id] = run.slot, run.end
        for request_id, token_ids in result.token_ids.items():
            slot, first_end = first_ends[request_id]
            end = first_end + len(token_ids) - 1
            place = self.places[slot, end]
            state = self.states[place].clone()
            if self.drafter.keep(request_id, end + 1, state):
                result.draft_states[request_id] = state.view(torch.uint8).cpu().numpy().tobytes()


def _as_drafted(row: PlanRow) -> PlanRow:
    """Return a row without what only the model's own tokens have."""
    return replace(row, sampling=replace(row.sampling, logprobs=None, extra_args={}))


def make_head_drafter(parts: DrafterParts) -> Drafter:
    assert parts.head is not None
    drafter = HeadDrafter(parts.head, parts)
    return Drafter(PredictionsFirst(SuffixProposer(parts.speculation), drafter), drafter)
