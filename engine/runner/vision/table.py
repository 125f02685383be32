"""Table of vision towers by architecture. A family is data: names, fields, fixed properties."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from baton.checkpoint.json_fields import JsonFields
from baton.engine.runner.vision.config import Merge, NormKind, Positions

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class ProjectorNames:
    """Names of a projector's tensors, after its prefix. `{level}`: the level of DeepStack."""

    linears: tuple[str, ...]
    norm: str = ""  # "": its norm, if the family has one, has no weight
    is_transposed: bool = False  # the last matrix is stored as [columns, rows], without a suffix
    # The columns of the first matrix are those of a feature in all patches, then of the next one.
    is_by_feature: bool = False


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of the stored tensors after their prefix. Those of a layer are relative to it."""

    towers: tuple[str, ...]  # possible prefixes
    projectors: tuple[str, ...]
    patches: str
    layers: str
    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    mlp_norm: str
    up: tuple[str, ...]  # of a gated MLP the gate, then the other factor
    down: str
    projector: ProjectorNames
    level_projector: ProjectorNames | None = None
    positions: str = ""
    pixel_norm: str = ""  # of the pixels of a patch
    patch_norm: str = ""  # of the patches before their positions
    input_norm: str = ""
    final_norm: str = ""
    head_norms: tuple[str, ...] = ()  # of queries and keys; values have one without a weight
    output_norm: str = ""
    down_norm: str = ""
    standardization: tuple[str, ...] = ()  # bias and scale
    # What replaces the end of a linear layer's name in those of its bounds; "": it has none.
    clipped_end: str = ""
    ignored: tuple[str, ...] = ()  # beginnings of tensors that are not needed


@dataclass(frozen=True, slots=True)
class SizeFields:
    """Names of config fields."""

    num_layers: str = "num_hidden_layers"  # "": a tower without layers
    num_heads: str = "num_attention_heads"
    hidden_size: str = "hidden_size"
    output_size: str = ""  # must be the size of the decoder's hidden states
    mlp_ratio: str = ""  # size of the MLP by the hidden size; "": `intermediate_size` has it
    activation: str = "hidden_act"
    patch_edges: str = ""  # field of what `patch_size` is to be multiplied by
    position_side: str = ""  # "": `image_size` and `patch_size` have it


MergeSize = Callable[[JsonFields, JsonFields], int]  # from the outer and the vision fields


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family of vision towers."""

    names: TowerNames
    merge_size: MergeSize
    fields: SizeFields = SizeFields()
    defaults: Mapping[str, object] = field(default_factory=dict)  # for missing fields
    mean: tuple[float, ...] = HALF
    deviation: tuple[float, ...] = HALF
    centres_pixels: bool = False  # from 0 to 1 they become numbers from -1 to 1, in the model
    positions: Positions = Positions.NONE
    has_rope: bool = False
    is_rope_alternating: bool = False
    is_rope_split: bool = False  # columns rotate the first half of a head, rows the second
    norm: NormKind = NormKind.LAYER
    norm_epsilon: float | str = 1e-6  # or the field that has it
    has_patch_bias: bool = True
    # Folders have the weights of patches as rows of pixels, whose channels adjoin.
    has_flat_patches: bool = False
    has_positions_by_place: bool = False  # those of columns and rows adjoin
    is_folded_in_time: bool = False  # the patches of videos have two frames
    has_attention_bias: bool = True
    is_attention_scaled: bool = True  # by the size of a head
    is_gated: bool = False
    has_mlp_bias: bool = True
    merge: Merge = Merge.JOIN
    scales_tokens: bool = False  # by the root of their size
    projector_norm: NormKind | None = None
    projector_epsilon: float | str = 1e-6  # or the field of the vision fields; "": of the decoder
    norms_merged: bool = False
    has_projector_bias: bool | str = False  # or the field of the outer fields
    has_first_bias: bool = True  # with biases, the first linear layer of the projector has one
    has_windows: bool = False


def _by_outer(name: str) -> MergeSize:
    return lambda outer, _: outer.positive_int(name, 2)


def _merge_of_gemma(outer: JsonFields, vision: JsonFields) -> int:
    side = vision.positive_int("image_size") // vision.positive_int("patch_size")
    tokens = math.isqrt(outer.positive_int("mm_tokens_per_image", 256))
    if side % tokens or tokens**2 != outer.positive_int("mm_tokens_per_image", 256):
        raise outer.wrong("mm_tokens_per_image", f"must be the square of a divisor of {side}")
    return side // tokens


