"""Configuration of Gemma 3n: defaults, streams of AltUp, layers with sparse gates and shared KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.unlike_layers import read_sources
from baton.engine.runner.model.config import Activation, AltUpConfig, LayerConfig

NUM_SPARSE = 10  # first layers, in models of more that do not list theirs
SPARSITY = 0.95
MAX_STREAMS = 64
SIZES, SHARES = "intermediate_size", "activation_sparsity_pattern"  # of MLPs, of gates at zero
LARGEST_MLP = "largest_intermediate_size"
GEMMA3N_FIELDS = frozenset({"hidden_size_per_layer_input", "num_kv_shared_layers", SHARES})
GEMMA3N: Mapping[str, object] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "altup_num_inputs": 4,
    "laurel_rank": 64,
    "num_kv_shared_layers": 15,
    "sliding_window": 512,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "max_position_embeddings": 32_768,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "hidden_activation": Activation.GELU_TANH.value,
}


def gemma3n_fields(raw: JsonFields) -> JsonFields:
    """Return the fields with the largest size of an MLP: there can be one for each layer."""
    if not isinstance(raw.get(SIZES), list):
        return raw.with_fields({LARGEST_MLP: raw.positive_int(SIZES)})
    sizes = raw.numbers(SIZES)
    if not sizes or any(size < 1 or size != int(size) for size in sizes):
        raise raw.wrong(SIZES, "must have whole numbers above 0")
    return raw.with_fields({LARGEST_MLP: max(sizes)})


def gemma3n_layers(
    fields: JsonFields, types: Sequence[str], layers: Sequence[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """Give layers their own MLPs, and the last ones the keys and values of earlier layers."""
    sources = read_sources(fields, types)
    sizes: Sequence[float] = [layer.mlp_size for layer in layers]
    if isinstance(fields.get(SIZES), list):
        sizes = _by_layer(fields, SIZES, len(layers))
    shares: Sequence[float] = [SPARSITY] * NUM_SPARSE if len(layers) > NUM_SPARSE else []
    shares = [*shares, *[0.0] * (len(layers) - len(shares))]
    if fields.has(SHARES):
        shares = _by_layer(fields, SHARES, len(layers))
    if not all(0 <= share < 1 for share in shares):
        raise fields.wrong(SHARES, "must have numbers from 0 to below 1")
    return tuple(
        replace(
            layer,
            kv_layer=source,
            mlp_size=int(size),
            gate_deviations=NormalDist().inv_cdf(share) if share else None,
        )
        for layer, source, size, share in zip(layers, sources, sizes, shares, strict=True)
    )


def altup(fields: JsonFields) -> AltUpConfig:
    num_streams = fields.positive_int("altup_num_inputs")
    if not 2 <= num_streams <= MAX_STREAMS:
        raise fields.wrong("altup_num_inputs", f"must be from 2 to {MAX_STREAMS}")
    active = fields.number("altup_active_idx", 0)
    if active not in range(num_streams):
        raise fields.wrong("altup_active_idx", f"must be the number of one of {num_streams} inputs")
    fields.positive_int("hidden_size_per_layer_input")
    return AltUpConfig(
        num_streams,
        int(active),
        has_output_scale=fields.flag("altup_correct_scale", True),
        laurel_rank=fields.positive_int("laurel_rank"),
    )


def _by_layer(fields: JsonFields, name: str, num_layers: int) -> Sequence[float]:
    numbers = fields.numbers(name)
    if len(numbers) != num_layers:
        raise fields.wrong(name, f"must have a number for each of {num_layers} layers")
    return numbers
