"""Table of the vision towers that are read from GGUF files, by their type. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import Change, Shape
from baton.checkpoint.gguf.metadata_fields import Fields, read_rope_scaling

# Fields of a tower in config.json, by those of the metadata.
SIGLIP_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
QWEN_SIZES = {
    "depth": "block_count",
    "num_heads": "attention.head_count",
    "patch_size": "patch_size",
}
# Names without `.weight` and `.bias`, or whole.
SIGLIP = {
    "v.patch_embd": "embeddings.patch_embedding",
    "v.position_embd": "embeddings.position_embedding",
    "v.post_ln": "post_layernorm",
}
SIGLIP_LAYER = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
GEMMA4 = {
    "v.patch_embd": "patch_embedder.input_proj",
    "v.position_embd.weight": "patch_embedder.position_embedding_table",
    "v.std_bias": "std_bias",
    "v.std_scale": "std_scale",
}
GEMMA4_UNIFIED = {
    "v.patch_norm.1": "patch_ln1",
    "v.patch_embd": "patch_dense",
    "v.patch_norm.2": "patch_ln2",
    "v.position_embd.weight": "pos_embedding",
    "v.patch_norm.3": "pos_norm",
}
# Bounds have the names of linear layers without their end.
GEMMA4_LAYER = {
    "ln1": "input_layernorm",
    "attn_q": "self_attn.q_proj.linear",
    "attn_k": "self_attn.k_proj.linear",
    "attn_v": "self_attn.v_proj.linear",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_out": "self_attn.o_proj.linear",
    "attn_post_norm": "post_attention_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj.linear",
    "ffn_up": "mlp.up_proj.linear",
    "ffn_down": "mlp.down_proj.linear",
    "ffn_post_norm": "post_feedforward_layernorm",
}
QWEN = {
    "v.patch_embd.weight": "patch_embed.proj.weight",  # of the first frame
    "v.patch_embd.weight.1": "patch_embed.proj.weight",  # of the second
    "v.post_ln": "merger.ln_q",
    "mm.0": "merger.mlp.0",
    "mm.2": "merger.mlp.2",
}
QWEN2_LAYER = {
    "ln1": "norm1",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ln2": "norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
QWEN2_5_LAYER = {
    **QWEN2_LAYER,
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QWEN3 = {
    **QWEN,
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.linear_fc1",
    "mm.2": "merger.linear_fc2",
}
QWEN3_LAYER = {
    "ln1": "norm1",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
QWEN3_LEVEL = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
WINDOW_SIZE = 112  # pixels, in all models


@dataclass(frozen=True, slots=True)
class ProjectorFamily:
    """A kind of tower, with the text model that it belongs to."""

    text: str  # architecture of the text model's file
    hub_name: str
    model_type: str
    tower: str  # before the names of a tower's tensors
    layers: str
    names: Mapping[str, str]
    layer_names: Mapping[str, str]
    sizes: Mapping[str, str]
    vision: Callable[[GgufFile], Fields]  # further fields of a tower
    outer: Callable[[GgufFile, GgufFile], Fields]  # from the files of tower and text
    processor: Callable[[GgufFile], Fields]  # of the image processor, besides its colours
    projector: Mapping[str, str] = field(default_factory=dict)  # names with another prefix
    level_names: Mapping[str, str] = field(default_factory=dict)  # of levels of DeepStack
    changes: Mapping[str, Change] = field(default_factory=dict)  # by names as those of `names`
    ignored: tuple[str, ...] = ()  # beginnings of names of tensors that pictures do not need


def positive(file: GgufFile, name: str) -> int:
    full = f"clip.vision.{name}"
    found = file.require(full, int)
    if found < 1:
        raise file.wrong(full, "must be above 0")
    return found


def _scale(file: GgufFile, default: int) -> int:
    name = "projector.scale_factor"
    return positive(file, name) if file.has(f"clip.vision.{name}") else default


def _num_positions(file: GgufFile) -> int:
    """Return the rows of the table of positions, of each axis if it has several; 0: no table."""
    entry = file.tensors.get("v.position_embd.weight")
    return 0 if entry is None or len(entry.shape) < 2 else entry.shape[-2]


def _siglip(file: GgufFile) -> Fields:
    return {"layer_norm_eps": file.require("clip.vision.attention.layer_norm_epsilon", float)}


def _gemma3(file: GgufFile, _: GgufFile) -> Fields:
    merged = positive(file, "patch_size") * _scale(file, 4)
    return {"mm_tokens_per_image": (positive(file, "image_size") // merged) ** 2}


def _gemma3_processor(file: GgufFile) -> Fields:
    edge = positive(file, "image_size")
    return {"size": {"height": edge, "width": edge}}


def _gemma4(file: GgufFile) -> Fields:
    return {
        "pooling_kernel_size": _scale(file, 3),
        "position_embedding_size": _num_positions(file),
        "rms_norm_eps": file.require("clip.vision.attention.layer_norm_epsilon", float),
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in file.tensors,
        "standardize": "v.std_bias" in file.tensors,
    }


def _gemma4_unified(file: GgufFile) -> Fields:
    return {
        "pooling_kernel_size": _scale(file, 3),
        "mm_posemb_size": _num_positions(file),
        "rms_norm_eps": file.require("clip.vision.attention.layer_norm_epsilon", float),
    }


def _by_colour(count: int) -> list[int]:
    """Return the place of each number of a patch where those of a colour follow each other."""
    num_pixels = count // 3
    return [colour * num_pixels + pixel for pixel in range(num_pixels) for colour in range(3)]


def _swap(shape: Shape) -> Shape:
    """Swap the first two dimensions. Other shapes than that of a table are refused later."""
    return shape if len(shape) < 2 else (shape[1], shape[0], *shape[2:])


def _gemma4_sight(_: GgufFile, text: GgufFile) -> Fields:
    """Return whether a picture's tokens see each other, as in models without inputs per layer.

    The files do not say it.
    """
    is_causal = "per_layer_token_embd.weight" in text.tensors
    return {"use_bidirectional_attention": None if is_causal else "vision"}


def _idefics3(file: GgufFile, _: GgufFile) -> Fields:
    return {"scale_factor": _scale(file, 2)}


def _idefics3_processor(file: GgufFile) -> Fields:
    edge = positive(file, "image_size")
    longest = file.get("clip.vision.preproc_image_size", int, edge)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": edge}}


def _qwen2(file: GgufFile) -> Fields:
    size, biases = positive(file, "embedding_length"), ("ffn_up.bias", "ffn_down.bias")
    # The metadata have another size as that of the MLP.
    found = (file.tensors.get(f"v.blk.0.{name}") for name in biases)
    mlp_size = max((each.shape[0] for each in found if each is not None), default=0)
    return {
        "embed_dim": size,
        "hidden_size": positive(file, "projection_dim"),
        "mlp_ratio": mlp_size / size,
    }


def _qwen2_5(file: GgufFile) -> Fields:
    pattern, depth = positive(file, "n_wa_pattern"), positive(file, "block_count")
    return {
        "hidden_size": positive(file, "embedding_length"),
        "intermediate_size": positive(file, "feed_forward_length"),
        "out_hidden_size": positive(file, "projection_dim"),
        "window_size": file.get("clip.vision.window_size", int, WINDOW_SIZE),
        "fullatt_block_indexes": list(range(pattern - 1, depth, pattern)),
    }


def _qwen3(file: GgufFile) -> Fields:
    return {
        "hidden_size": positive(file, "embedding_length"),
        "intermediate_size": positive(file, "feed_forward_length"),
        "out_hidden_size": positive(file, "projection_dim"),
        "num_position_embeddings": _num_positions(file),
        "deepstack_visual_indexes": level_layers(file),
    }


def level_layers(file: GgufFile) -> list[int]:
    """Return the layers of DeepStack."""
    flags = file.list_of("clip.vision.is_deepstack_layers", bool)
    return [layer for layer, flag in enumerate(flags) if flag]


def _qwen(_: GgufFile, text: GgufFile, *, is_interleaved: bool = False) -> Fields:
    sections = text.list_of(f"{text.architecture}.rope.dimension_sections", int)
    axes = {"mrope_section": sections[:3], "mrope_interleaved": is_interleaved}
    return {"rope_scaling": {**read_rope_scaling(text), **axes}}


def _qwen_processor(file: GgufFile) -> Fields:
    found: Fields = {}
    for name in ("min_pixels", "max_pixels"):
        if file.has(f"clip.vision.image_{name}"):
            found[name] = positive(file, f"image_{name}")
    return found


def _two_frames(shape: Shape) -> Shape:
    """Return the shape of patches of videos, whose frames follow each other as rows."""
    *outer, rows, columns = (1, *shape)
    return *outer[1:], 2, rows // 2, columns


_IDEFICS3 = ProjectorFamily(
    text="llama",
    hub_name="Idefics3ForConditionalGeneration",
    model_type="idefics3",
    tower="model.vision_model.",
    layers="encoder.layers",
    names=SIGLIP,
    layer_names=SIGLIP_LAYER,
    sizes=SIGLIP_SIZES,
    vision=_siglip,
    outer=_idefics3,
    processor=_idefics3_processor,
    projector={"mm.model.fc": "model.connector.modality_projection.proj"},
)
_QWEN2 = ProjectorFamily(
    text="qwen2vl",
    hub_name="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    tower="model.visual.",
    layers="blocks",
    names=QWEN,
    layer_names=QWEN2_LAYER,
    sizes=QWEN_SIZES,
    vision=_qwen2,
    outer=_qwen,
    processor=_qwen_processor,
    changes={
        "v.patch_embd.weight": Change(shape=_two_frames),
        "v.patch_embd.weight.1": Change(shape=_two_frames),
    },
)
_GEMMA4 = ProjectorFamily(
    text="gemma4",
    hub_name="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    tower="model.vision_tower.",
    layers="encoder.layers",
    names=GEMMA4,
    layer_names=GEMMA4_LAYER,
    sizes={name: key for name, key in SIGLIP_SIZES.items() if name != "image_size"},
    vision=_gemma4,
    outer=_gemma4_sight,
    processor=lambda _: {},
    projector={"mm.input_projection": "model.embed_vision.embedding_projection"},
    ignored=("a.", "mm.a."),
)
PROJECTORS: Mapping[str, ProjectorFamily] = {
    "gemma3": replace(
        _IDEFICS3,
        text="gemma3",
        hub_name="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        tower="model.vision_tower.",
        outer=_gemma3,
        processor=_gemma3_processor,
        projector={
            "mm.input_projection.weight": "model.multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm",
        },
        changes={"mm.soft_emb_norm": Change(offset=1.0)},
    ),
    "gemma4uv": replace(
        _GEMMA4,
        hub_name="Gemma4UnifiedForConditionalGeneration",
        model_type="gemma4_unified",
        tower="model.vision_embedder.",
        names=GEMMA4_UNIFIED,
        layer_names={},
        sizes={"patch_size": "patch_size", "mm_embed_dim": "embedding_length"},
        vision=_gemma4_unified,
        changes={
            "v.patch_embd.weight": Change(columns=_by_colour),
            "v.patch_norm.1": Change(rows=_by_colour),
            "v.position_embd.weight": Change(shape=_swap, swaps_dimensions=True),
        },
    ),
    "gemma4v": _GEMMA4,
    "idefics3": _IDEFICS3,
    "qwen2vl_merger": _QWEN2,
    "qwen2.5vl_merger": replace(
        _QWEN2,
        hub_name="Qwen2_5_VLForConditionalGeneration",
        model_type="qwen2_5_vl",
        layer_names=QWEN2_5_LAYER,
        vision=_qwen2_5,
    ),
    "qwen3vl_merger": replace(
        _QWEN2,
        text="qwen3vl",
        hub_name="Qwen3VLForConditionalGeneration",
        model_type="qwen3_vl",
        names=QWEN3,
        layer_names=QWEN3_LAYER,
        vision=_qwen3,
        outer=partial(_qwen, is_interleaved=True),
        level_names=QWEN3_LEVEL,
    ),
}
