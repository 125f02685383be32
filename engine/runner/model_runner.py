"""Model runner: turns plans into tokens. Owns the weights, the KV tensor and the batch.

Sampling is batch-invariant: random numbers are keyed by (seed, position, token), and no row of
logits depends on another. The native kernels are batch-invariant too, and those in Triton with
`--batch-invariant`: a request's logits, and so its tokens, are bit-identical alone, in a batch,
after preemption, with a prefix hit and on another node with the same kernels. Torch sums in an
order that depends on the number of rows. There the tokens are the same unless two logits differ by
no more than rounding: almost never in float32, occasionally in half precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.plan import NO_MEDIA, MediaOrders, Pending, Plan, RunResult
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.attention.kv_tensor import KvShape, describe
from baton.engine.runner.attention.paged_attention import (
    LayerAttention,
    PagedAttention,
    scales_by_place,
)
from baton.engine.runner.batch.encodings import EncodingBlocks, Encodings, LayerDone, PictureEncoder
from baton.engine.runner.batch.input_batch import NO_DRAFTS, PersistentBatch, Step
from baton.engine.runner.batch.unknown_tokens import TokenGatherer, UnknownTokens
from baton.engine.runner.device.device import Device, FencedHook, GraphPool
from baton.engine.runner.device.graphs import EagerCause, GraphSize, StepShape
from baton.engine.runner.device.step_inputs import StepInputs, make_inputs
from baton.engine.runner.drafting.draft_head import DraftHead
from baton.engine.runner.drafting.drafter import DrafterParts, MakeDrafter, PassDrafter
from baton.engine.runner.drafting.spec_decoder import SpecDecoder
from baton.engine.runner.kernels.choose import Parts
from baton.engine.runner.loaded_runner import CachingRunner
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import CausalLm
from baton.engine.runner.model.pass_layout import empty_layout
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.model_info import ModelInfo
from baton.engine.runner.passes.decode_graphs import DecodeBatch, DecodeGraphs
from baton.engine.runner.passes.forward_passes import DrainedPass, ForwardPasses, PendingPass
from baton.engine.runner.pooling.dense import load_dense
from baton.engine.runner.pooling.pooling_head import PoolingHead
from baton.engine.runner.sampling.logits_processors import Processors
from baton.engine.runner.sampling.output_heads import (
    HeadPass,
    HiddenStates,
    OutputHead,
    SamplingHead,
)
from baton.engine.runner.sampling.prompt_logprobs import PromptLogprobs
from baton.engine.runner.sampling.sampler import Sampler
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import empty_states
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import Drafts

Drafting = tuple[SpecDecoder | None, PassDrafter | None]


class Ranks(Protocol):
    """Other processes, each with a part of the weights, that compute every pass with this one."""

    def allocate(self, kv: KvShape, num_blocks: int) -> Tensor:
        """Return the KV cache, which all processes share, once all have loaded their weights."""
        ...

    def make_adapters(
        self,
        active: ActiveAdapters,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *limits: int,
    ) -> AdapterTable:
        """Return a table whose adapters are loaded into all processes."""
        ...

    def lead(self, passes: ForwardPasses) -> ForwardPasses:
        """Return passes that all processes compute together. They raise RunnerLost."""
        ...

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        """Have a thread call this when another process ends by itself, or has ended."""
        ...

    def read_collectives_s(self) -> float:
        """Return how long passes have exchanged numbers, or waited for them."""
        ...

    def close(self) -> None:
        """End the other processes."""
        ...


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """All that a runner consists of, except for the KV cache, which it allocates."""

    info: ModelInfo
    dtype: torch.dtype
    decoder: CausalLm
    attention: Sequence[LayerAttention]  # of the layers that have it
    kernels: Parts
    device: Device
    kv: KvShape
    state: StateShape | None  # of recurrent layers
    layout: CacheLayout
    batch: PersistentBatch
    processors: Processors
    logprobs_mode: str
    adapters: AdapterTable | None
    speculation: Speculation | None
    drafters: Mapping[str, MakeDrafter]
    has_graphs: bool  # of decode steps
    tower: PictureEncoder | None = None  # None: the node encodes no pictures
    draft_head: DraftHead | None = None
    ranks: Ranks | None = None


class TorchRunner(CachingRunner):
    """Runner of a decoder."""

    def __init__(self, parts: RunnerParts, num_blocks: int) -> None:
        info, decoder, kernels = parts.info, parts.decoder, parts.kernels
        super().__init__(info)
        self.decoder, self.device = decoder, parts.device
        # Padding rows of graphs write into one block more, which belongs to no request.
        kv = _allocate(parts, num_blocks + parts.has_graphs)
        self.kv_memory = describe(kv[:num_blocks], parts.layout, info.dtype)
        self.speculation, self.processors = parts.speculation, parts.processors
        self.graphs: DecodeGraphs[HiddenStates] | None = None
        self.adapters, self._ranks = parts.adapters, parts.ranks
        self.blocks = _make_blocks(parts, kv, num_blocks)
        self._encodings = _make_encodings(parts, kv[:num_blocks])
        self._inputs = make_inputs(self.device)
        self._batch = parts.batch
        attention = kernels.make_attention(kv, parts.attention)
        self._passes = _make_passes(parts, kv, attention)
        make_sampler = partial(
            Sampler,
            info.eos_token_ids,
            find_peaks=decoder.ops.find_peaks,
            sampling=kernels.sampling,
            device=self.device,
        )
        self.sampler = make_sampler(self.processors, logprobs_mode=parts.logprobs_mode)
        pooling = _make_pooling(parts)
        sampling = SamplingHead(decoder, self.sampler, info.vocab_size, self.device)
        drafting: Drafting = None, None
        if self.speculation is not None:
            drafting = _make_drafting(parts, attention, make_sampler(), sampling)
        self._spec_decoder, self._pass_drafter = drafting
        self._heads: tuple[OutputHead, ...] = (sampling, pooling) if pooling else (sampling,)
        self._prompt_head: OutputHead | None = None  # until a row wants prompt logprobs
        self._sampling = kernels.sampling
        self._open: PendingPass | None = None  # that is not collected, and can be followed
        self._gatherer = TokenGatherer(self.device.torch_device)
        # Rows that have ended with the last pass, which a plan made before its end contains.
        self._ended: frozenset[RequestId] = frozenset()

    def __exit__(self, *error: object) -> None:
        if self._ranks is not None:
            self._ranks.close()
        self.blocks.close()
        # A reference to the runner that outlives the block must not keep the memory alive.
        del self.decoder, self.blocks, self._passes, self._batch, self._heads
        self._ranks = None
        del self._prompt_head
        del self._encodings, self.sampler, self._inputs, self.graphs, self._open, self._gatherer

    def capture_graphs(self, pool: GraphPool, sizes: Sequence[GraphSize]) -> None:
        """Capture decode steps of these sizes, the largest first.

        Padding rows write into the block after those of requests, which the mixers must have.
        """
        layout = self.kv_memory.layout
        nothing = DecodeBatch(
            np.zeros(0, dtype=np.int64),
            empty_layout(len(layout.groups)),
            empty_states(layout.num_state_blocks) if layout.has_state else None,
        )
        scratch_block = self.kv_memory.num_blocks
        with torch.inference_mode():
            shape = sizes[0].num_rows, self.info.vocab_size
            logits = torch.empty(shape, dtype=torch.float32, device=self.device.torch_device)
            prepare = partial(self._passes.prepare_decode, logits)
            graphs = DecodeGraphs(self.device, pool, prepare, scratch_block)
            graphs.capture(sizes, nothing)
        self.graphs = graphs
        self.num_passes.clear()

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        if self._ranks is not None:
            self._ranks.when_lost(call)

    def read_collectives_s(self) -> float:
        return 0.0 if self._ranks is None else self._ranks.read_collectives_s()

    def _encode(self, orders: MediaOrders) -> dict[RequestId, float]:
        """Carry out orders about encodings. Returns what `Encodings.apply` does."""
        if self._encodings is None:
            return {}
        with torch.inference_mode():
            return self._encodings.apply(orders, self._progress())

    def launch(self, plan: Plan) -> Pending:
        """Launch one flat forward pass over everything the plan schedules.

        If the pass before is not collected, its tokens are the inputs of this one on the device.
        """
        before = self._follow_open_pass(plan)
        encode_s = {} if plan.media is NO_MEDIA else self._encode(plan.media)
        if self._prompt_head is None and any(row.wants_prompt_logprobs for row in plan.started):
            self._prompt_head = PromptLogprobs(self.decoder, self.device, self._sampling)
            self._heads = (self._prompt_head, *self._heads)
        for head in self._heads:
            head.drop_rows(plan)
        if self._spec_decoder is not None:
            self._spec_decoder.forget(plan.dropped)
        self._batch.apply(plan)
        if not plan.num_scheduled_tokens:
            return DrainedPass(self.device)
        scheduled = self._without_ended(plan)
        if not scheduled:
            return DrainedPass(self.device)
        began_s = perf_counter()
        step = self._batch.step(scheduled, self._draft(plan), plan.state_copies)
        if before is not None and before.sampled is not None:
            unknown = UnknownTokens.of(step.runs, before.sampled, before.collect)
            step = replace(step, unknown=unknown)
        with torch.inference_mode():
            launched = self._launch(step, plan)
        if encode_s:
            launched.encode_s = encode_s
        self._batch.advance(step)
        if before is None:
            launched.began_s = began_s
        if launched.can_be_followed:
            self._open = launched
        return launched

    def _draft(self, plan: Plan) -> Drafts:
        if self._spec_decoder is None:
            return NO_DRAFTS
        return self._spec_decoder.drafts(plan.num_scheduled_tokens, plan.max_draft_tokens)

    def _follow_open_pass(self, plan: Plan) -> PendingPass | None:
        """Return the pass that is not collected, if there is one, after which this one runs."""
        before, self._open = self._open, None
        if before is None or plan.is_retry:
            return None
        before.is_followed = True
        if before.sampled is not None:
            self._batch.expect(before.sampled.runs)
        return before

    def _without_ended(self, plan: Plan) -> Mapping[RequestId, int]:
        """Return the scheduled tokens without rows that have ended with the last pass.

        A plan contains them if it was made before the result of that pass was known.
        """
        ended, self._ended = self._ended, frozenset()
        if not ended:
            return plan.num_scheduled_tokens
        ended -= {row.request_id for row in plan.started}  # a later request of the same id
        scheduled = plan.num_scheduled_tokens
        return {key: scheduled[key] for key in scheduled if key not in ended}

    def _fenced_hook(self, plan: Plan) -> FencedHook | None:
        return None if self.hook is None else FencedHook(self.hook, self.device, plan.is_retry)

    def _progress(self) -> LayerDone | None:
        """Return what reports a tower's layers: as in a retry, none of them is sent."""
        hook = self.hook
        return None if hook is None else FencedHook(hook, self.device, is_retry=True).layer_done

    def _launch(self, step: Step, plan: Plan) -> PendingPass:
        """Launch the decoder, as a graph if one fits, and the heads."""
        hook, drafter = self._fenced_hook(plan), self._pass_drafter
        inputs, forward = self._prepare(step, plan, hook)
        begun = [head.begin(step, inputs) for head in self._heads]
        heads = [head for head in begun if head is not None]
        draft_pass = None if drafter is None else drafter.begin(step, inputs)
        gather = None
        if step.unknown is not None:
            gather = self._gatherer.put(step.unknown, self._passes.token_ids, inputs)
        inputs.send()
        if gather is not None:
            gather()
        hidden_states = forward()
        for head in heads:
            head.launch(hidden_states)
        if draft_pass is not None:
            sampled = next((head.sampled for head in heads if head.sampled is not None), None)
            draft_pass.launch(hidden_states, sampled)
            if hook is not None:
                hook.layer_done(self.decoder.config.num_layers)
        if hook is not None:
            hook.pass_done()
        launched = step, heads, self.device.record(), self._collect
        can_be_followed = self._can_be_followed(step, heads)
        return PendingPass(*launched, can_be_followed, self._spec_decoder, draft_pass=draft_pass)

    def _can_be_followed(self, step: Step, heads: Sequence[HeadPass]) -> bool:
        """Return whether the next pass can be launched before the result of this one is known.

        Positions depend on which drafts are accepted.
        """
        if self.device.shares_host_memory or step.drafts:
            return False
        return all(head.sampled is not None for head in heads)

    def _prepare(
        self, step: Step, plan: Plan, hook: FencedHook | None
    ) -> tuple[StepInputs, Callable[[], HiddenStates]]:
        """Put the arrays of a pass, and return the function that launches it."""
        adapters = None if self.adapters is None else self.adapters.select(step.runs)
        needs_all = any(head.needs_all_tokens(step) for head in self._heads)
        needs_all |= self._pass_drafter is not None and self._pass_drafter.needs_all_tokens
        media = None if self._encodings is None else self._encodings.rows_for(step.runs)
        grid = self._passes.grid_positions(step)
        graphs = self.graphs
        size: GraphSize | EagerCause = EagerCause.NO_GRAPHS
        if graphs is not None:
            has_pictures = media is not None or grid is not None
            has = adapters is not None, plan.is_retry, has_pictures
            size = graphs.choose(_shape_of(step, needs_all, *has))
        self.num_passes[size] += 1
        if graphs is None or isinstance(size, EagerCause):
            self._inputs.begin()
            launch = self._passes.prepare(
                step, self._inputs, hook, adapters, media, grid, needs_all=needs_all
            )
            return self._inputs, launch
        own = DecodeBatch(step.token_ids, step.layout, step.states, adapters)
        replay = partial(self._replay, graphs.prepare(size, own), len(step.runs), hook)
        return graphs.inputs, replay

    def _replay(
        self, replay: Callable[[], HiddenStates], num_rows: int, hook: FencedHook | None
    ) -> HiddenStates:
        hidden_states = replay().first_rows(num_rows)
        if hook is not None:
            hook.layers_done(self.decoder.config.num_layers)
        return hidden_states

    def _collect(self, launched: PendingPass) -> RunResult:
        result, sampled = launched.read(), launched.sampled
        if not launched.is_followed:
            for request_id, token_ids in result.token_ids.items():
                self._batch.append(request_id, token_ids)
        elif sampled is not None:
            self._batch.receive(sampled.runs, result.token_ids)
        if self._spec_decoder is not None:
            took_s = None
            if launched.began_s is not None and not launched.is_followed:
                took_s = perf_counter() - launched.began_s
            self._spec_decoder.note_results(launched.step, result, took_s)
        for head in launched.heads:
            head.commit()
        if launched.draft_pass is not None:
            launched.draft_pass.commit(result)
            launched.draft_pass = None
        if self._open is launched:
            self._open = None
        full = filter(self._batch.is_full, result.num_proposed)
        # The pass that follows leaves out its results of these rows.
        self._ended = frozenset(() if launched.is_followed else (*result.failures, *full))
        launched.fence.wait()  # a step that samples nothing has not waited for its pass yet
        return result


