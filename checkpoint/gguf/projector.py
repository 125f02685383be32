"""Vision towers in GGUF files of their own (`mmproj-*.gguf`), next to that of a text model.

A kind of tower is an entry in `PROJECTORS`: fields of config.json and of the image processor, and
names of the hub's tensors. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from baton.checkpoint.gguf.file_choice import order_projectors
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import UNCHANGED, Change, HubTensor, Source
from baton.checkpoint.gguf.metadata_fields import Fields
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError

log = logging.getLogger(__name__)

IN_LAYER = re.compile(r"v\.blk\.(\d{1,9})\.(\w+)\.(weight|bias)")
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
SWAPPED_LAYER = {**SIGLIP_LAYER, "ffn_up": "mlp.fc2", "ffn_down": "mlp.fc1"}
SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "image_size": "image_size",
    "patch_size": "patch_size",
}


@dataclass(frozen=True, slots=True)
class ProjectorFamily:
    """A kind of tower, with the text model that it belongs to."""

    text: str  # architecture of the text model's file
    hub_name: str
    model_type: str
    tower: str  # before the names of SIGLIP
    projector: Mapping[str, str]  # other tensors, by name without `.weight`
    fields: Callable[[GgufFile], Fields]  # of config.json, besides those of the tower
    processor: Callable[[GgufFile], Fields]  # besides mean and deviation
    changes: Mapping[str, Change] = field(default_factory=dict)


def _gemma3(file: GgufFile) -> Fields:
    merged = _positive(file, "patch_size") * _scale(file, 4)
    return {"mm_tokens_per_image": (_positive(file, "image_size") // merged) ** 2}


def _gemma3_processor(file: GgufFile) -> Fields:
    edge = _positive(file, "image_size")
    return {"size": {"height": edge, "width": edge}}


def _idefics3(file: GgufFile) -> Fields:
    return {"scale_factor": _scale(file, 2)}


def _idefics3_processor(file: GgufFile) -> Fields:
    edge = _positive(file, "image_size")
    longest = file.get("clip.vision.preproc_image_size", int, edge)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": edge}}


PROJECTORS: Mapping[str, ProjectorFamily] = {
    "gemma3": ProjectorFamily(
        text="gemma3",
        hub_name="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        tower="model.vision_tower.",
        projector={
            "mm.input_projection": "model.multi_modal_projector.mm_input_projection_weight",
            "mm.soft_emb_norm": "model.multi_modal_projector.mm_soft_emb_norm.weight",
        },
        fields=_gemma3,
        processor=_gemma3_processor,
        changes={"mm.soft_emb_norm": Change(offset=1.0)},
    ),
    "idefics3": ProjectorFamily(
        text="llama",
        hub_name="Idefics3ForConditionalGeneration",
        model_type="idefics3",
        tower="model.vision_model.",
        projector={"mm.model.fc": "model.connector.modality_projection.proj.weight"},
        fields=_idefics3,
        processor=_idefics3_processor,
    ),
}


@dataclass(frozen=True)
class GgufProjector:
    """File with the vision tower of a text model. Methods raise ModelError."""

    file: GgufFile

    @classmethod
    def of(cls, file: GgufFile, text: GgufFile) -> GgufProjector:
        """Return the tower in a file. Raises ModelError unless it fits the text model."""
        found = cls(file)
        family, size = found.family, file.require("clip.vision.projection_dim", int)
        if family.text != text.architecture:
            raise ModelError(
                f"{file.path} is for text models of {family.text!r}; {text.path} has "
                f"{text.architecture!r}"
            )
        hidden_size = text.require(f"{text.architecture}.embedding_length", int)
        if size != hidden_size:
            raise ModelError(
                f"{file.path} is for text models with embeddings of {size} numbers; those of "
                f"{text.path} have {hidden_size}"
            )
        return found

    @property
    def family(self) -> ProjectorFamily:
        file = self.file
        if file.architecture != "clip":
            raise ModelError(f"{file.path} has no vision tower, but {file.architecture!r}")
        name = "clip.vision.projector_type"
        kind = file.require(name if file.has(name) else "clip.projector_type", str)
        if kind not in PROJECTORS:
            raise ModelError(
                f"{file.path} has a vision tower of the type {kind!r}, which Baton does not read "
                f"from GGUF; it reads {', '.join(PROJECTORS)}"
            )
        return PROJECTORS[kind]

    def add_to(self, config: JsonFields) -> JsonFields:
        """Return config.json of the text model with the tower."""
        family, file = self.family, self.file
        activation = "gelu_pytorch_tanh" if file.get("clip.use_gelu", bool, False) else "quick_gelu"
        tower = {name: _positive(file, key) for name, key in SIZES.items()}
        epsilon = file.require("clip.vision.attention.layer_norm_epsilon", float)
        return config.with_fields(
            {
                "architectures": [family.hub_name],
                "model_type": family.model_type,
                "vision_config": {**tower, "hidden_act": activation, "layer_norm_eps": epsilon},
                **family.fields(file),
            }
        )

    def read_image_processor(self) -> JsonFields:
        file = self.file
        colours = {
            f"image_{name}": file.list_of(f"clip.vision.image_{name}", float)
            for name in ("mean", "std")
        }
        return JsonFields(str(file.path), {**colours, **self.family.processor(file)})

    def tensors(self) -> dict[str, HubTensor]:
        """Return the tower's tensors by their names of the hub."""
        family, layer_names = self.family, self._layer_names()
        found = dict[str, HubTensor]()
        for name, entry in self.file.tensors.items():
            stem, _, kind = name.rpartition(".")
            match = IN_LAYER.fullmatch(name)
            if match is not None and match[2] in layer_names:
                layer = f"{family.tower}encoder.layers.{match[1]}"
                hub_name = f"{layer}.{layer_names[match[2]]}.{kind}"
            elif stem in SIGLIP and kind in ("weight", "bias"):
                hub_name = f"{family.tower}{SIGLIP[stem]}.{kind}"
            elif stem in family.projector and kind == "weight":
                hub_name = family.projector[stem]
            else:
                raise ModelError(
                    f"{self.file.path} has the tensor {name!r}, which Baton does not know in a "
                    f"tower of {family.model_type}"
                )
            found[hub_name] = HubTensor((Source(entry),), family.changes.get(stem, UNCHANGED))
        return found

    def _layer_names(self) -> Mapping[str, str]:
        """Return the names in a layer. Early files have those of the two matrices swapped."""
        entry = self.file.tensors.get("v.blk.0.ffn_up.weight")
        hidden_size = _positive(self.file, "embedding_length")
        is_swapped = entry is not None and entry.shape[-1] != hidden_size
        return SWAPPED_LAYER if is_swapped else SIGLIP_LAYER


def find_projector(text: GgufFile) -> GgufProjector | None:
    """Return the vision tower next to a text model's file, or None if none fits it."""
    folder, causes = text.path.parent, list[str]()
    for name in order_projectors(path.name for path in folder.iterdir()):
        try:
            return GgufProjector.of(GgufFile.open(folder / name), text)
        except ModelError as error:
            causes.append(str(error))
    if causes:
        log.warning("images are not taken: %s", "; ".join(causes))
    return None


def _positive(file: GgufFile, name: str) -> int:
    full = f"clip.vision.{name}"
    found = file.require(full, int)
    if found < 1:
        raise file.wrong(full, "must be above 0")
    return found


def _scale(file: GgufFile, default: int) -> int:
    name = "clip.vision.projector.scale_factor"
    return _positive(file, "projector.scale_factor") if file.has(name) else default
