"""Model runner: turns plans into tokens. Owns the weights, the KV tensor and the batch.

Sampling is batch-invariant: random numbers are keyed by (seed, position, token), and no row of
logits depends on another. The native kernels are batch-invariant too: a request's logits, and so
its tokens, are bit-identical alone, in a batch, after preemption, with a prefix hit and on another
node with the same kernels. Torch sums in an order that depends on the number of rows. There the
tokens are the same unless two logits differ by no more than rounding: almost never in float32,
occasionally in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from mmap import mmap
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import BlockId
from baton.core.output import Failure
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.plan import Plan, RunResult
from baton.engine.runner.attention.kv_conversion import view_blocks, write_converted
from baton.engine.runner.attention.kv_tensor import describe
from baton.engine.runner.attention.paged_attention import PagedAttention
from baton.engine.runner.fences import FencedHook, make_fences
from baton.engine.runner.input_batch import NO_DRAFTS, PersistentBatch, Step, TokenRun
from baton.engine.runner.model.decoder import Decoder, Ends
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.model_info import KvMemory, ModelInfo, PassHook
from baton.engine.runner.sampling.grammar_masks import GrammarMasks
from baton.engine.runner.sampling.logits_processors import NO_PROCESSORS, Processors
from baton.engine.runner.sampling.logprobs import token_logprobs
from baton.engine.runner.sampling.prompt_logprobs import PromptLogprobs
from baton.engine.runner.sampling.sampler import Choice, Sampler
from baton.engine.runner.sampling.spec_decode import Drafts, SpecDecoder, accepted_indices
from baton.engine.runner.state.linear_attention import LinearAttention, LinearAttentionPass
from baton.engine.spec_decode.config import Speculation
from baton.kv_transfer.protocol.conversion import StagedBlocks

READ_CHUNK_BLOCKS = 32


class TorchRunner:
    """Implements the `Runner` Protocol. Releases its memory when the `with` block ends."""

    def __init__(
        self,
        info: ModelInfo,
        decoder: Decoder,
        ropes: Ropes,
        kv: Tensor,
        layout: CacheLayout,
        batch: PersistentBatch,
        attention: PagedAttention,
        speculation: Speculation | None = None,
        processors: Processors = NO_PROCESSORS,
        linear_attention: LinearAttention | None = None,
    ) -> None:
        self.info = info
        self.kv_memory: KvMemory = describe(kv, layout, info.dtype)
        self.speculation = speculation
        self.processors = processors
        self.hook: PassHook | None = None
        self.fences = make_fences(kv.device)
        self.decoder = decoder
        self._ropes = ropes
        self._kv = kv
        self._batch = batch
        self._attention = attention
        self._linear_attention = linear_attention
        self.sampler = Sampler(info.eos_token_ids, processors, decoder.find_peaks)
        self._prompt_logprobs = PromptLogprobs(decoder)
        self._grammar_masks = GrammarMasks(info.vocab_size)
        self._drafted_rows = None if speculation is None else SpecDecoder(batch, speculation)

    def __enter__(self) -> TorchRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A reference to the runner that outlives the block must not keep the memory alive.
        del self.decoder, self._kv, self._attention, self._batch, self._prompt_logprobs
        del self._linear_attention

    def run(self, plan: Plan) -> RunResult:
        """Run one flat forward pass over everything the plan schedules.

        On return the device has finished this pass and all earlier ones: the transport can read
        their blocks, and the KV worker can grant them to a peer.
        """
        result = self._run(plan)
        self.fences.drain()
        return result

    def read_blocks(self, block_ids: Sequence[BlockId]) -> Iterator[memoryview]:
        """Yield the bytes of these blocks in order, copied after all work launched so far.

        Used for digests of memory that the CPU cannot read.
        """
        for start in range(0, len(block_ids), READ_CHUNK_BLOCKS):
            ids = torch.tensor(block_ids[start : start + READ_CHUNK_BLOCKS])
            copied = self._kv[ids.to(self._kv.device)].flatten().view(torch.uint8).cpu()
            yield copied.numpy().data

    def convert_blocks(self, memory: mmap, staged: StagedBlocks) -> None:
        """Convert blocks of a peer, in the staging area's memory, into those of an order."""
        conversion, block_ids = staged.conversion, staged.block_ids
        if block_ids:
            size = conversion.region.block_bytes
            first, count = block_ids[0] * size, len(block_ids) * size
            own = torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=count)
            blocks = view_blocks(own, self._kv, conversion.source)
            skipped = conversion.num_skipped_tokens(staged.order)
            write_converted(blocks, self._kv, staged.order.block_ids, skipped)

    def _run(self, plan: Plan) -> RunResult:
        if not plan.is_retry:  # rows dropped by a failed pass are added again
            self._prompt_logprobs.forget(plan.dropped)
        self._batch.apply(plan)
        self._grammar_masks.forget(plan.dropped)
        if self._drafted_rows is not None:
            self._drafted_rows.forget(plan.dropped)
        if not plan.num_scheduled_tokens:
            return RunResult()
        drafts = self._draft(plan)
        step = self._batch.step(plan.num_scheduled_tokens, drafts, plan.snapshots)
        with torch.inference_mode():
            self._prompt_logprobs.begin_pass()
            hidden_states = self._forward(step, plan.is_retry)
            self._batch.advance(step)
            result = self._make_result(step, hidden_states, drafts)
            self._prompt_logprobs.end_pass()
            return result

    def _draft(self, plan: Plan) -> Drafts:
        if self._drafted_rows is None:
            return NO_DRAFTS
        return self._drafted_rows.drafts(plan.num_scheduled_tokens, plan.max_draft_tokens)

    def _forward(self, step: Step, is_retry: bool) -> Tensor:
        device = self._kv.device
        positions = torch.from_numpy(step.layout.positions).to(device)
        seen = (
            torch.from_numpy(step.seen_lens).to(device) if self._ropes.depends_on_length else None
        )
        return self.decoder.forward(
            torch.from_numpy(step.token_ids).to(device),
            self._ropes.angles(positions, seen),
            self._attention.begin(step.layout),
            None if self.hook is None else FencedHook(self.hook, self.fences, is_retry),
            self._sampled_tokens(step),
            self._begin_linear_attention(step),
        )

    def _begin_linear_attention(self, step: Step) -> LinearAttentionPass | None:
        if self._linear_attention is None or step.states is None:
            return None
        return self._linear_attention.begin(step.states)

    def _sampled_tokens(self, step: Step) -> Ends | None:
        """Return the sampled tokens, or None if the hidden states of all tokens are needed."""
        if len(step.sampled) == len(step.token_ids) or self._prompt_logprobs.is_needed(step):
            return None
        sampled = np.array(step.sampled, dtype=np.int64)
        attention = self._attention.begin(step.layout.restrict_to_last_tokens(sampled))
        return Ends(self._sampled_indices(step), attention)

    def _sampled_indices(self, step: Step) -> Tensor:
        """Return the flat indices of the tokens whose logits are sampled."""
        sampled = np.array(step.sampled, dtype=np.int64)
        return torch.from_numpy(step.layout.last_token_indices(sampled)).to(self._kv.device)

    def _make_result(self, step: Step, hidden_states: Tensor, drafts: Drafts) -> RunResult:
        result = RunResult()
        if self._prompt_logprobs.is_needed(step):
            self._prompt_logprobs.collect(step, hidden_states, result)
            hidden_states = hidden_states[self._sampled_indices(step)]
        if step.sampled:
            self._sample(step, self.decoder.logits(hidden_states), drafts, result)
        if self._drafted_rows is not None:
            self._drafted_rows.report_acceptance(drafts, result)
        return result

    def _sample(self, step: Step, logits: Tensor, drafts: Drafts, result: RunResult) -> None:
        runs = [step.runs[index] for index in step.sampled]
        runs = self._grammar_masks.apply_masks(runs, result.failures)
        choices = self.sampler.choose(logits, runs)
        accepted = accepted_indices(runs, choices, drafts)
        _add_logprobs(logits, runs, choices, accepted, result)
        for index in accepted:
            request_id, choice = runs[index].row.request_id, choices[index]
            if request_id in result.failures:
                continue
            if isinstance(choice, Failure):
                result.failures[request_id] = choice
            else:
                result.token_ids.setdefault(request_id, []).append(choice)
        for request_id, token_ids in result.token_ids.items():
            self._batch.append(request_id, token_ids)


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
