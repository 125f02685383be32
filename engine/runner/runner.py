"""The model runner: plans in, tokens out. Owns the weights, the KV tensor and the batch.

What company a request keeps changes none of its decisions: random numbers are keyed by
(seed, position, token), and no row of logits is touched on behalf of another. With native
kernels it does not change a bit of the logits either: a request's tokens are the same alone, in
a batch, after preemption, with a prefix hit and on another node with the same kernels. Torch
adds up in another order for another number of rows; there the tokens are the same unless two are
as near as rounding: next to never in float32, now and then in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from engine.errors import PassHookFailed
from engine.plan import Plan, RunResult
from engine.runner.attention import PagedAttention
from engine.runner.batch import NO_DRAFTS, PersistentBatch, RowFacts, Step
from engine.runner.drafted_rows import DraftedRows, Drafts, standing
from engine.runner.facts import NO_LAYER, KvMemory, ModelInfo, PassHook
from engine.runner.fences import Fences, fences_of
from engine.runner.grammar_masks import GrammarMasks
from engine.runner.kv_cache import describe
from engine.runner.logprobs import token_logprobs
from engine.runner.model import Decoder, Ends
from engine.runner.processors import NO_PROCESSORS, Processors
from engine.runner.prompt_logprobs import PromptLogprobs
from engine.runner.rope import Rope
from engine.runner.sampler import Choice, Sampler, SampleRow
from engine.speculation import Speculation
from kv_transfer.types import BlockId

BLOCKS_READ_AT_ONCE = 32


class TorchRunner:
    """Keeps to the `Runner` Protocol; holds its memory from `with` to the end of the block."""

    def __init__(
        self,
        info: ModelInfo,
        decoder: Decoder,
        rope: Rope,
        kv: Tensor,
        batch: PersistentBatch,
        attention: PagedAttention,
        speculation: Speculation | None = None,
        processors: Processors = NO_PROCESSORS,
    ) -> None:
        self.info = info
        self.kv_memory: KvMemory = describe(kv)
        self.speculation = speculation
        self.processors = processors
        self.hook: PassHook | None = None
        self.fences = fences_of(kv.device)
        self.decoder = decoder
        self._rope = rope
        self._kv = kv
        self._batch = batch
        self._attention = attention
        self.sampler = Sampler(info.eos_token_ids, processors, decoder.peaks)
        self._prompts = PromptLogprobs(decoder)
        self._grammars = GrammarMasks(info.vocab_size)
        self._drafted_rows = None if speculation is None else DraftedRows(batch, speculation)

    def __enter__(self) -> TorchRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Whoever still holds the runner must not hold the memory with it.
        del self.decoder, self._kv, self._attention, self._batch, self._prompts

    def run(self, plan: Plan) -> RunResult:
        """One flat forward pass over everything the plan schedules.

        When it returns, the device is done with this pass and those before: their blocks may be
        read by the wire, or granted to a peer.
        """
        result = self._run(plan)
        self.fences.drain()
        return result

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """The bytes of these blocks in order, copied from the device behind all that was launched.

        For digests of memory that the CPU cannot read.
        """
        for start in range(0, len(block_ids), BLOCKS_READ_AT_ONCE):
            ids = torch.tensor(block_ids[start : start + BLOCKS_READ_AT_ONCE])
            copied = self._kv[ids.to(self._kv.device)].flatten().view(torch.uint8).cpu()
            yield copied.numpy().data

    def _run(self, plan: Plan) -> RunResult:
        if not plan.is_retry:  # what a failed pass makes the runner drop comes back
            self._prompts.forget(plan.dropped)
        self._batch.apply(plan)
        self._grammars.apply(plan)
        if self._drafted_rows is not None:
            self._drafted_rows.forget(plan.dropped)
        if not plan.num_scheduled_tokens:
            return RunResult()
        drafts = self._draft(plan)
        step = self._batch.step(plan.num_scheduled_tokens, drafts)
        with torch.inference_mode():
            self._prompts.begin_pass()
            states = self._forward(step, plan.is_retry)
            self._batch.advance(step)
            result = self._answer(step, states, drafts)
            self._prompts.end_pass()
            return result

    def _draft(self, plan: Plan) -> Drafts:
        if self._drafted_rows is None:
            return NO_DRAFTS
        return self._drafted_rows.drafts(plan.num_scheduled_tokens, plan.max_draft_tokens)

    def _forward(self, step: Step, is_retry: bool) -> Tensor:
        device = self._kv.device
        positions = torch.from_numpy(step.layout.positions).to(device)
        seen = torch.from_numpy(step.seen_lens).to(device) if self._rope.is_dynamic else None
        return self.decoder.forward(
            torch.from_numpy(step.token_ids).to(device),
            self._rope.angles(positions, seen),
            self._attention.begin(step.layout),
            None if self.hook is None else _FencedHook(self.hook, self.fences, is_retry),
            self._ends(step),
        )

    def _ends(self, step: Step) -> Ends | None:
        """None if the states of all tokens are asked for."""
        if len(step.sampled) == len(step.token_ids) or self._prompts.are_asked(step):
            return None
        sampled = np.array(step.sampled, dtype=np.int64)
        attention = self._attention.begin(step.layout.of_last_tokens(sampled))
        return Ends(self._places(step), attention)

    def _places(self, step: Step) -> Tensor:
        """Of the tokens that a sample follows."""
        sampled = np.array(step.sampled, dtype=np.int64)
        return torch.from_numpy(step.layout.last_tokens(sampled)).to(self._kv.device)

    def _answer(self, step: Step, states: Tensor, drafts: Drafts) -> RunResult:
        result = RunResult()
        if self._prompts.are_asked(step):
            self._prompts.answer(step, states, self._batch, result)
            states = states[self._places(step)]
        if step.sampled:
            self._sample(step, self.decoder.logits(states), drafts, result)
        if self._drafted_rows is not None:
            self._drafted_rows.judge(drafts, result)
        return result

    def _sample(self, step: Step, logits: Tensor, drafts: Drafts, result: RunResult) -> None:
        runs = [step.runs[place] for place in step.sampled]
        rows = [run.row for run in runs]
        asked = [self._sample_row(run.row, run.end) for run in runs]
        asked = self._grammars.applied(rows, asked, result.refusals)
        choices = self.sampler.choose(logits, asked)
        places = standing(rows, choices, drafts)
        _add_logprobs(logits, rows, choices, places, result)
        for place in places:
            request_id, choice = rows[place].request_id, choices[place]
            if request_id in result.refusals:
                continue
            if choice.token_id is None:
                reasons = result.refusals if choice.is_refused else result.errors
                reasons[request_id] = choice.error
            elif request_id not in result.errors:
                result.token_ids.setdefault(request_id, []).append(choice.token_id)
        for request_id, token_ids in result.token_ids.items():
            self._batch.append(request_id, token_ids)

    def _sample_row(self, row: RowFacts, num_known: int) -> SampleRow:
        known = self._batch.known_tokens(row, num_known)
        return SampleRow(row.sampling, row.seed, known, row.num_prompt_tokens)


class _FencedHook:
    """Puts a fence behind each layer.

    It keeps failures of the hook apart from those of the pass, and layers of a retry at home.
    """

    def __init__(self, hook: PassHook, fences: Fences, is_retry: bool) -> None:
        self._hook = hook
        self._fences = fences
        self._is_retry = is_retry

    def layer_done(self, layer: int) -> None:
        try:
            # Other rows of the plan, whose blocks wait for the same layer, may not be run yet.
            fence = self._fences.record()
            self._hook.layer_done(NO_LAYER if self._is_retry else layer, fence)
        except Exception as root:
            raise PassHookFailed(root) from root

    def pass_done(self) -> None:
        try:
            self._hook.pass_done()
        except Exception as root:
            raise PassHookFailed(root) from root


def _add_logprobs(
    logits: Tensor,
    rows: list[RowFacts],
    choices: list[Choice],
    places: Sequence[int],
    result: RunResult,
) -> None:
    chosen = [(i, choices[i].token_id) for i in places if rows[i].sampling.logprobs is not None]
    wanted = [(i, token_id) for i, token_id in chosen if token_id is not None]
    if not wanted:
        return
    places = [place for place, _ in wanted]
    num_tops = [rows[place].sampling.logprobs or 0 for place in places]
    found = token_logprobs(logits[places], [token for _, token in wanted], num_tops)
    for place, logprobs in zip(places, found, strict=True):
        result.logprobs.setdefault(rows[place].request_id, []).append(logprobs)
