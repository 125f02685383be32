"""Layers of models whose configuration lists mixers and MLPs as blocks of their own (Nemotron-H).

A block with an MLP belongs to the layer of the mixer before it. A mixer that another one follows is
a layer without an MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.families.family import (
    FULL,
    LINEAR,
    NEXT_BLOCK,
    ExpertNames,
    RecurrentNames,
    TensorNames,
)
from baton.engine.runner.families.mixtures import glm4_moe
from baton.engine.runner.model.config import LayerConfig, MoeConfig, Recurrence, RecurrentConfig

MLP, EXPERTS = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}  # of `hybrid_override_pattern`
OTHER_NAMES = {"mamba": LINEAR, "attention": FULL}  # of early configurations
TYPES, PATTERN = "layers_block_type", "hybrid_override_pattern"

NEMOTRON_H_NAMES = TensorNames(
    models=("backbone", "model"),
    heads=("lm_head", "lm_head"),
    embedding="embeddings",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    output="mixer.o_proj",
    gate_up=(f"{NEXT_BLOCK}mixer.up_proj",),
    down=f"{NEXT_BLOCK}mixer.down_proj",
    input_norm="norm",
    mlp_norm=f"{NEXT_BLOCK}norm",
    norm="norm_f",
    ignored=("mtp.",),
    experts=ExpertNames(
        router=f"{NEXT_BLOCK}mixer.gate",
        gate_up=(f"{NEXT_BLOCK}mixer.experts.{{expert}}.up_proj",),
        down=f"{NEXT_BLOCK}mixer.experts.{{expert}}.down_proj",
        correction_bias=f"{NEXT_BLOCK}mixer.gate.e_score_correction_bias",
        latent=(f"{NEXT_BLOCK}mixer.fc1_latent_proj", f"{NEXT_BLOCK}mixer.fc2_latent_proj"),
        shared=f"{NEXT_BLOCK}mixer.shared_experts",
        shared_gate_up=("up_proj",),
        is_gated=False,
    ),
    recurrent=RecurrentNames("mixer", ("mixer.in_proj",)),
)
NEMOTRON_H: Mapping[str, object] = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
# Fields that change the computation, with the value that Baton computes, which is the default.
FIXED: Mapping[str, object] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "residual_in_fp32": False,
    "n_shared_experts": 1,
}


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of one layer."""

    first: int  # the mixer's
    mixer: str
    mlp: str | None


def nemotron_h_fields(raw: JsonFields) -> JsonFields:
    """Return the fields of Nemotron-H with the names and values that other families have."""
    for name, value in FIXED.items():
        if raw.has(name) and raw.get(name) != value:
            raise raw.wrong(name, f"must be {value!r}")
    layers = _read_blocks(raw)
    return raw.with_fields(
        {
            "num_hidden_layers": len(layers),
            "layer_types": [layer.mixer for layer in layers],
            "rms_norm_eps": raw.number("layer_norm_epsilon", above=0),
            "head_dim": raw.positive_int("attention_head_dim", raw.positive_int("head_dim")),
        }
    )


def nemotron_h_layers(
    fields: JsonFields, _: Sequence[str], layers: Sequence[LayerConfig]
) -> tuple[LayerConfig, ...]:
    """Give each layer the number of its first block, and an MLP only if it has a second one."""
    blocks = _read_blocks(fields)
    return tuple(
        replace(layer, block=own.first, has_mlp=own.mlp is not None)
        for own, layer in zip(blocks, layers, strict=True)
    )


def dense_of_blocks(raw: JsonFields, _: int) -> frozenset[int]:
    return frozenset(i for i, layer in enumerate(_read_blocks(raw)) if layer.mlp == MLP)


def no_rope(_: JsonFields, num_layers: int) -> frozenset[int]:
    """No layer has RoPE."""
    return frozenset(range(num_layers))


def nemotron_h_moe(raw: JsonFields) -> MoeConfig:
    shared_size = raw.positive_int("moe_shared_expert_intermediate_size")
    has_latent = raw.has("moe_latent_size")
    latent_size = raw.positive_int("moe_latent_size") if has_latent else None
    return replace(glm4_moe(raw), shared_size=shared_size, latent_size=latent_size)


def nemotron_h_mamba(raw: JsonFields) -> RecurrentConfig:
    mamba = RecurrentConfig(
        num_key_heads=raw.positive_int("n_groups"),
        num_value_heads=raw.positive_int("mamba_num_heads"),
        key_dim=raw.positive_int("ssm_state_size"),
        value_dim=raw.positive_int("mamba_head_dim"),
        conv_size=raw.positive_int("conv_kernel"),
        rule=Recurrence.MAMBA2,
    )
    if mamba.num_value_heads % mamba.num_key_heads:
        raise raw.wrong("n_groups", f"must divide mamba_num_heads ({mamba.num_value_heads})")
    if mamba.conv_size < 2:
        raise raw.wrong("conv_kernel", "must be at least 2")
    return mamba


def _read_blocks(raw: JsonFields) -> Sequence[_Blocks]:
    name, types = _read_types(raw)
    layers: list[_Blocks] = []
    for index, kind in enumerate(types):
        if kind in (LINEAR, FULL):
            layers.append(_Blocks(index, kind, None))
        elif not layers or layers[-1].mlp is not None:
            raise raw.wrong(name, f"must have a mixer before the MLP of block {index}")
        else:
            layers[-1] = replace(layers[-1], mlp=kind)
    return layers


def _read_types(raw: JsonFields) -> tuple[str, Sequence[str]]:
    """Return the types of the blocks, and the field that lists them."""
    listed = raw.get(TYPES)
    name = TYPES if listed is not None else PATTERN
    if isinstance(listed, list):
        types = [OTHER_NAMES.get(str(each), str(each)) for each in listed]
    else:
        types = [LETTERS.get(each, each) for each in str(raw.get(PATTERN))]
    if not types or set(types) - set(LETTERS.values()):
        expected = f"must list {', '.join(LETTERS.values())}"
        raise raw.wrong(name, expected if name == TYPES else "must consist of M, *, - and E")
    return name, types
