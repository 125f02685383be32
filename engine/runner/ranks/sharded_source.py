"""Loads one rank's shard of a decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.load import DecoderSource, LoadedDecoder
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.rank_group import RankGroup, Shard
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.weights.decoder_loading import AdaptLayers, attention_of, load_decoder
from baton.engine.runner.weights.open_weights import OpenWeights
from baton.engine.runner.weights.shards import ShardedTensors


def shard_of(config: RunnerConfig, rank: int) -> Shard:
    """Return the part of the weights that a rank computes."""
    return Shard(rank, config.tensor_parallel_size, config.enable_expert_parallel)


def sharded_source(group: RankGroup, on_loaded: Callable[[], None]) -> DecoderSource:
    """Return the source of a rank's decoder. `on_loaded` is called once its shard is loaded."""
    shard = group.shard

    def load(
        weights: OpenWeights, on_progress: LoadProgressCallback | None, adapt: AdaptLayers | None
    ) -> LoadedDecoder:
        whole = weights.model
        assert isinstance(whole, ModelConfig)
        tensors = ShardedTensors.of(whole, weights.tensors, shard)
        model = tensors.map.config
        target = replace(weights.target, group=group, vocab_size=whole.vocab_size)
        decoder = load_decoder(model, tensors, target, on_progress, adapt, tensors.map)
        attention = [
            replace(layer, own_heads=shard.part_of(whole.of_layer(index).num_kv_heads))
            for index, layer in zip(
                whole.attention_layers, attention_of(whole, tensors, target.device), strict=True
            )
        ]
        on_loaded()
        return LoadedDecoder(decoder, attention)

    return DecoderSource(read_model_config, load, _name(shard))


def _name(shard: Shard) -> str:
    experts = " with whole experts" if shard.has_whole_experts else ""
    return f"rank {shard.rank} of {shard.size}{experts}"
