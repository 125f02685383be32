"""Checks of a model folder: complete, supported, and small enough for the memory."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from baton.checkpoint.checkpoint import Checkpoint
from baton.checkpoint.hub import open_checkpoint, served_name
from baton.core.errors import ModelError
from baton.core.units import format_bytes
from baton.doctor.findings import Finding, fail, ok, warn
from baton.doctor.tiers import KvShapeFacts
from baton.engine.runner.adapters.places import AdapterPlaces
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.device.host_memory import free_host_bytes
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.choose import merges_routers
from baton.engine.runner.kv_budget import CacheShape, auto_kv_bytes
from baton.engine.runner.load import DTYPES, kv_dtype
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.open_runner import kind_of, read_cached_layers
from baton.engine.runner.state.state_shape import cache_layout, state_shape
from baton.engine.runner.weights.decoder_weights import check_tensors, expected_tensors
from baton.kv_transfer.tiers.host_growth import auto_host_bytes

BLOCK_SIZE = 16
MAX_NUM_SEQS = 128  # both are the defaults of nodes


class AdapterRoom(NamedTuple):
    """LoRA adapters that a node has room for."""

    num_places: int = 0
    max_rank: int = 0
    kernels: str = "auto"


NO_ADAPTERS = AdapterRoom()


def check_model_folder(
    model: str,
    kv_bytes: int | None,
    kv_cache_dtype: str = "auto",
    adapters: AdapterRoom = NO_ADAPTERS,
) -> Iterator[Finding]:
    """Check a model folder without downloading or reading weights.

    Without `kv_bytes`, the KV cache has the size that `baton up` gives each of two nodes.
    """
    try:
        checkpoint = open_checkpoint(model, offline=True)
    except ModelError as error:
        yield fail("model", str(error), "download it once: baton run --model NAME hello")
        return
    yield ok("model", str(checkpoint.path))
    yield _tokenizer(checkpoint)
    yield _sampling(checkpoint)
    yield from _weights(checkpoint, kv_bytes, kv_cache_dtype, adapters)


def kv_shape_of(model: str, kv_cache_dtype: str = "auto") -> KvShapeFacts | None:
    """Return the size of the model's KV, or None if the model cannot be read."""
    try:
        checkpoint = open_checkpoint(model, offline=True)
        config = read_cached_layers(checkpoint)
    except ModelError:
        return None
    if config is None:
        return None
    shape = KvShape.of(config, BLOCK_SIZE, kv_dtype(kv_cache_dtype, config, DTYPES[config.dtype]))
    return KvShapeFacts(served_name(model), shape.block_bytes, BLOCK_SIZE)


def _tokenizer(checkpoint: Checkpoint) -> Finding:
    try:
        tokenizer = checkpoint.load_tokenizer()
    except ModelError as error:
        return fail("tokenizer", str(error), "fetch the folder again")
    chat = "with" if tokenizer.has_chat_template else "without"
    found = f"{tokenizer.vocab_size} tokens, {chat} a chat template"
    if tokenizer.has_chat_template:
        return ok("tokenizer", found)
    return warn("tokenizer", found, "chats need --plain; text and token ids work")


def _sampling(checkpoint: Checkpoint) -> Finding:
    """Show the sampling parameters of requests that choose none."""
    try:
        defaults = checkpoint.read_generation_defaults()
    except ModelError as error:
        return fail("sampling", str(error), "correct the file, or fetch it again")
    found = ", ".join(f"{name} {value}" for name, value in defaults.sampling.given.items())
    if defaults.is_sampling_assumed:
        found += ": llama.cpp's, as the file recommends none"
    return ok("sampling", f"{found or 'the model recommends nothing: temperature 1'}")


def _weights(
    checkpoint: Checkpoint, kv_bytes: int | None, kv_cache_dtype: str, adapters: AdapterRoom
) -> Iterator[Finding]:
    try:
        kind = kind_of(checkpoint)
        if kind is not None:
            yield ok("weights", kind.check_weights(checkpoint))
            cached, num_bytes = kind.read_cached_layers(checkpoint), checkpoint.num_weight_bytes()
            if cached is not None:
                yield from _room(
                    checkpoint, cached, num_bytes, kv_bytes, kv_cache_dtype, NO_ADAPTERS
                )
            return
        config = read_model_config(checkpoint)
        with checkpoint.open_tensors() as tensors:
            check_tensors(config, tensors)
    except ModelError as error:
        yield fail("weights", str(error), "fetch the folder again, or choose a supported model")
        return
    num_parameters = sum(prod(shape) for shape in expected_tensors(config).values())
    yield ok("weights", _describe(config, num_parameters))
    weight_bytes = num_parameters * DTYPES[config.dtype].itemsize
    if config.quantization is not None:
        weight_bytes = checkpoint.num_weight_bytes()
    yield from _room(checkpoint, config, weight_bytes, kv_bytes, kv_cache_dtype, adapters)


