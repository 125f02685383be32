"""Multi-token prediction (MTP): the layer after a model's last one, which its files can have.

It is a layer like the others, over a projection of the embedding of the next token and the model's
last hidden state. Embedding and LM head are those of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from baton.checkpoint.checkpoint import Expected, Tensors
from baton.checkpoint.json_fields import JsonFields
from baton.checkpoint.weight_files import FLOATS
from baton.core.errors import InvalidConfig, ModelError
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.layers import DecoderLayer, LayerInput, UnfusedLayer
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.mixers import ForwardPass, make_mixer
from baton.engine.runner.model.ops import Norm, Ops
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.weights.decoder_loading import load_layer
from baton.engine.runner.weights.tensor_loading import LoadTarget, TensorLoader
from baton.engine.runner.weights.tensor_names import TensorMap

PROJECTION, EMBEDDING_NORM, STATE_NORM = "eh_proj", "enorm", "hnorm"
FINAL_NORM = "shared_head.norm"
NUM_LAYERS = "num_nextn_predict_layers"


def extend_by_mtp(raw: JsonFields, target: ModelConfig) -> ModelConfig:
    """Return the target with the layer after its last one. Raises InvalidConfig without one."""
    if not raw.has(NUM_LAYERS) or not raw.positive_int(NUM_LAYERS):
        raise InvalidConfig(
            f"--speculative mtp: {raw.where} has no {NUM_LAYERS}: {target.architecture} was saved "
            "without a layer that predicts several tokens"
        )
    return replace(target, layers=(*target.layers, target.layers[-1]))


@dataclass(frozen=True, slots=True, eq=False)
class MtpHead:
    """Implements `DraftHead`."""

    config: ModelConfig
    ops: Ops
    decoder: Decoder
    embedding_norm: Norm
    state_norm: Norm
    projection: Linear
    layer: DecoderLayer
    norm: Norm

    @property
    def needs_all_tokens(self) -> bool:
        return True

    def states_of(self, hidden_states: HiddenStates) -> Tensor:
        assert hidden_states.by_token is not None
        return hidden_states.by_token

    def forward(
        self, token_ids: Tensor, states: Tensor, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        embeddings = self.decoder.embed(token_ids)
        # As the layers were trained, the first position has no embedding.
        embeddings = embeddings.masked_fill((positions == 0)[:, None], 0)
        embeddings = self.ops.rms_norm(embeddings, self.embedding_norm)
        normed = self.ops.rms_norm(states, self.state_norm)
        projected = self.projection(torch.cat((embeddings, normed), dim=1))
        hidden, _ = self.layer.forward(forward_pass, LayerInput(projected), None)
        return self.ops.rms_norm(hidden, self.norm)

    def logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)


def load_mtp_head(
    extended: ModelConfig, files: Tensors, decoder: Decoder, target: LoadTarget
) -> MtpHead:
    """Load the last layer of `extended`. Raises ModelError."""
    index, ops, hidden = extended.num_layers - 1, target.parts.ops, extended.hidden_size
    tensors = TensorMap(extended, files.shapes())
    own = {
        f"{PROJECTION}.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in (EMBEDDING_NORM, STATE_NORM, FINAL_NORM)},
    }
    shapes = {tensors.in_layer(index, name): shape for name, shape in own.items()}
    shapes |= tensors.shapes_of_layer(index)
    first = tensors.in_layer(index, f"{PROJECTION}.weight")
    if first not in files.shapes():
        raise ModelError(
            f"{first} is missing, which --speculative mtp needs; fetch the model again"
        )
    if extended.quantization is None:
        expected = {name: Expected(shape, FLOATS) for name, shape in shapes.items()}
        files.check(expected, lambda name: name not in expected)
    # Quantizing one layer would save little, and cost drafts.
    plain = replace(target, quantize="none", cached=None)
    loader = TensorLoader(
        shapes, files, plain, None, norm=extended.norm, quantization=extended.quantization
    )
    layer = load_layer(tensors, loader, index)
    mixer = make_mixer(extended, ops, layer, index)
    norms = [
        loader.norm(tensors.in_layer(index, name))
        for name in (EMBEDDING_NORM, STATE_NORM, FINAL_NORM)
    ]
    return MtpHead(
        config=extended,
        ops=ops,
        decoder=decoder,
        embedding_norm=norms[0],
        state_norm=norms[1],
        projection=loader.linear(
            [tensors.in_layer(index, PROJECTION)], has_bias=False, keeps_dtype=True
        ),
        layer=UnfusedLayer(extended, ops, layer, mixer),
        norm=norms[2],
    )