def _merge_of_gemma4(_: JsonFields, vision: JsonFields) -> int:
    return vision.positive_int("pooling_kernel_size", 3)


def _no_merge(_: JsonFields, __: JsonFields) -> int:
    return 1


def _merge_of_qwen(_: JsonFields, vision: JsonFields) -> int:
    return vision.positive_int("spatial_merge_size", 2)


_SIGLIP = TowerNames(
    towers=("model.vision_model.",),
    projectors=("model.connector.",),
    patches="embeddings.patch_embedding",
    positions="embeddings.position_embedding.weight",
    layers="encoder.layers",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    attention_norm="layer_norm1",
    mlp_norm="layer_norm2",
    up=("mlp.fc1",),
    down="mlp.fc2",
    final_norm="post_layernorm",
    projector=ProjectorNames(("modality_projection.proj",)),
)
_IDEFICS3 = VisionFamily(
    names=_SIGLIP,
    merge_size=_by_outer("scale_factor"),
    defaults={
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    positions=Positions.BUCKETS,
    norm_epsilon="layer_norm_eps",
)
_GEMMA3 = replace(
    _IDEFICS3,
    names=replace(
        _SIGLIP,
        towers=(
            "model.vision_tower.",
            "model.vision_tower.vision_model.",
            "vision_tower.",
            "vision_tower.vision_model.",
        ),
        projectors=("model.multi_modal_projector.", "multi_modal_projector."),
        projector=ProjectorNames(
            ("mm_input_projection_weight",), "mm_soft_emb_norm", is_transposed=True
        ),
        ignored=("head.",),
    ),
    merge_size=_merge_of_gemma,
    defaults={
        **_IDEFICS3.defaults,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "patch_size": 16,
    },
    positions=Positions.FIXED,
    merge=Merge.MEAN,
    projector_norm=NormKind.OFFSET_RMS,
    projector_epsilon="layer_norm_eps",
    norms_merged=True,
)
_GEMMA4 = VisionFamily(
    names=TowerNames(
        towers=("model.vision_tower.", "vision_tower."),
        projectors=("model.embed_vision.", "embed_vision."),
        patches="patch_embedder.input_proj",
        positions="patch_embedder.position_embedding_table",
        layers="encoder.layers",
        qkv=("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
        head_norms=("self_attn.q_norm", "self_attn.k_norm"),
        output="self_attn.o_proj.linear",
        attention_norm="input_layernorm",
        output_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        up=("mlp.gate_proj.linear", "mlp.up_proj.linear"),
        down="mlp.down_proj.linear",
        down_norm="post_feedforward_layernorm",
        standardization=("std_bias", "std_scale"),
        clipped_end=".linear",
        projector=ProjectorNames(("embedding_projection",)),
    ),
    merge_size=_merge_of_gemma4,
    fields=SizeFields(activation="hidden_activation", position_side="position_embedding_size"),
    defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 12,
        "patch_size": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "position_embedding_size": 10_240,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
    },
    centres_pixels=True,
    positions=Positions.AXES,
    has_rope=True,
    is_rope_split=True,
    norm=NormKind.WIDE_RMS,
    norm_epsilon="rms_norm_eps",
    has_patch_bias=False,
    has_flat_patches=True,
    has_attention_bias=False,
    is_attention_scaled=False,
    is_gated=True,
    has_mlp_bias=False,
    merge=Merge.MEAN,
    scales_tokens=True,
    projector_norm=NormKind.WIDE_RMS,
    projector_epsilon="rms_norm_eps",
    norms_merged=True,
)
_GEMMA4_UNIFIED = VisionFamily(  # patches become tokens without layers between
    names=TowerNames(
        towers=("model.vision_embedder.", "vision_embedder."),
        projectors=("model.embed_vision.", "embed_vision."),
        pixel_norm="patch_ln1",
        patches="patch_dense",
        patch_norm="patch_ln2",
        positions="pos_embedding",
        input_norm="pos_norm",
        layers="",
        qkv=(),
        output="",
        attention_norm="",
        mlp_norm="",
        up=(),
        down="",
        projector=ProjectorNames(("embedding_projection",)),
    ),
    merge_size=_no_merge,
    fields=SizeFields(
        num_layers="",
        hidden_size="mm_embed_dim",
        patch_edges="pooling_kernel_size",
        position_side="mm_posemb_size",
    ),
    defaults={
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "rms_norm_eps": 1e-6,
    },
    mean=(0.0, 0.0, 0.0),
    deviation=(1.0, 1.0, 1.0),
    positions=Positions.AXES,
    norm_epsilon=1e-5,
    has_flat_patches=True,
    has_positions_by_place=True,
    projector_norm=NormKind.WIDE_RMS,
    projector_epsilon="rms_norm_eps",
)
_MISTRAL3 = VisionFamily(
    names=TowerNames(
        towers=("model.vision_tower.", "vision_tower."),
        projectors=("model.multi_modal_projector.", "multi_modal_projector."),
        patches="patch_conv",
        layers="transformer.layers",
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        output="attention.o_proj",
        attention_norm="attention_norm",
        mlp_norm="ffn_norm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        input_norm="ln_pre",
        projector=ProjectorNames(
            ("patch_merger.merging_layer", "linear_1", "linear_2"), "norm", is_by_feature=True
        ),
    ),
    merge_size=_by_outer("spatial_merge_size"),
    defaults={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
    mean=CLIP_MEAN,
    deviation=CLIP_DEVIATION,
    has_rope=True,
    is_rope_alternating=True,
    norm=NormKind.RMS,
    norm_epsilon=1e-5,
    has_patch_bias=False,
    has_attention_bias=False,
    is_gated=True,
    has_mlp_bias=False,
    projector_norm=NormKind.RMS,
    projector_epsilon="",
    has_projector_bias="multimodal_projector_bias",
    has_first_bias=False,
)
_QWEN2_5 = VisionFamily(
    names=TowerNames(
        towers=("model.visual.", "visual."),
        projectors=("model.visual.", "visual."),
        patches="patch_embed.proj",
        layers="blocks",
        qkv=("attn.qkv",),
        output="attn.proj",
        attention_norm="norm1",
        mlp_norm="norm2",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        projector=ProjectorNames(("merger.mlp.0", "merger.mlp.2"), "merger.ln_q"),
    ),
    merge_size=_merge_of_qwen,
    fields=SizeFields("depth", "num_heads", output_size="out_hidden_size"),
    defaults={
        "depth": 32,
        "hidden_size": 3584,
        "hidden_act": "silu",
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    mean=CLIP_MEAN,
    deviation=CLIP_DEVIATION,
    has_rope=True,
    norm=NormKind.RMS,
    has_patch_bias=False,
    is_folded_in_time=True,
    is_gated=True,
    projector_norm=NormKind.RMS,
    has_projector_bias=True,
    has_windows=True,
)
_QWEN2 = replace(
    _QWEN2_5,
    names=replace(_QWEN2_5.names, up=("mlp.fc1",), down="mlp.fc2"),
    fields=SizeFields("depth", "num_heads", "embed_dim", "hidden_size", "mlp_ratio"),
    defaults={
        "depth": 32,
        "embed_dim": 1280,
        "hidden_act": "quick_gelu",
        "hidden_size": 3584,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
    },
    norm=NormKind.LAYER,
    is_gated=False,
    projector_norm=NormKind.LAYER,
    has_windows=False,
)
_QWEN3 = replace(
    _QWEN2_5,
    names=replace(
        _QWEN2_5.names,
        positions="pos_embed.weight",
        up=("mlp.linear_fc1",),
        down="mlp.linear_fc2",
        projector=ProjectorNames(("merger.linear_fc1", "merger.linear_fc2"), "merger.norm"),
        level_projector=ProjectorNames(
            (
                "deepstack_merger_list.{level}.linear_fc1",
                "deepstack_merger_list.{level}.linear_fc2",
            ),
            "deepstack_merger_list.{level}.norm",
        ),
    ),
    defaults={
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 3584,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    mean=HALF,
    deviation=HALF,
    positions=Positions.INTERPOLATED,
    norm=NormKind.LAYER,
    has_patch_bias=True,
    is_gated=False,
    projector_norm=NormKind.LAYER,
    has_windows=False,
)
_QWEN3_5 = replace(
    _QWEN3,
    names=replace(_QWEN3.names, level_projector=None),
    defaults={**_QWEN3.defaults, "deepstack_visual_indexes": []},
)

VISION_FAMILIES: Mapping[str, VisionFamily] = {
    "Idefics3ForConditionalGeneration": _IDEFICS3,
    "SmolVLMForConditionalGeneration": _IDEFICS3,
    "Mistral3ForConditionalGeneration": _MISTRAL3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4_UNIFIED,
    "Qwen2VLForConditionalGeneration": _QWEN2,
    "Qwen2_5_VLForConditionalGeneration": _QWEN2_5,
    "Qwen3VLForConditionalGeneration": _QWEN3,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
}
