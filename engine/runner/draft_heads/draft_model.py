"""Draft model: a smaller model with the same tokenizer, whose KV shares blocks with the model's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from baton.checkpoint.checkpoint import Checkpoint, Tensors
from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig, ModelError
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.head_target import share_cache
from baton.engine.runner.drafting.draft_head import DraftHead, OpenHead
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.mixers import ForwardPass
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.weights.decoder_loading import layer_attention, load_decoder
from baton.engine.runner.weights.tensor_loading import LoadTarget


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """Implements `DraftHead` by all layers of another model, which ignores the model's states."""

    decoder: Decoder

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def reads_next_tokens(self) -> bool:
        return False

    @property
    def needs_all_tokens(self) -> bool:
        return False

    def states_of(self, hidden_states: HiddenStates) -> None:
        return None

    def inputs_of(self, states: Tensor) -> Tensor:
        return states

    def forward(
        self, token_ids: Tensor, states: Tensor | None, positions: Tensor, forward_pass: ForwardPass
    ) -> Tensor:
        return self.decoder.forward(token_ids, forward_pass, None)

    def logits(self, states: Tensor) -> Tensor:
        return self.decoder.logits(states)


def open_draft_model(config: RunnerConfig, _: Checkpoint, target: ModelConfig) -> OpenHead:
    """Check the model of `--speculative-model`. Raises ModelError and InvalidConfig."""
    if not config.speculative_model:
        raise InvalidConfig(
            "--speculative draft needs --speculative-model with the folder or file of a smaller "
            "model that has the same tokenizer"
        )
    checkpoint = open_checkpoint(config.speculative_model)
    draft = read_model_config(checkpoint)
    _check_fit(draft, target, str(checkpoint.path))
    draft, extended = share_cache(draft, target)
    attention = [
        layer_attention(draft, index, place)
        for index, place in zip(draft.attention_layers, draft.cache_places, strict=True)
    ]

    def load(_: Tensors, __: Decoder, load_target: LoadTarget) -> DraftHead:
        own = replace(load_target, cached=None, importance={})
        with checkpoint.open_tensors() as files:
            return DraftModel(load_decoder(draft, files, own))

    return OpenHead(extended, attention, load, has_folder=True)


def _check_fit(draft: ModelConfig, target: ModelConfig, path: str) -> None:
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"{path} has a vocabulary of {draft.vocab_size} tokens, and {target.architecture} one "
            f"of {target.vocab_size}: a draft model has the same tokenizer as the model"
        )
    if not draft.can_generate:
        raise ModelError(f"{path} does not generate, which a draft model does")
    unlike = {
        "recurrent layers": draft.recurrent is not None,
        "attention sinks": draft.has_sinks,
        "a RoPE that depends on the length": draft.depends_on_length,
        "latent attention": draft.latent is not None or target.latent is not None,
    }
    for what, is_there in unlike.items():
        if is_there:
            raise ModelError(f"{path}: draft models with {what} are unsupported")