def _allocate(parts: RunnerParts, num_blocks: int) -> Tensor:
    if parts.ranks is None:
        return parts.kv.allocate(num_blocks, parts.device.torch_device)
    return parts.ranks.allocate(parts.kv, num_blocks)


def _make_passes(parts: RunnerParts, kv: Tensor, attention: PagedAttention) -> ForwardPasses:
    decoder, state = parts.decoder, parts.state
    passes = ForwardPasses(
        decoder,
        Ropes(decoder.config, parts.device.torch_device, parts.dtype),
        attention,
        None if state is None else parts.kernels.make_linear_attention(kv, state),
        parts.info.max_model_len,
        parts.adapters,
    )
    return passes if parts.ranks is None else parts.ranks.lead(passes)


def _make_drafting(
    parts: RunnerParts, attention: PagedAttention, sampler: Sampler, head: SamplingHead
) -> Drafting:
    speculation = parts.speculation
    assert speculation is not None
    made_of = DrafterParts(
        speculation,
        parts.batch,
        attention,
        sampler,
        lambda: head.grammar_masks,
        parts.device,
        parts.dtype,
        parts.draft_head,
    )
    proposer, in_pass = parts.drafters[speculation.method](made_of)
    return SpecDecoder(parts.batch, speculation, proposer, parts.info.vocab_size), in_pass


