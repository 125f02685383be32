"""Loads a decoder on transformers' modules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers

from baton.core.exclusions import Feature, check_exclusions
from baton.engine.runner.config import RunnerConfig, check
from baton.engine.runner.drafters import HEADS
from baton.engine.runner.load import DecoderSource, LoadedDecoder, load_runner
from baton.engine.runner.model_info import LoadProgressCallback
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.transformers_models.config import InspectedModel, inspect_model
from baton.engine.runner.transformers_models.decoder import TransformersDecoder
from baton.engine.runner.transformers_models.model_class import (
    one_line,
    quiet_transformers,
    read_transformers_config,
)
from baton.engine.runner.transformers_models.native_modules import copy_tensors, replace_modules
from baton.engine.runner.transformers_models.outline import ModelOutline
from baton.engine.runner.transformers_models.paged_interface import PAGED
from baton.engine.runner.transformers_models.refusals import UnsupportedModel, refuse
from baton.engine.runner.transformers_models.split_model import split_model
from baton.engine.runner.weights.open_weights import OpenWeights

log = logging.getLogger(__name__)

SHOWN = 3  # names of tensors in a message


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
