"""Builds a runner from settings: finds, checks and loads the model, and allocates its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from baton.checkpoint.checkpoint import Checkpoint, GenerationDefaults
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig, ModelError
from baton.core.pooling import Pooling, PoolingKind
from baton.engine.kv_cache.groups import CacheLayout
from baton.engine.runner.adapters.adapted_layers import adaptable_layers
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.attention.kv_blocks import KvBlocks
from baton.engine.runner.attention.kv_tensor import KvShape, describe
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.batch.encodings import EncodingBlocks, PictureEncoder
from baton.engine.runner.batch.input_batch import PersistentBatch
from baton.engine.runner.config import RunnerConfig as RunnerConfig
from baton.engine.runner.config import check, dtype_name
from baton.engine.runner.device.cuda import open_device
from baton.engine.runner.device.device import Device
from baton.engine.runner.device.graphs import graph_sizes
from baton.engine.runner.device.warm_up import warm_up
from baton.engine.runner.drafters import DRAFTERS, choose_speculation, open_head
from baton.engine.runner.drafting.draft_head import DraftHead, OpenHead
from baton.engine.runner.drafting.drafter import MakeDrafter
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import Parts, choose_parts
from baton.engine.runner.kv_budget import CacheShape
from baton.engine.runner.kv_size import choose_num_blocks, num_blocks_in
from baton.engine.runner.loaded_runner import CachingRunner
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import CausalLm, Decoder
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.model_info import LoadProgressCallback, ModelInfo
from baton.engine.runner.model_runner import Ranks, RunnerParts, TorchRunner
from baton.engine.runner.pooling.pooling_head import choose_pooling
from baton.engine.runner.prompt_embeds import prompt_embeds_tower
from baton.engine.runner.sampling.logits_processors import ModelView, load_processors, versions
from baton.engine.runner.state.state_shape import StateShape, cache_layout, state_shape
from baton.engine.runner.tower_runner import TowerRunner
from baton.engine.runner.towers import UnloadedTower, read_tower
from baton.engine.runner.weights.decoder_loading import AdaptLayers, attention_of, load_decoder
from baton.engine.runner.weights.kv_scales import check_kv_scheme, with_kv_scales
from baton.engine.runner.weights.open_weights import OpenWeights, open_weights

log = logging.getLogger(__name__)

MAX_CONTEXT_LEN = 1 << 24
KV_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedDecoder(NamedTuple):
    decoder: CausalLm
    attention: list[LayerAttention]  # of the layers that have it


LoadDecoder = Callable[
    [OpenWeights, LoadProgressCallback | None, AdaptLayers | None], LoadedDecoder
]


class DecoderSource(NamedTuple):
    """Ways to read the configuration of a decoder and its weights. Both raise ModelError."""

    read_config: Callable[[Checkpoint], ModelConfig]
    load: LoadDecoder
    part: str = ""  # of the weights, if it does not load all: packed ones are cached apart


def _load_known(
    weights: OpenWeights, on_progress: LoadProgressCallback | None, adapt: AdaptLayers | None
) -> LoadedDecoder:
    model, tensors, target = weights.model, weights.tensors, weights.target
    assert isinstance(model, ModelConfig)
    decoder = load_decoder(model, tensors, target, on_progress, adapt)
    return LoadedDecoder(decoder, attention_of(model, tensors, target.device))


FAMILIES = DecoderSource(read_model_config, _load_known)


def load_runner(
    config: RunnerConfig,
    on_progress: LoadProgressCallback | None = None,
    make_device: Callable[[str], Device] = open_device,
    make_parts: Callable[..., Parts] = choose_parts,
    drafters: Mapping[str, MakeDrafter] = DRAFTERS,
    source: DecoderSource = FAMILIES,
    ranks: Ranks | None = None,
) -> TorchRunner:
    """Find, check and load the model, allocate the KV cache, and capture graphs.

    Raises ModelError for errors in the model folder and InvalidConfig for errors in the settings.
    Sets the number of torch threads of the whole process if the settings name one.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    opened = open_model(config, make_device, make_parts, source)
    config, checkpoint, model, dtype, device, kernels, *_ = opened
    shape, state, layout = plan_memory(config, opened.cached_layers, dtype)
    # Everything that can be wrong is found before the weights are loaded, which takes long.
    view = ModelView(str(checkpoint.path), model.vocab_size)
    processors = load_processors(config.logits_processors, view)
    defaults = checkpoint.read_generation_defaults()
    max_model_len = choose_max_model_len(config, model.max_context_len())
    batch = _make_batch(config, max_model_len, layout, model)
    adapters = make_adapters(opened, AdapterTable if ranks is None else ranks.make_adapters)
    adapter_bytes = 0 if adapters is None else adapters.max_bytes
    cache = CacheShape(shape.block_bytes, max_model_len, layout, adapter_bytes)
    if config.kv_cache_bytes is not None:
        num_blocks_in(config.kv_cache_bytes, cache, device)
    active = None if adapters is None else adapters.active
    weights = load_weights(opened, source, on_progress, active)
    parts = RunnerParts(
        _describe(opened, weights.fingerprint, weights.tower, max_model_len, defaults),
        dtype,
        weights.decoder,
        weights.attention,
        kernels,
        device,
        shape,
        state,
        layout,
        batch,
        processors,
        config.logprobs_mode,
        adapters,
        config.speculation,
        drafters,
        has_graphs=_can_capture(opened, weights.decoder),
        tower=weights.tower,
        draft_head=weights.draft_head,
        ranks=ranks,
    )
    make_runner = partial(TorchRunner, parts)
    has_adapters = adapters is not None and kernels.low_rank.has_static_launches
    capture = partial(
        _capture_graphs, config, device if parts.has_graphs else None, has_adapters=has_adapters
    )
    num_blocks = choose_num_blocks(config, cache, device, make_runner, capture)
    runner = make_runner(num_blocks)
    if not device.shares_host_memory:
        sizes = num_blocks, config.block_size, config.max_num_seqs, max_model_len
        warm_up(runner, *sizes, layout)
    capture(runner)
    return runner


