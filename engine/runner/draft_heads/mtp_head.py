"""Multi-token prediction (MTP): the layer after a model's last one, in its files or in others.

It is a layer like the others, over a projection of the embedding of the next token and the model's
last hidden state. Embedding and LM head are those of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from baton.checkpoint.checkpoint import Checkpoint, Expected, Shape, Tensors
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.head_target import quantized_with
from baton.engine.runner.draft_heads.layer_head import LayerHead
from baton.engine.runner.drafting.draft_head import DraftHead, OpenHead
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.weights.decoder_loading import layer_attention
from baton.engine.runner.weights.layer_loading import load_layer
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap

INSTEAD = (
    "use suffix:8, which needs no other files, or --speculative-model with a head (eagle3:3, "
    "mtp:3) or a smaller model (draft:3)"
)


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the layer's tensors. Prefixes are those after a model of `num_layers` layers."""

    layer: str  # prefix of the tensors of a decoder layer
    own: str  # prefix of the others
    projection: str
    embedding_norm: str
    state_norm: str
    norm: str  # of the output


QWEN = MtpNames(
    layer="mtp.layers.0.",
    own="mtp.",
    projection="fc",
    embedding_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    norm="norm",
)
AFTER_LAST = MtpNames(  # GLM-4.5, DeepSeek V3, and GGUF files of any family
    layer="{model}layers.{num_layers}.",
    own="{model}layers.{num_layers}.",
    projection="eh_proj",
    embedding_norm="enorm",
    state_norm="hnorm",
    norm="shared_head.norm",
)


def is_qwen(target: ModelConfig) -> bool:
    ignored = FAMILIES[target.architecture].names.ignored
    return any(name.startswith(QWEN.own) for name in ignored)


def extend_by_mtp(target: ModelConfig) -> ModelConfig:
    """Return the target with the layer after its last one."""
    layer = target.layers[target.attention_layers[-1]]
    if target.moe is not None:
        layer = replace(layer, mlp_size=0)
    return replace(target, layers=(*target.layers, layer))


def open_mtp(config: RunnerConfig, checkpoint: Checkpoint, target: ModelConfig) -> OpenHead:
    """Find the layer in the files of the model, or in `--speculative-model`.

    Raises ModelError, and InvalidConfig for files without a layer that Baton reads.
    """
    separate = open_checkpoint(config.speculative_model) if config.speculative_model else None
    with (separate or checkpoint).open_tensors() as files:
        names = find_names(target, files.shapes(), (separate or checkpoint).path)
    extended = extend_by_mtp(target)

    def load(files: Tensors, decoder: Decoder, load_target: LoadTarget) -> DraftHead:
        load_target = quantized_with(files, load_target)
        if separate is None:
            return load_mtp_head(extended, names, files, decoder, load_target)
        with separate.open_tensors() as own:
            return load_mtp_head(extended, names, own, decoder, load_target)

    attention = layer_attention(extended, extended.num_layers - 1, extended.kv_places()[-1])
    return OpenHead(extended, [attention], load, has_folder=separate is not None)


def has_mtp(checkpoint: Checkpoint, target: ModelConfig) -> bool:
    """Return whether the model's files have a layer that Baton reads."""
    with checkpoint.open_tensors() as files:
        try:
            find_names(target, files.shapes(), checkpoint.path)
        except InvalidConfig:
            return False
    return True


def find_names(target: ModelConfig, found: Mapping[str, Shape], path: Path) -> MtpNames:
    """Return the names that the files use, with whole prefixes. Raises InvalidConfig."""
    fill = {"model": TensorMap(target, found).prefix, "num_layers": target.num_layers}
    for names in (QWEN, AFTER_LAST):
        own = names.own.format(**fill)
        if any(name.startswith(f"{own}{names.projection}.") for name in found):
            return replace(names, own=own, layer=names.layer.format(**fill))
    problem = f"{path} has no layer for multi-token prediction"
    if any("mtp" in name for name in found):
        problem = f"Baton does not read the layers for multi-token prediction in {path}"
    raise InvalidConfig(f"--speculative mtp: {problem}: {INSTEAD}")


def load_mtp_head(
    extended: ModelConfig, names: MtpNames, files: Tensors, decoder: Decoder, target: LoadTarget
) -> LayerHead:
    """Load the last layer of `extended`. Raises ModelError."""
    index = extended.num_layers - 1
    tensors = TensorMap(extended, _within(names.own, files.shapes()), {index: names.layer})
    recorder = WeightLoader()
    _load_weights(tensors, names, recorder)
    if extended.quantization is None:
        shapes = recorder.shapes()
        expected = {name: Expected(shape, FLOATS) for name, shape in shapes.items()}
        files.check(expected, lambda name: name not in expected)
    loader = TensorLoader(files, target, norm=extended.norm, quantization=extended.quantization)
    layer, projection, (embedding_norm, state_norm, norm) = _load_weights(tensors, names, loader)
    alone = replace(
        extended,
        layers=extended.layers[index:],
        cache_places=extended.kv_places()[-1:],
        num_before=len(extended.attention_layers) - 1,
    )
    return LayerHead(
        config=extended,
        ops=target.parts.ops,
        taps=None,
        embed=decoder.embed,
        embedding_norm=embedding_norm,
        state_norm=state_norm,
        projection=projection,
        layer=target.parts.make_layers(alone, [layer])[0],
        norm=norm,
        head=decoder.logits,
        feeds_back_normed=True,
        has_first_embedding=is_qwen(extended),  # else that of the second token is zero
    )


def _load_weights(
    tensors: TensorMap, names: MtpNames, loader: WeightLoader
) -> tuple[Layer, Linear, list[Norm]]:
    """Load the layer, the projection of its inputs, and the norms of these and of its output."""
    hidden = tensors.config.hidden_size
    norms = (names.embedding_norm, names.state_norm, names.norm)
    return (
        load_layer(tensors, loader, tensors.config.num_layers - 1),
        loader.linear(Stack([f"{names.own}{names.projection}"], [hidden], 2 * hidden)),
        [loader.norm(f"{names.own}{name}", hidden) for name in norms],
    )


def _within(prefix: str, found: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the tensors with a prefix, whose experts can have another form than the model's."""
    return {name: shape for name, shape in found.items() if name.startswith(prefix)}
