"""Forward passes of the decoder: puts their arrays, launches them, awaits their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from torch import Tensor

from baton.core.ids import RequestId
from baton.engine.errors import OutOfOrder
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.attention.paged_attention import PagedAttention
from baton.engine.runner.batch.encodings import MediaRows
from baton.engine.runner.batch.input_batch import Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens
from baton.engine.runner.device.device import Device, FencedHook
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.drafting.drafter import DraftPass
from baton.engine.runner.drafting.spec_decoder import SpecDecoder
from baton.engine.runner.model.adapters import Selection
from baton.engine.runner.model.decoder import CausalLm, GivenRows
from baton.engine.runner.model.grid_positions import grid_positions
from baton.engine.runner.model.mixers import AttentionPass, Ends, ForwardPass, LinearAttentionPass
from baton.engine.runner.model.pass_layout import Ints, PassLayout
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.passes.decode_graphs import DecodeBatch
from baton.engine.runner.sampling.logprobs import PackedPeaks
from baton.engine.runner.sampling.output_heads import HeadPass, HiddenStates
from baton.engine.runner.state.linear_attention import LinearAttention
from baton.engine.runner.state.state_tables import StateLayout
from baton.kv_transfer.fence import Fence


class PassStep(Protocol):
    """Step as a forward pass reads it: see `Step`."""

    @property
    def token_ids(self) -> Ints: ...

    @property
    def layout(self) -> PassLayout: ...

    @property
    def sampled(self) -> Sequence[int]: ...

    @property
    def seen_lens(self) -> Ints: ...

    @property
    def max_len(self) -> int: ...

    @property
    def states(self) -> StateLayout | None: ...


@dataclass(slots=True, eq=False)
class ForwardPasses:
    """Decoder with the memory that its passes read and write."""

    decoder: CausalLm
    ropes: Ropes
    attention: PagedAttention
    linear_attention: LinearAttention | None
    max_model_len: int
    adapters: AdapterTable | None = None
    _token_ids: Tensor | None = field(default=None, init=False)

    @property
    def token_ids(self) -> Tensor:
        """Return the input of the pass that was prepared last, before or after it was sent."""
        if self._token_ids is None:
            raise OutOfOrder("no pass was prepared")
        return self._token_ids

    def grid_positions(self, step: Step) -> Ints | None:
        """Return the positions of tokens for M-RoPE; None if they are those of a text."""
        return grid_positions(step.runs) if self.ropes.has_grid_positions else None

    def prepare(
        self,
        step: PassStep,
        inputs: StepInputs,
        hook: FencedHook | None,
        selection: Selection | None,
        media: MediaRows | None = None,
        grid: Ints | None = None,
        *,
        needs_all: bool,
    ) -> Callable[[], HiddenStates]:
        """Prepare a step. If no head needs all tokens, the last layer computes only some.

        `grid` has the positions of tokens where these are not those of a text.
        """
        all_are_sampled = len(step.sampled) == len(step.token_ids)
        sampled = None if all_are_sampled else np.array(step.sampled, dtype=np.int64)
        token_ids = inputs.put(step.token_ids)
        positions = inputs.put(step.layout.positions if grid is None else grid)
        self._token_ids = token_ids
        seen_lens = inputs.put(step.seen_lens) if self.ropes.depends_on_length else None
        indices = None if sampled is None else inputs.put(step.layout.last_token_indices(sampled))
        ends = None if needs_all else self._ends(step, sampled, indices, inputs)
        attention, linear_attention = self._begin_mixers(step.layout, step.states, inputs)
        groups = None
        if selection is not None and self.adapters is not None:
            groups = self.adapters.put(selection, inputs)
        given = None
        if media is not None:
            rows, *levels = media.rows.split(self.decoder.config.hidden_size, dim=1)
            given = GivenRows(inputs.put(media.tokens), rows, levels)

        def launch() -> HiddenStates:
            angles = self.ropes.angles(positions, seen_lens, step.max_len)
            forward_pass = ForwardPass(
                angles, attention, linear_attention, groups, positions=positions
            )
            hidden_states = self.decoder.forward(token_ids, forward_pass, hook, ends, given)
            if not needs_all:
                return HiddenStates(hidden_states)
            wanted = hidden_states if indices is None else hidden_states[indices]
            return HiddenStates(wanted, hidden_states)

        return launch

    def prepare_decode(
        self, logits: Tensor, batch: DecodeBatch, inputs: StepInputs
    ) -> Callable[[], HiddenStates]:
        """Prepare a step whose launches a graph can capture. `logits`: memory for those of it."""
        token_ids, positions = inputs.put(batch.token_ids), inputs.put(batch.layout.positions)
        self._token_ids = token_ids
        attention, linear_attention = self._begin_mixers(batch.layout, batch.states, inputs)
        groups = None
        if batch.adapters is not None and self.adapters is not None:
            groups = self.adapters.put_decode(batch.adapters, inputs)

        def launch() -> HiddenStates:
            # A graph keeps the table of angles, so that it must have all positions.
            angles = self.ropes.angles(positions, None, self.max_model_len)
            forward_pass = ForwardPass(angles, attention, linear_attention, groups)
            hidden_states = self.decoder.forward(token_ids, forward_pass, None)
            own = self.decoder.logits(hidden_states, logits[: len(token_ids)])
            peaks = PackedPeaks.of(self.decoder.ops.find_peaks(own))
            return HiddenStates(hidden_states, logits=own, peaks=peaks)

        return launch

    def _ends(
        self, step: PassStep, sequences: Ints | None, indices: Tensor | None, inputs: StepInputs
    ) -> Ends | None:
        if sequences is None or indices is None:
            return None
        layout = step.layout.restrict_to_last_tokens(sequences)
        return Ends(indices, self.attention.begin(layout, inputs))

    def _begin_mixers(
        self, layout: PassLayout, states: StateLayout | None, inputs: StepInputs
    ) -> tuple[AttentionPass, LinearAttentionPass | None]:
        linear_attention = None
        if self.linear_attention is not None and states is not None:
            linear_attention = self.linear_attention.begin(states, inputs)
        return self.attention.begin(layout, inputs), linear_attention


@dataclass(slots=True, eq=False)
class PendingPass:
    """Implements `Pending`. Its result is computed once, by `finish`."""

    step: Step
    heads: Sequence[HeadPass]
    fence: Fence  # after all that was launched
    finish: Callable[[PendingPass], RunResult]
    can_be_followed: bool  # before it is collected, by passes that can have no drafts
    spec_decoder: SpecDecoder | None = None
    is_followed: bool = False
    began_s: float | None = None  # when its drafts were begun; None: another pass was running
    encode_s: Mapping[RequestId, float] = field(default_factory=dict)  # before it was launched
    result: RunResult | None = None
    draft_pass: DraftPass | None = None

    @property
    def sampled(self) -> SampledTokens | None:
        """Return the tokens that the next pass takes on the device; None if there are none."""
        return next((head.sampled for head in self.heads), None)

    def allows(self, plan: Plan) -> bool:
        is_pass = bool(plan.num_scheduled_tokens) and not plan.is_retry
        can_draft = self.spec_decoder is not None and self.spec_decoder.can_draft(plan)
        return self.can_be_followed and is_pass and not can_draft

    def collect(self) -> RunResult:
        if self.result is None:
            self.result = self.finish(self)
            self.heads = ()
            if self.step.unknown is not None:  # which refers to the pass before
                self.step = replace(self.step, unknown=None)
        return self.result

    def read(self) -> RunResult:
        """Wait for the results, without those of rows that got no token from the pass before."""
        result, unknown = RunResult(encode_s=dict(self.encode_s)), self.step.unknown
        for head in self.heads:
            head.collect(result)
        failed = () if unknown is None else unknown.failed_rows()
        return result.without(failed) if failed else result


@dataclass(frozen=True, slots=True)
class DrainedPass:
    """Implements `Pending`: nothing was launched."""

    device: Device

    def allows(self, plan: Plan) -> bool:
        return False

    def collect(self) -> RunResult:
        self.device.drain()
        return RunResult()
