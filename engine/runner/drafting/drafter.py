"""Drafter: what proposes tokens by a method, and what it can be made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from baton.engine.plan import RunResult
from baton.engine.runner.attention.paged_attention import PagedAttention
from baton.engine.runner.batch.input_batch import PersistentBatch, Step
from baton.engine.runner.batch.unknown_tokens import SampledTokens
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.drafting.draft_head import DraftHead
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.sampling.sampler import Sampler
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import Proposer


class DraftPass(Protocol):
    """Work of a drafter in one pass."""

    def launch(self, hidden_states: HiddenStates, sampled: SampledTokens | None) -> None:
        """Launch it, after the tokens of the pass are sampled."""
        ...

    def commit(self, result: RunResult) -> None:
        """Keep the state of the collected pass. A pass that fails before is repeated."""
        ...


class PassDrafter(Protocol):
    """Computes in each pass, those over prompts included, on prefill nodes, too."""

    @property
    def needs_all_tokens(self) -> bool:
        """Return whether hidden states of more than the sampled tokens are needed."""
        ...

    def begin(self, step: Step, inputs: StepInputs) -> DraftPass:
        """Put the arrays of a step."""
        ...


class Drafter(NamedTuple):
    """Proposes tokens between passes, and can compute in each pass what it proposes from."""

    proposer: Proposer
    in_pass: PassDrafter | None = None


class DrafterParts(NamedTuple):
    """Parts of the runner that a drafter can use."""

    speculation: Speculation
    batch: PersistentBatch
    attention: PagedAttention  # of the layer of the head as well
    sampler: Sampler  # without logits processors
    grammar_masks: Callable[[], GrammarMasks]  # of the model's own tokens
    device: Device
    dtype: torch.dtype
    head: DraftHead | None


# Called once the model is loaded.
MakeDrafter = Callable[[DrafterParts], Drafter]