def load_tower_runner(
    config: RunnerConfig,
    on_progress: LoadProgressCallback | None = None,
    make_device: Callable[[str], Device] = open_device,
    make_parts: Callable[..., Parts] = choose_parts,
) -> CachingRunner:
    """Load the vision tower alone, beside blocks like those of nodes with the whole model.

    Raises ModelError for errors in the model folder and InvalidConfig for errors in the settings.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    opened = open_model(config, make_device, make_parts)
    _, checkpoint, model, dtype, device, kernels, *_ = opened
    shape, _, layout = plan_memory(config, opened.cached_layers, dtype)
    max_model_len = choose_max_model_len(config, model.max_context_len())
    check(
        layout.lasting_group is not None, "encode nodes need a model with a KV cache of all tokens"
    )
    with open_weights(
        config, checkpoint, model, dtype, device.torch_device, kernels, on_progress
    ) as weights:
        tower = _load_tower(opened, weights)
        if opened.tower is None or tower is None:
            raise InvalidConfig(f"{checkpoint.path} has no vision tower: encode nodes need one")
        fingerprint = _fingerprint(opened, weights)
    defaults = checkpoint.read_generation_defaults()
    info = _describe(opened, fingerprint, tower, max_model_len, defaults)
    cache = CacheShape(shape.block_bytes, max_model_len, layout)
    num_blocks = choose_num_blocks(config, cache, device)
    kv = shape.allocate(num_blocks, device.torch_device)
    blocks = KvBlocks(kv, device, kernels.make_block_hashes(kv))
    stored = EncodingBlocks(kv, info.encoding_row_bytes, dtype)
    info = replace(info, has_decoder=False, pooling=None)
    memory = describe(kv, layout, info.dtype)
    return TowerRunner(info, tower, stored, memory, blocks, device)


class OpenedModel(NamedTuple):
    """A model whose weights are not loaded yet, and what is going to compute it."""

    config: RunnerConfig
    checkpoint: Checkpoint
    model: ModelConfig
    dtype: torch.dtype
    device: Device
    kernels: Parts
    tower: UnloadedTower | None  # if it has one that can be used here
    head: OpenHead | None  # which drafts
    description: str  # of the model without a head

    @property
    def cached_layers(self) -> ModelConfig:
        """Return the model as the KV cache has its layers."""
        return self.model if self.head is None else self.head.extended


def open_model(
    config: RunnerConfig,
    make_device: Callable[[str], Device],
    make_parts: Callable[..., Parts],
    source: DecoderSource = FAMILIES,
) -> OpenedModel:
    checkpoint = open_checkpoint(config.model, mmproj=config.mmproj)
    model = _with_suppressed(source.read_config(checkpoint), checkpoint)
    config = choose_speculation(config, checkpoint, model)
    device, dtype = make_device(config.device), DTYPES[dtype_name(config, model)]
    kernels = make_parts(
        config.kernels,
        dtype,
        device.torch_device,
        activation_dtype=config.activation_dtype,
        batch_invariant=config.batch_invariant,
    )
    tower = _read_tower(config, checkpoint)
    if config.enable_prompt_embeds:
        tower = prompt_embeds_tower(model, has_tower=tower is not None)
    if config.has_fp8_kv:
        check_kv_scheme(checkpoint)
    head, description = open_head(config, checkpoint, model), str(model)
    if head is not None:
        places = head.extended.kv_places()[: len(model.attention_layers)]
        layers = head.extended.layers[: model.num_layers]
        model = replace(model, layers=layers, cache_places=places)
    return OpenedModel(config, checkpoint, model, dtype, device, kernels, tower, head, description)


def _with_suppressed(model: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the model with the tokens that its files suppress."""
    listed = checkpoint.read_generation_defaults().suppressed_token_ids
    return replace(
        model, suppressed_token_ids=tuple(each for each in listed if 0 <= each < model.vocab_size)
    )


