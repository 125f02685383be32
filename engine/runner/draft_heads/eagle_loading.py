"""Loads an EAGLE head from its folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint, Expected, Tensors
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import InvalidConfig, ModelError
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.eagle_config import HeadConfig, read_head_config
from baton.engine.runner.draft_heads.head_target import quantized_with, share_cache
from baton.engine.runner.draft_heads.layer_head import (
    JoinedTaps,
    LayerHead,
    PartialHead,
    Taps,
    tap_layers,
)
from baton.engine.runner.drafting.draft_head import DraftHead, OpenHead
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.linear import Linear, Mlp
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.weights.decoder_loading import layer_attention
from baton.engine.runner.weights.loader import Stack, WeightLoader
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP, DOWN, OUTPUT = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "self_attn.o_proj"
MLP_NORM = "{layer}post_attention_layernorm"
HEAD, EMBEDDING, OFFSETS = "lm_head", "embed_tokens", "d2t"
INTEGERS = ("I64", "I32")


def open_eagle(config: RunnerConfig, _: Checkpoint, target: ModelConfig) -> OpenHead:
    """Check the head of `--speculative-model`. Raises ModelError and InvalidConfig."""
    assert config.speculation is not None
    method = config.speculation.method
    if not config.speculative_model:
        raise InvalidConfig(
            f"--speculative {method} needs --speculative-model with the folder of the head"
        )
    checkpoint = open_checkpoint(config.speculative_model)
    head = read_head_config(method, checkpoint, target)
    model, extended = share_cache(head.model, target)
    head = replace(head, model=model)

    def load(model_files: Tensors, decoder: Decoder, load_target: LoadTarget) -> DraftHead:
        own_target = quantized_with(model_files, load_target)
        with checkpoint.open_tensors() as files:
            return _HeadLoader(head, files, target, decoder, own_target).load()

    attention = layer_attention(model, 0, model.cache_places[0])
    return OpenHead(extended, [attention], load, has_folder=True)


class _Weights(NamedTuple):
    """Tensors of a head. What its folder lacks is None."""

    projection: Linear  # of the taps, or of embedding and state
    joined_norm: Norm | None  # of all taps
    tap_norms: Sequence[Norm]
    embedding_norm: Norm | None
    state_norm: Norm | None
    layer: Layer
    norm: Norm | None
    head: Linear | None
    embedding: Linear | None


class _HeadLoader:
    """Loads a head, and taps the layers of the decoder that it reads. Raises ModelError."""

    def __init__(
        self,
        config: HeadConfig,
        files: Tensors,
        target: ModelConfig,
        decoder: Decoder,
        load_target: LoadTarget,
    ) -> None:
        self._config = config
        self._files = files
        self._target = target
        self._decoder = decoder
        self._parts, self._place = load_target.parts, load_target.device
        ignored = config.names.ignored
        self._names = frozenset(files.names()).difference(ignored)
        prefixes = config.names.layers
        found = [name for name in prefixes if f"{name}{OUTPUT}.weight" in self._names]
        self._layer = (found or prefixes)[0]
        recorder = WeightLoader()
        self._read(recorder)
        expected = {name: Expected(shape, FLOATS) for name, shape in recorder.shapes().items()}
        if OFFSETS in self._names:
            expected[OFFSETS] = Expected((config.num_draft_tokens,), INTEGERS)
        files.check(expected, lambda name: name in ignored)
        self._weights = self._read(TensorLoader(files, load_target, norm=config.model.norm))

    def load(self) -> LayerHead:
        config, weights = self._config, self._weights
        taps = self._tap_layers() if config.taps else None
        return LayerHead(
            config=config.model,
            ops=self._parts.ops,
            taps=taps,
            embed=self._embedding().rows,
            embedding_norm=weights.embedding_norm,
            state_norm=weights.state_norm,
            projection=weights.projection if taps is None else None,
            layer=self._parts.make_layers(config.model, [weights.layer])[0],
            norm=weights.norm,
            head=self._head(),
            adds_normed=config.adds_normed,
            feeds_back_normed=config.feeds_back_normed,
            needs_all_tokens=taps is None or max(config.taps) > self._target.last_writer,
        )

    def _read(self, loader: WeightLoader) -> _Weights:
        config, names, hidden = self._config, self._config.names, self._config.model.hidden_size
        taps = len(config.taps) * config.target_size
        num_norms = len(config.taps) if config.norms_each_tap else 0

        def norm(name: str) -> Norm | None:
            return loader.norm(name.format(layer=self._layer), hidden) if name else None

        def vocabulary(name: str, count: int) -> Linear | None:
            is_found = f"{name}.weight" in self._names
            return loader.embedding(Stack([name], [count], hidden)) if is_found else None

        return _Weights(
            self._linear(loader, Stack([names.projection], [hidden], taps or 2 * hidden)),
            loader.norm("input_norm", taps) if config.norms_all_taps else None,
            [loader.norm(f"fc_norm.{number}", config.target_size) for number in range(num_norms)],
            norm(names.embedding_norm),
            norm(names.state_norm),
            self._read_layer(loader, norm(names.input_norm), norm(MLP_NORM)),
            norm(names.norm),
            vocabulary(HEAD, config.num_draft_tokens),
            vocabulary(EMBEDDING, config.model.vocab_size),
        )

    def _read_layer(
        self, loader: WeightLoader, input_norm: Norm | None, mlp_norm: Norm | None
    ) -> Layer:
        model, hidden = self._config.model, self._config.model.hidden_size
        queries, keys = (count * model.head_dim for count in (model.num_heads, model.num_kv_heads))
        size, read = model.layers[0].mlp_size, 2 * hidden if self._config.taps else hidden

        def linear(names: Sequence[str], rows: Sequence[int], columns: int) -> Linear:
            stored = [f"{self._layer}{name}" for name in names]
            return self._linear(loader, Stack(stored, rows, columns))

        return Layer(
            input_norm=input_norm,
            qkv=linear(QKV, (queries, keys, keys), read),
            q_norm=None,
            k_norm=None,
            output=linear([OUTPUT], [hidden], queries),
            attention_norm=None,
            mlp_norm=mlp_norm,
            mlp=Mlp(linear(GATE_UP, (size, size), hidden), linear([DOWN], [hidden], size)),
            mlp_output_norm=None,
        )

    def _linear(self, loader: WeightLoader, stack: Stack) -> Linear:
        has_bias = any(f"{name}.bias" in self._names for name in stack.names)
        return loader.linear(replace(stack, has_bias=has_bias))

    def _tap_layers(self) -> JoinedTaps:
        config, taps, weights = self._config, Taps(len(self._config.taps)), self._weights
        self._decoder.layers = tap_layers(self._decoder.layers, config.taps, taps)
        ops, norms = self._parts.ops, weights.tap_norms
        return JoinedTaps(ops, taps, norms, weights.joined_norm, weights.projection)

    def _embedding(self) -> Linear:
        if self._weights.embedding is not None:
            return self._weights.embedding
        if self._config.model.hidden_size != self._target.hidden_size:
            raise ModelError(
                f"the head has no {EMBEDDING}.weight, and its hidden_size "
                f"{self._config.model.hidden_size} is not that of the model "
                f"({self._target.hidden_size})"
            )
        return self._decoder.embedding

    def _head(self) -> Callable[[Tensor], Tensor]:
        if self._weights.head is None:
            return self._decoder.logits
        return PartialHead(self._weights.head, self._drafted_ids(), self._target.vocab_size)

    def _drafted_ids(self) -> Tensor | None:
        if OFFSETS not in self._names:
            return None
        offsets = self._files.tensor(OFFSETS).long()
        ids = torch.arange(len(offsets)) + offsets
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._target.vocab_size):
            raise ModelError(f"{OFFSETS} leads to tokens outside of the vocabulary")
        return ids.to(self._place)
