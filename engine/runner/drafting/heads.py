"""Draft heads by method: what a head adds to a model before its weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig
from baton.engine.kv_cache.groups import layer_places
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.drafting.draft_head import DraftHead
from baton.engine.runner.drafting.head_config import HeadConfig, read_head_config
from baton.engine.runner.drafting.head_loading import load_eagle3_head
from baton.engine.runner.drafting.mtp_head import extend_by_mtp, load_mtp_head
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.weights.decoder_loading import layer_attention
from baton.engine.runner.weights.tensor_loading import LoadTarget

LoadHead = Callable[[Tensors, Decoder, LoadTarget], DraftHead]


@dataclass(frozen=True, slots=True)
class OpenHead:
    """Head whose weights are not loaded yet."""

    extended: ModelConfig  # the model with the layer of the head after its own, as in the KV cache
    attention: LayerAttention  # of that layer
    load: LoadHead  # from the model's tensors, or its own; the decoder then serves it


def open_head(config: RunnerConfig, checkpoint: Checkpoint, target: ModelConfig) -> OpenHead | None:
    """Return the head that the settings name, or None. Raises ModelError and InvalidConfig."""
    method = "" if config.speculation is None else config.speculation.method
    folder, needs_folder = config.speculative_model, method in WITH_FOLDER
    if folder and not needs_folder:
        raise InvalidConfig(
            f"--speculative-model {folder} needs --speculative with a method that uses it: eagle3:3"
        )
    if needs_folder and not folder:
        raise InvalidConfig(
            f"--speculative {method} needs --speculative-model with the folder of the head"
        )
    opening = HEADS.get(method)
    return None if opening is None else opening(config, checkpoint, target)


def _open_eagle3(config: RunnerConfig, _: Checkpoint, target: ModelConfig) -> OpenHead:
    checkpoint = open_checkpoint(config.speculative_model)
    head: HeadConfig = read_head_config(checkpoint, target)
    extended = head.extend(target)
    place = layer_places(extended.kv_groups())[-1]
    scale = head.model.attention_scale

    def load(_: Tensors, decoder: Decoder, load_target: LoadTarget) -> DraftHead:
        return load_eagle3_head(head, checkpoint, target, decoder, load_target)

    attention = LayerAttention(scale, kv_group=place.group, index_in_block=place.place)
    return OpenHead(extended, attention, load)


def _open_mtp(_: RunnerConfig, checkpoint: Checkpoint, target: ModelConfig) -> OpenHead:
    extended = extend_by_mtp(checkpoint.read_config(), target)

    def load(files: Tensors, decoder: Decoder, load_target: LoadTarget) -> DraftHead:
        return load_mtp_head(extended, files, decoder, load_target)

    return OpenHead(extended, layer_attention(extended, extended.num_layers - 1), load)


HEADS: Mapping[str, Callable[[RunnerConfig, Checkpoint, ModelConfig], OpenHead]] = {
    "eagle3": _open_eagle3,
    "mtp": _open_mtp,
}
WITH_FOLDER = ("eagle3",)