def make_adapters(
    opened: OpenedModel, make_table: Callable[..., AdapterTable] = AdapterTable
) -> AdapterTable | None:
    config, place = opened.config, opened.device.torch_device
    if not config.max_loras:
        return None
    limits = config.max_lora_rank, config.max_loras, config.num_adapter_places
    active = ActiveAdapters(opened.kernels.low_rank)
    return make_table(active, opened.model, opened.dtype, place, *limits)


class LoadedWeights(NamedTuple):
    decoder: CausalLm
    attention: Sequence[LayerAttention]
    fingerprint: str
    tower: PictureEncoder | None  # None: the node encodes no pictures
    draft_head: DraftHead | None


def load_weights(
    opened: OpenedModel,
    source: DecoderSource,
    on_progress: LoadProgressCallback | None = None,
    active: ActiveAdapters | None = None,
) -> LoadedWeights:
    """Load the weights. Those that this start packs into a file are then mapped from it.

    So the nodes of a machine share their memory from the first start on.
    """
    loaded, is_packed = _load_weights(opened, source, on_progress, active)
    if is_packed:
        del loaded
        loaded, _ = _load_weights(opened, source, None, active)
    return loaded


def _load_weights(
    opened: OpenedModel,
    source: DecoderSource,
    on_progress: LoadProgressCallback | None,
    active: ActiveAdapters | None,
) -> tuple[LoadedWeights, bool]:
    """Load the weights, and return whether this has packed them into a file that can be mapped."""
    config, checkpoint, model, dtype, device, kernels, _, opened_head, _ = opened
    with open_weights(
        config, checkpoint, model, dtype, device.torch_device, kernels, on_progress, source.part
    ) as weights:
        tower = _load_tower(opened, weights)  # first: the progress is that of the decoder
        adapt = None if active is None else partial(adaptable_layers, kernels.ops, active)
        decoder, attention = source.load(weights, on_progress, adapt)
        if config.has_fp8_kv:
            attention = with_kv_scales(attention, model, weights.tensors)
        head = None
        if opened_head is not None and isinstance(decoder, Decoder):
            head = opened_head.load(weights.tensors, decoder, weights.target)
            attention += opened_head.attention
        fingerprint = _fingerprint(opened, weights)
        loaded = LoadedWeights(decoder, attention, fingerprint, tower, head)
    cached = weights.target.cached
    return loaded, cached is not None and cached.is_written and device.shares_host_memory


def _fingerprint(opened: OpenedModel, weights: OpenWeights) -> str:
    """Return the fingerprint of the model, whatever parts of it are loaded and whoever drafts."""
    tower = "" if opened.tower is None else opened.tower.settings
    processors = versions(opened.config.logits_processors)
    return weights.fingerprint(opened.description, processors, tower)


def _load_tower(opened: OpenedModel, weights: OpenWeights) -> PictureEncoder | None:
    if opened.tower is None or not opened.config.loads_tower:
        return None
    try:
        return opened.tower.load(weights.tensors, weights.target)
    except ModelError as error:
        if opened.model.quantization is None:
            raise
        # Of most quantised models the tower is not; a packed one cannot be read.
        log.warning("pictures are not encoded, but text is served: %s", error)
        return None


def _read_tower(config: RunnerConfig, checkpoint: Checkpoint) -> UnloadedTower | None:
    """Return the model's tower; None if it has none, or none that can be used here."""
    try:
        return read_tower(checkpoint)
    except ModelError as error:
        if config.loads_tower:
            log.warning("pictures are not encoded, but text is served: %s", error)
        return None


def _describe(
    opened: OpenedModel,
    fingerprint: str,
    tower: PictureEncoder | None,
    max_model_len: int,
    defaults: GenerationDefaults,
) -> ModelInfo:
    config, checkpoint, model, dtype, _, kernels, found, *_ = opened
    own_pooling = None
    if model.num_labels:  # of the last token
        own_pooling = Pooling(PoolingKind.LAST, normalizes=False, num_labels=model.num_labels)
    return ModelInfo(
        checkpoint=checkpoint,
        fingerprint=fingerprint,
        vocab_size=model.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=defaults.eos_token_ids,
        defaults=defaults,
        dtype=dtype_name(config, model),
        max_shareable_prompt_len=model.max_shareable_prompt_len(),
        hidden_size=model.hidden_size,
        can_generate=model.can_generate,
        picture_rows=None if found is None or tower is None else found.num_rows,
        encoding_row_bytes=0 if found is None else found.encoding_size * dtype.itemsize,
        takes_prompt_embeds=config.enable_prompt_embeds and tower is not None,
        sees_whole_pictures=model.sees_whole_pictures,
        pooling=choose_pooling(config.pooling, checkpoint, own_pooling),
        numerics=kernels.numerics,
        kernels=kernels.name,
    )


