"""Loads an EAGLE-3 head from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from baton.checkpoint.checkpoint import Checkpoint, Expected, Shape, Tensors
from baton.checkpoint.hub import open_checkpoint
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import InvalidConfig, ModelError
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.eagle3_config import HeadConfig, read_head_config
from baton.engine.runner.draft_heads.eagle3_head import Eagle3Head
from baton.engine.runner.draft_heads.shared_cache import share_cache
from baton.engine.runner.draft_heads.taps import Taps, tap_layers
from baton.engine.runner.drafting.draft_head import DraftHead, OpenHead
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer
from baton.engine.runner.model.linear import Linear, Mlp
from baton.engine.runner.weights.decoder_loading import layer_attention
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader

LAYER_NAMES = ("midlayer.", "layers.0.")
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP, DOWN, OUTPUT = ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "self_attn.o_proj"
HEAD, EMBEDDING, OFFSETS = "lm_head", "embed_tokens", "d2t"
IGNORED = ("t2d", "mask_hidden")
INTEGERS = ("I64", "I32")


def open_eagle3(config: RunnerConfig, _: Checkpoint, target: ModelConfig) -> OpenHead:
    """Check the head of `--speculative-model`. Raises ModelError and InvalidConfig."""
    if not config.speculative_model:
        raise InvalidConfig(
            "--speculative eagle3 needs --speculative-model with the folder of the head"
        )
    checkpoint = open_checkpoint(config.speculative_model)
    head = read_head_config(checkpoint, target)
    model, extended = share_cache(head.model, target)
    head = replace(head, model=model)

    def load(_: Tensors, decoder: Decoder, load_target: LoadTarget) -> DraftHead:
        return load_eagle3_head(head, checkpoint, target, decoder, load_target)

    attention = layer_attention(model, 0, model.cache_places[0])
    return OpenHead(extended, [attention], load, has_folder=True)


def load_eagle3_head(
    config: HeadConfig,
    checkpoint: Checkpoint,
    target: ModelConfig,
    decoder: Decoder,
    load_target: LoadTarget,
) -> Eagle3Head:
    """Load a head, and tap the layers of the decoder that it reads. Raises ModelError."""
    with checkpoint.open_tensors() as files:
        return _HeadLoader(config, files, target, decoder, load_target).load()


class _HeadLoader:
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
        self._names = frozenset(files.names())
        found = [name for name in LAYER_NAMES if f"{name}{OUTPUT}.weight" in self._names]
        self._layer = (found or LAYER_NAMES)[0]
        shapes = dict(self._shapes())
        expected = {name: Expected(shape, FLOATS) for name, shape in shapes.items()}
        if OFFSETS in self._names:
            expected[OFFSETS] = Expected((config.num_draft_tokens,), INTEGERS)
        files.check(expected, lambda name: name in IGNORED)
        # Quantizing so small a part would save little, and cost drafts.
        plain = replace(load_target, quantize="none", cached=None)
        self._loader = TensorLoader(shapes, files, plain, None, norm=config.model.norm)

    def load(self) -> Eagle3Head:
        config, load = self._config, self._loader
        taps = Taps(len(config.taps))
        embedding, head = self._decoder.embedding, self._decoder.head
        if f"{EMBEDDING}.weight" in self._names:
            embedding = load.embedding(EMBEDDING)
        elif config.model.hidden_size != self._target.hidden_size:
            raise ModelError(
                f"the head has no {EMBEDDING}.weight, and its hidden_size "
                f"{config.model.hidden_size} is not that of the model ({self._target.hidden_size})"
            )
        if f"{HEAD}.weight" in self._names:
            head = load.embedding(HEAD)
        loaded = Eagle3Head(
            config=config.model,
            ops=self._parts.ops,
            taps=taps,
            taps_norm=load.norm("input_norm") if config.norms_all_taps else None,
            tap_norms=[load.norm(f"fc_norm.{i}") for i in self._tap_numbers],
            projection=self._linear(["fc"]),
            embedding=embedding,
            embedding_norm=load.norm(f"{self._layer}input_layernorm"),
            state_norm=load.norm(f"{self._layer}hidden_norm"),
            layer=self._load_layer(),
            norm=load.norm("norm"),
            head=head,
            drafted_ids=self._drafted_ids(),
            adds_normed=config.adds_normed,
            feeds_back_normed=config.feeds_back_normed,
        )
        self._decoder.layers = tap_layers(self._decoder.layers, config.taps, taps)
        return loaded

    @property
    def _tap_numbers(self) -> range:
        return range(len(self._config.taps) if self._config.norms_each_tap else 0)

    def _load_layer(self) -> DecoderLayer:
        model = self._config.model
        layer = Layer(
            input_norm=None,  # the head norms both parts of the input
            qkv=self._in_layer(QKV, has_bias=model.has_qkv_bias),
            q_norm=None,
            k_norm=None,
            output=self._in_layer([OUTPUT], has_bias=self._has_output_bias),
            attention_norm=None,
            mlp_norm=self._loader.norm(f"{self._layer}post_attention_layernorm"),
            mlp=Mlp(self._in_layer(GATE_UP), self._in_layer([DOWN])),
            mlp_output_norm=None,
        )
        return self._parts.make_layers(model, [layer])[0]

    @property
    def _has_output_bias(self) -> bool:
        return f"{self._layer}{OUTPUT}.bias" in self._names

    def _in_layer(self, names: tuple[str, ...] | list[str], *, has_bias: bool = False) -> Linear:
        return self._linear([f"{self._layer}{name}" for name in names], has_bias=has_bias)

    def _linear(self, names: list[str], *, has_bias: bool = False) -> Linear:
        return self._loader.linear(names, has_bias, keeps_dtype=True)

    def _drafted_ids(self) -> torch.Tensor | None:
        if OFFSETS not in self._names:
            return None
        offsets = self._files.tensor(OFFSETS).long()
        ids = torch.arange(len(offsets)) + offsets
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self._target.vocab_size):
            raise ModelError(f"{OFFSETS} leads to tokens outside of the vocabulary")
        return ids.to(self._place)

    def _shapes(self) -> Iterator[tuple[str, Shape]]:
        config, model = self._config, self._config.model
        hidden, taps = model.hidden_size, len(config.taps) * config.target_size
        queries, keys = (count * model.head_dim for count in (model.num_heads, model.num_kv_heads))
        yield "fc.weight", (hidden, taps)
        if config.norms_all_taps:
            yield "input_norm.weight", (taps,)
        for number in self._tap_numbers:
            yield f"fc_norm.{number}.weight", (config.target_size,)
        for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            yield f"{self._layer}{norm}.weight", (hidden,)
        for name, rows in zip(QKV, (queries, keys, keys), strict=True):
            yield f"{self._layer}{name}.weight", (rows, 2 * hidden)
            if model.has_qkv_bias:
                yield f"{self._layer}{name}.bias", (rows,)
        yield f"{self._layer}{OUTPUT}.weight", (hidden, queries)
        if self._has_output_bias:
            yield f"{self._layer}{OUTPUT}.bias", (hidden,)
        size = model.layers[0].mlp_size
        for name in GATE_UP:
            yield f"{self._layer}{name}.weight", (size, hidden)
        yield f"{self._layer}{DOWN}.weight", (hidden, size)
        yield "norm.weight", (hidden,)
        for name, rows in ((HEAD, config.num_draft_tokens), (EMBEDDING, model.vocab_size)):
            if f"{name}.weight" in self._names:
                yield f"{name}.weight", (rows, hidden)