def _make_blocks(parts: RunnerParts, kv: Tensor, num_blocks: int) -> KvBlocks:
    alike = [
        replace(layer, own_heads=range(0)) for layer in parts.attention if layer.kv_heads is None
    ]
    scales = scales_by_place(alike, *kv.shape[1:4])[..., None]
    return KvBlocks(kv[:num_blocks], parts.device, parts.kernels.make_block_hashes(kv), scales)


def _make_pooling(parts: RunnerParts) -> PoolingHead | None:
    info, device = parts.info, parts.device
    if info.pooling is None:
        return None
    dense = load_dense(info, device.torch_device)
    return PoolingHead(info.pooling, parts.decoder.classifier, device, dense)


def _make_encodings(parts: RunnerParts, kv: Tensor) -> Encodings | None:
    row_bytes = parts.info.encoding_row_bytes
    return Encodings(parts.tower, EncodingBlocks(kv, row_bytes, parts.dtype)) if row_bytes else None


def _shape_of(
    step: Step, needs_all_tokens: bool, has_adapters: bool, is_retry: bool, has_pictures: bool
) -> StepShape:
    num_runs, states = len(step.runs), step.states
    return StepShape(
        num_rows=num_runs,
        num_tokens=len(step.token_ids),
        num_sampled=len(step.sampled),
        num_blocks=step.layout.block_tables.shape[2],
        needs_all_tokens=needs_all_tokens,
        has_adapters=has_adapters,
        has_snapshots=states is not None and states.has_several_runs,
        is_retry=is_retry,
        has_pictures=has_pictures,
    )