def plan_memory(
    config: RunnerConfig, model: ModelConfig, dtype: torch.dtype
) -> tuple[KvShape, StateShape | None, CacheLayout]:
    """Return the shapes of a block and of a state, and the memory that a request takes."""
    shape = KvShape.of(model, config.block_size, kv_dtype(config.kv_cache_dtype, model, dtype))
    state = state_shape(model, shape, dtype)
    num_drafted = 0 if config.speculation is None else config.speculation.num_tokens
    return shape, state, cache_layout(model, state, num_drafted)


def _make_batch(
    config: RunnerConfig, max_model_len: int, layout: CacheLayout, model: ModelConfig
) -> PersistentBatch:
    try:
        return PersistentBatch(
            config.max_num_seqs,
            max_model_len,
            config.block_size,
            len(layout.groups),
            layout.num_state_blocks,
            layout.num_state_sides,
            sees_whole_pictures=model.sees_whole_pictures,
        )
    except MemoryError as error:
        raise InvalidConfig(
            f"no memory for {config.max_num_seqs} requests of {max_model_len} tokens: lower "
            "--max-model-len or --max-num-seqs"
        ) from error


def kv_dtype(name: str, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the KV tensor of a model that computes in `dtype`."""
    if name == "auto":
        return dtype
    # Scales and slots are aligned in memory.
    check(model.head_dim % 2 == 0, f"kv_cache_dtype {name!r}: not with head_dim {model.head_dim}")
    return KV_DTYPES[name]


def choose_max_model_len(config: RunnerConfig, longest: int) -> int:
    """Return the length that the settings ask for, or that of the model. Raises InvalidConfig."""
    requested = config.max_model_len or longest
    check(requested <= longest, f"max_model_len {requested}: at most {longest} with this model")
    check(
        requested <= MAX_CONTEXT_LEN,
        f"the model's context is {requested} tokens; at most {MAX_CONTEXT_LEN} are supported: set "
        "--max-model-len",
    )
    return requested


def _can_capture(opened: OpenedModel, decoder: CausalLm) -> bool:
    """Return whether decode steps can be graphs; if the device has them, log why they cannot."""
    kernels, recurrent, cause = opened.kernels, decoder.config.recurrent, ""
    if opened.config.enforce_eager:
        cause = "enforce-eager"
    elif not kernels.has_static_launches:
        cause = f"launches of the kernels {kernels.name!r} depend on the lengths of sequences"
    elif decoder.config.depends_on_length:
        cause = "angles of this model depend on the lengths of prompts"
    elif recurrent is not None and not RULES[recurrent.rule].has_triton_kernels:
        cause = f"launches of {recurrent.rule.value}s depend on the lengths of sequences"
    elif opened.head is not None:
        cause = "the head that drafts computes in each step"
    elif decoder.waits_for_experts:
        cause = "the CPU reads which experts are chosen, because they are computed one by one"
    has_graphs = opened.device.make_graph_pool() is not None
    if has_graphs and cause:
        log.info("decode steps are launched without graphs: %s", cause)
    return has_graphs and not cause


def _capture_graphs(
    config: RunnerConfig, device: Device | None, runner: TorchRunner, *, has_adapters: bool
) -> None:
    """Capture graphs of decode steps; if that fails, those of steps without adapters alone."""
    pool = None if device is None else device.make_graph_pool()
    if pool is None:
        return
    max_blocks = -(-runner.info.max_model_len // config.block_size)
    try:
        sizes = graph_sizes(config.max_num_seqs, max_blocks, has_adapters=has_adapters)
        runner.capture_graphs(pool, sizes)
    except torch.OutOfMemoryError as error:
        raise InvalidConfig(
            "no memory for graphs of decode steps: lower --kv-cache-memory or --max-num-seqs, or "
            f"use enforce-eager: {error}"
        ) from error
    except RuntimeError as error:
        # The error of what cannot be captured comes before that of ending the capture.
        log.warning(
            "decode steps%s are launched without graphs: the capture failed: %s",
            " with adapters" if has_adapters else "",
            error.__context__ or error,
        )
        if has_adapters:
            _capture_graphs(config, device, runner, has_adapters=False)
