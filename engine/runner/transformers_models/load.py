"""Loads a decoder on transformers' modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from baton.core.exclusions import Feature, check_exclusions
from baton.engine.runner.config import RunnerConfig, check
from baton.engine.runner.device.device import FencedHook
from baton.engine.runner.drafters import HEADS
from baton.engine.runner.load import DecoderSource, LoadedDecoder, load_runner
from baton.engine.runner.model.decoder import GivenRows
from baton.engine.runner.model.mixers import Ends, ForwardPass
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.transformers_models.config import (
    InspectedModel,
    TransformersConfig,
    inspect_model,
)
from baton.engine.runner.transformers_models.model_class import (
    SplitModel,
    one_line,
    quiet_transformers,
    read_transformers_config,
    split_model,
)
from baton.engine.runner.transformers_models.native_modules import copy_tensors, replace_modules
from baton.engine.runner.transformers_models.outline import ModelOutline, UnsupportedModel, refuse
from baton.engine.runner.transformers_models.paged_interface import (
    PAGED,
    LayerCalls,
    PagedCalls,
    attention_by,
)
from baton.engine.runner.weights.open_weights import OpenWeights

log = logging.getLogger(__name__)

SHOWN = 3  # names of tensors in a message
# Relative, of states whose experts were computed for another number of tokens. In half precision
# rounding grows over many layers, but less than a state would make of it.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.1


def load_transformers_runner(
    config: RunnerConfig,
    outline: ModelOutline,
    on_progress: LoadProgressCallback | None,
) -> TorchRunner:
    """Inspect and load the model. Raises ModelError and InvalidConfig."""
    _check_settings(config, outline.architecture)
    with quiet_transformers():
        inspected = inspect_model(outline)

        source = DecoderSource(
            lambda _: inspected.config,
            lambda weights, report, _: _load_decoder(outline, inspected, weights, report),
        )
        # Modules of transformers see no pictures and are not captured in graphs, and their matrices
        # are not cached.
        config = replace(config, loads_tower=False, enforce_eager=True, weight_cache_dir=None)
        return load_runner(config, on_progress, source=source)


def _check_settings(config: RunnerConfig, architecture: str) -> None:
    """Refuse what needs layers of Baton. Raises InvalidConfig."""
    cause = f"{architecture} runs on transformers' modules"
    check_exclusions({Feature.ADAPTERS: config.max_loras, Feature.NO_ADAPTABLE_LAYERS: True})
    method = None if config.speculation is None else config.speculation.method
    check(method not in HEADS, f"{cause}: use --speculative suffix:K with it, not {method}")
    check(not config.enable_prompt_embeds, f"{cause}: they take no --enable-prompt-embeds")
    check(not config.batch_invariant, f"{cause}: torch computes parts of it by the size of a batch")
    check(not config.quantize_importance, f"{cause}: it has no names for --quantize-importance")


def _load_decoder(
    outline: ModelOutline,
    inspected: InspectedModel,
    weights: OpenWeights,
    on_progress: LoadProgressCallback | None,
) -> LoadedDecoder:
    target, ops = weights.target, weights.target.parts.ops
    try:
        model = _make_model(outline, inspected, weights)
        counts = replace_modules(model, target, on_progress)
        copy_tensors(model, target.device)
        decoder = TransformersDecoder(inspected.config, ops, split_model(model, inspected.output))
        with torch.inference_mode():
            sinks = decoder.check_isolation(target.device)
    except UnsupportedModel as reason:
        raise refuse(outline.architecture, reason) from reason
    log.info(
        "%s is not known to Baton itself and runs on the modules of transformers %s, with Baton's "
        "KV cache and attention. It is slower than a known one: torch computes norms, activations, "
        "RoPE and experts one by one, kernels compute %d of %d linear layers, and the last layer "
        "computes all tokens of a prompt",
        outline.architecture,
        transformers.__version__,
        *counts,
    )
    return LoadedDecoder(decoder, inspected.config.attention(sinks))


def _make_model(outline: ModelOutline, inspected: InspectedModel, weights: OpenWeights) -> Any:
    """Make the model of mapped tensors, of which transformers renames and joins some."""
    tensors = weights.tensors
    try:
        model, found = inspected.model_class.from_pretrained(
            None,  # transformers reads no file
            config=read_transformers_config(inspected.model_class, outline),
            state_dict={name: tensors.tensor(name) for name in tensors.names()},
            dtype=weights.target.dtype,
            attn_implementation=PAGED,
            output_loading_info=True,
        )
    except UnsupportedModel:
        raise
    except Exception as error:  # any that a class of transformers raises
        raise UnsupportedModel(f"transformers cannot load it: {one_line(error)}") from error
    _check_tensors(found)
    return model.eval()


def _check_tensors(found: Mapping[str, Any]) -> None:
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        names = sorted(map(str, found.get(kind, ())))
        if names:
            raise UnsupportedModel(
                f"its files do not match its config.json: {kind} {_shown(names)}"
            )
    unused = sorted(found.get("unexpected_keys", ()))
    if unused:
        log.warning("tensors that transformers does not use: %s", _shown(unused))


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


@dataclass(eq=False)  # not frozen: `benchmarks/engine` wraps its methods
class TransformersDecoder:
    """Implements `CausalLm`. All layers compute all tokens."""

    config: TransformersConfig
    ops: Ops
    model: SplitModel
    waits_for_experts: bool = True
    classifier: None = None

    def forward(
        self,
        token_ids: Tensor,
        forward_pass: ForwardPass,
        hook: FencedHook | None,
        ends: Ends | None = None,
        given: GivenRows | None = None,
    ) -> Tensor:
        assert forward_pass.positions is not None
        calls = PagedCalls(forward_pass.attention, self.config.head_dims, hook)
        hidden_states = self._compute(token_ids, forward_pass.positions, calls)
        return hidden_states if ends is None else hidden_states[ends.indices]

    def logits(self, hidden_states: Tensor, dst: Tensor | None = None) -> Tensor:
        logits = self.model.logits(hidden_states)
        return logits.float() if dst is None else dst.copy_(logits)

    def check_isolation(self, device: torch.device) -> Sequence[Tensor | None]:
        """Check that without attention a token depends on nothing but itself and its position.

        Returns the sinks of each layer. Raises UnsupportedModel: a layer has a state, or positions
        are ignored.
        """
        before, after = _Unmixed(), _Unmixed()
        ids = torch.tensor([1, 2, 3], device=device) % self.config.vocab_size
        positions = torch.tensor([0, 2, 1], device=device) % self.config.max_position_embeddings
        first = self._compute(ids[:2], positions[:2], before)[1]
        second = self._compute(ids[1:], positions[1:], after)[0]
        seen = [first, *(each[1] for each in before.seen)]
        again = [second, *(each[0] for each in after.seen)]
        tolerance = TOLERANCE if first.dtype is torch.float32 else HALF_TOLERANCE
        for one, other in zip(seen, again, strict=True):
            if (one - other).float().norm() > tolerance * one.float().norm():
                raise UnsupportedModel(
                    "its tokens depend on each other outside of attention, or not on their "
                    "positions: it keeps a state besides keys and values"
                )
        return before.sinks

    def _compute(self, token_ids: Tensor, positions: Tensor, calls: LayerCalls) -> Tensor:
        with attention_by(calls):
            output = self.model.hidden_states(token_ids, positions)
        hidden_states: Tensor = output.last_hidden_state[0]
        return hidden_states


@dataclass(slots=True)
class _Unmixed:
    """Implements `LayerCalls`: each token sees itself alone."""

    seen: list[Tensor] = field(default_factory=list)
    sinks: list[Tensor | None] = field(default_factory=list)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        self.seen += query, key, value
        self.sinks.append(None if sinks is None else sinks.detach().float())
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