def _room(
    checkpoint: Checkpoint,
    config: ModelConfig,
    weight_bytes: int,
    kv_bytes: int | None,
    kv_cache_dtype: str,
    adapters: AdapterRoom,
) -> Iterator[Finding]:
    """Compare the memory that a node takes, and the longest request, with what there is."""
    dtype = DTYPES[config.dtype]
    shape = KvShape.of(config, BLOCK_SIZE, kv_dtype(kv_cache_dtype, config, dtype))
    layout = cache_layout(config, state_shape(config, shape, dtype))
    free, max_model_len = free_host_bytes(), config.max_context_len()
    adapter_bytes = 0
    if adapters.num_places:
        adapter_bytes = adapters.num_places * AdapterPlaces(config).max_bytes(
            adapters.max_rank, dtype, merges_routers=merges_routers(adapters.kernels)
        )
    if kv_bytes is None:
        node = RunnerConfig(str(checkpoint.path), max_num_seqs=MAX_NUM_SEQS)
        rest = max(free - weight_bytes, 0)
        cache = CacheShape(shape.block_bytes, max_model_len, layout, adapter_bytes)
        kv_bytes = auto_kv_bytes(node, rest, cache)
    token_bytes = len(layout.groups) * shape.block_bytes // BLOCK_SIZE
    yield room_finding(weight_bytes, kv_bytes, token_bytes, free, adapter_bytes)
    num_token_blocks = layout.max_token_blocks(kv_bytes // shape.block_bytes)
    yield length_finding(max(0, num_token_blocks) * BLOCK_SIZE, max_model_len)


def _describe(config: ModelConfig, num_parameters: int) -> str:
    found = f"{config.architecture}, {num_parameters:,} parameters"
    if config.moe is not None:
        chosen = f"{config.moe.top_k} of {config.moe.num_experts} experts"
        found += f" of which a token uses {count_active(config, num_parameters):,} ({chosen})"
    bits = "" if config.quantization is None else f" and {config.quantization.bits} bits"
    return f"{found} in {config.dtype}{bits}; runs on Baton's own layers"


def count_active(config: ModelConfig, num_parameters: int) -> int:
    """Return the number of parameters without the experts that a token does not use."""
    moe, hidden = config.moe, config.hidden_size
    if moe is None:
        return num_parameters
    num_matrices = 3 if config.activation.is_gated else 2
    expert = num_matrices * moe.expert_size * (moe.latent_size or hidden)
    if moe.has_bias:
        expert += 2 * moe.expert_size + hidden
    num_layers = sum(layer.has_experts for layer in config.layers)
    return num_parameters - num_layers * (moe.num_experts - moe.top_k) * expert


def room_finding(
    weight_bytes: int, kv_bytes: int, per_token: int, free_bytes: int, adapter_bytes: int = 0
) -> Finding:
    """Compare the memory of one node with the free memory. Each node has its own weights."""
    needed = weight_bytes + kv_bytes + adapter_bytes
    weights, smaller = f"{format_bytes(weight_bytes)} of weights", "a smaller --kv-cache-memory"
    if adapter_bytes:
        weights += f", up to {format_bytes(adapter_bytes)} of LoRA adapters"
        smaller += ", max-cpu-loras or max-lora-rank"
    host_bytes = auto_host_bytes(max(0, free_bytes - needed), kv_bytes)
    found = (
        f"a node needs {weights} and {format_bytes(kv_bytes)} of KV "
        f"({per_token} bytes a token, {kv_bytes // per_token} tokens), and on a CPU takes up to "
        f"{format_bytes(host_bytes)} for evicted KV while memory is free (--kv-host-memory); "
        f"{format_bytes(free_bytes)} are free"
    )
    if needed > free_bytes:
        return fail("room", found, f"use a smaller model, or {smaller}")
    if 2 * needed > free_bytes:
        advice = "one node fits, two do not: baton up --colocated --prefill 0, or another machine"
        return warn("room", found, advice)
    return ok("room", found)


def length_finding(num_tokens: int, max_model_len: int) -> Finding:
    """Compare the longest request that fits into the KV cache with the model's maximum."""
    longest = min(num_tokens + 1, max_model_len)
    found = f"prompt and answer may have {longest} tokens together; the model takes {max_model_len}"
    if longest < max_model_len:
        return warn("longest request", found, "a larger --kv-cache-memory allows longer ones")
    return ok("longest request", found)
