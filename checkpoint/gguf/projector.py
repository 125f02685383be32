"""Vision towers in GGUF files of their own (`mmproj-*.gguf`), next to that of a text model.

Their fields and tensors get the names that the hub has for the whole model. No torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from baton.checkpoint.gguf.file_choice import order_projectors
from baton.checkpoint.gguf.gguf_file import GgufFile
from baton.checkpoint.gguf.hub_tensors import UNCHANGED, Change, HubTensor, Source, join_rows
from baton.checkpoint.gguf.projector_table import (
    PROJECTORS,
    ProjectorFamily,
    level_layers,
    positive,
)
from baton.checkpoint.json_fields import JsonFields
from baton.core.errors import ModelError

log = logging.getLogger(__name__)

IN_LAYER = re.compile(r"v\.blk\.(\d{1,9})\.(\w+)\.(weight|bias|(?:in|out)put_m(?:in|ax))")
BOUNDS = ("input", "output")  # of a linear layer's numbers
NUMBER = Change(shape=lambda _: ())
IN_LEVEL = re.compile(r"v\.deepstack\.(\d{1,9})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GgufProjector:
    """Vision tower in `file`, of the model in `text`. Methods raise ModelError."""

    file: GgufFile
    text: GgufFile

    @classmethod
    def of(cls, file: GgufFile, text: GgufFile) -> GgufProjector:
        """Return the tower in a file. Raises ModelError unless it fits the text model."""
        found = cls(file, text)
        family, size = found.family, positive(file, "projection_dim")
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
        activation = "quick_gelu"
        for name, other in (("gelu", "gelu_pytorch_tanh"), ("silu", "silu")):
            if file.get(f"clip.use_{name}", bool, False):
                activation = other
        sizes = {name: positive(file, key) for name, key in family.sizes.items()}
        return config.with_fields(
            {
                "architectures": [family.hub_name],
                "model_type": family.model_type,
                "vision_config": {**sizes, "hidden_act": activation, **family.vision(file)},
                **family.outer(file, self.text),
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
        changes, layer_names = self.family.changes, self._layer_names()
        places = {stem: place for place, stem in enumerate(layer_names)}
        found: dict[str, list[tuple[int, str, HubTensor]]] = {}
        for name, entry in self.file.tensors.items():
            match = IN_LAYER.fullmatch(name)
            if name.startswith(self.family.ignored):
                continue
            change = changes.get(name, changes.get(name.rpartition(".")[0], UNCHANGED))
            if match is not None and match[3].startswith(BOUNDS):
                change = NUMBER
            place = 0 if match is None else places.get(match[2], 0)
            tensor = HubTensor((Source(entry),), change)
            found.setdefault(self._hub_name(name, layer_names), []).append((place, name, tensor))
        return {
            name: join_rows(self.file, [tensor for *_, tensor in sorted(parts, key=_order)])
            for name, parts in found.items()
        }

    def _hub_name(self, name: str, layer_names: Mapping[str, str]) -> str:
        family, match = self.family, IN_LAYER.fullmatch(name)
        if match is not None and match[2] in layer_names:
            layer = f"{family.tower}{family.layers}.{match[1]}"
            stem = layer_names[match[2]]
            stem = stem.removesuffix(".linear") if match[3].startswith(BOUNDS) else stem
            return f"{layer}.{stem}.{match[3]}"
        match, levels = IN_LEVEL.fullmatch(name), level_layers(self.file)
        if match is not None and match[2] in family.level_names and int(match[1]) in levels:
            level = f"{family.tower}deepstack_merger_list.{levels.index(int(match[1]))}"
            return f"{level}.{family.level_names[match[2]]}.{match[3]}"
        stem, _, kind = name.rpartition(".")
        for names, prefix in ((family.names, family.tower), (family.projector, "")):
            if name in names:
                return f"{prefix}{names[name]}"
            if stem in names and kind in ("weight", "bias"):
                return f"{prefix}{names[stem]}.{kind}"
        raise ModelError(
            f"{self.file.path} has the tensor {name!r}, which Baton does not know in a tower of "
            f"{family.model_type}"
        )

    def _layer_names(self) -> Mapping[str, str]:
        """Return the names in a layer. Early files have those of two matrices swapped."""
        names, up = self.family.layer_names, self.file.tensors.get("v.blk.0.ffn_up.weight")
        if up is None or up.shape[-1] == positive(self.file, "embedding_length"):
            return names
        return {**names, "ffn_up": names["ffn_down"], "ffn_down": names["ffn_up"]}


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


def _order(part: tuple[int, str, HubTensor]) -> tuple[int, str]:
    return part[:2]
