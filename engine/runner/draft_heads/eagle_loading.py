"""Loads an EAGLE head from its folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint, Expected, Shape, Tensors
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
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import Linear, Mlp
from baton.engine.runner.model.ops import Norm
from baton.engine.runner.weights.decoder_loading import layer_attention
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
        shapes = dict(self._shapes())
        expected = {name: Expected(shape, FLOATS) for name, shape in shapes.items()}
        if OFFSETS in self._names:
            expected[OFFSETS] = Expected((config.num_draft_tokens,), INTEGERS)
        files.check(expected, lambda name: name in ignored)
        self._loader = TensorLoader(shapes, files, load_target, None, norm=config.model.norm)

    def load(self) -> LayerHead:
        config, names = self._config, self._config.names
        taps = self._load_taps() if config.taps else None
        return LayerHead(
            config=config.model,
            ops=self._parts.ops,
            taps=taps,
            embed=self._embedding().rows,
            embedding_norm=self._norm(names.embedding_norm),
            state_norm=self._norm(names.state_norm),
            projection=self._linear([names.projection]) if taps is None else None,
            layer=self._load_layer(),
            norm=self._norm(names.norm),
            head=self._head(),
            adds_normed=config.adds_normed,
            feeds_back_normed=config.feeds_back_normed,
            needs_all_tokens=taps is None or max(config.taps) > self._target.last_writer,
        )

    def _load_taps(self) -> JoinedTaps:
        config, taps = self._config, Taps(len(self._config.taps))
        self._decoder.layers = tap_layers(self._decoder.layers, config.taps, taps)
        return JoinedTaps(
            self._parts.ops,
            taps,
            [self._loader.norm(f"fc_norm.{number}") for number in self._tap_numbers],
            self._loader.norm("input_norm") if config.norms_all_taps else None,
            self._linear([config.names.projection]),
        )

    @property
    def _tap_numbers(self) -> range:
        return range(len(self._config.taps) if self._config.norms_each_tap else 0)

    def _embedding(self) -> Linear:
        if f"{EMBEDDING}.weight" in self._names:
            return self._loader.embedding(EMBEDDING)
        if self._config.model.hidden_size != self._target.hidden_size:
            raise ModelError(
                f"the head has no {EMBEDDING}.weight, and its hidden_size "
                f"{self._config.model.hidden_size} is not that of the model "
                f"({self._target.hidden_size})"
            )
        return self._decoder.embedding

    def _head(self) -> Callable[[Tensor], Tensor]:
        if f"{HEAD}.weight" not in self._names:
            return self._decoder.logits
        head = self._loader.embedding(HEAD)
        return PartialHead(head, self._drafted_ids(), self._target.vocab_size)

    def _load_layer(self) -> DecoderLayer:
        layer = Layer(
            input_norm=self._norm(self._config.names.input_norm),
            qkv=self._in_layer(QKV),
            q_norm=None,
            k_norm=None,
            output=self._in_layer([OUTPUT]),
            attention_norm=None,
            mlp_norm=self._norm(MLP_NORM),
            mlp=Mlp(self._in_layer(GATE_UP), self._in_layer([DOWN])),
            mlp_output_norm=None,
        )
        return self._parts.make_layers(self._config.model, [layer])[0]

    def _norm(self, name: str) -> Norm | None:
        return self._loader.norm(name.format(layer=self._layer)) if name else None

    def _in_layer(self, names: Sequence[str]) -> Linear:
        return self._linear([f"{self._layer}{name}" for name in names])

    def _linear(self, names: Sequence[str]) -> Linear:
        return self._loader.linear(names, self._have_bias(names))

    def _have_bias(self, names: Sequence[str]) -> bool:
        return any(f"{name}.bias" in self._names for name in names)

    def _drafted_ids(self) -> Tensor | None:
        if OFFSETS not in self._names:
            return None
        offsets = self._files.tensor(OFFSETS).long()
        ids = torch.arange(len(offsets)) + offsets
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._target.vocab_size):
            raise ModelError(f"{OFFSETS} leads to tokens outside of the vocabulary")
        return ids.to(self._place)

    def _shapes(self) -> Iterator[tuple[str, Shape]]:
        config, model, names = self._config, self._config.model, self._config.names
        hidden, taps = model.hidden_size, len(config.taps) * config.target_size
        queries, keys = (count * model.head_dim for count in (model.num_heads, model.num_kv_heads))
        yield from self._linear_shapes([names.projection], [hidden], taps or 2 * hidden)
        if config.norms_all_taps:
            yield "input_norm.weight", (taps,)
        for number in self._tap_numbers:
            yield f"fc_norm.{number}.weight", (config.target_size,)
        norms = (names.embedding_norm, names.state_norm, names.input_norm, MLP_NORM, names.norm)
        for norm in filter(None, norms):
            yield f"{norm.format(layer=self._layer)}.weight", (hidden,)
        size, read = model.layers[0].mlp_size, 2 * hidden if taps else hidden
        linears: tuple[tuple[Sequence[str], Sequence[int], int], ...] = (
            (QKV, (queries, keys, keys), read),
            ([OUTPUT], [hidden], queries),
            (GATE_UP, (size, size), hidden),
            ([DOWN], [hidden], size),
        )
        for linear, rows, columns in linears:
            own = [f"{self._layer}{name}" for name in linear]
            yield from self._linear_shapes(own, rows, columns)
        for name, count in ((HEAD, config.num_draft_tokens), (EMBEDDING, model.vocab_size)):
            if f"{name}.weight" in self._names:
                yield f"{name}.weight", (count, hidden)

    def _linear_shapes(
        self, names: Sequence[str], rows: Sequence[int], columns: int
    ) -> Iterator[tuple[str, Shape]]:
        for name, count in zip(names, rows, strict=True):
            yield f"{name}.weight", (count, columns)
            if self._have_bias(names):
                yield f"{name}.bias", (count,)
