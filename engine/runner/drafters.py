"""Tables of drafters and of draft heads, by the method that the settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.draft_model import open_draft_model
from baton.engine.runner.draft_heads.eagle_loading import open_eagle
from baton.engine.runner.draft_heads.head_drafter import make_head_drafter
from baton.engine.runner.draft_heads.mtp_head import has_mtp, open_mtp
from baton.engine.runner.drafting.draft_head import OpenHead
from baton.engine.runner.drafting.drafter import Drafter, MakeDrafter
from baton.engine.runner.families.table import FAMILIES
from baton.engine.runner.model.config import ModelConfig
from baton.engine.spec_decode.config import AUTO, Speculation
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

log = logging.getLogger(__name__)

DRAFTERS: Mapping[str, MakeDrafter] = {
    "ngram": lambda parts: Drafter(SuffixProposer(parts.speculation)),
    "suffix": lambda parts: Drafter(SuffixProposer(parts.speculation)),
    "draft": make_head_drafter,
    "eagle": make_head_drafter,
    "eagle3": make_head_drafter,
    "mtp": make_head_drafter,
}
# Called before the weights of the model are loaded.
HEADS: Mapping[str, Callable[[RunnerConfig, Checkpoint, ModelConfig], OpenHead]] = {
    "draft": open_draft_model,
    "eagle": open_eagle,
    "eagle3": open_eagle,
    "mtp": open_mtp,
}


# What `auto` stands for: with a layer for it in the model's files, and without.
WITH_MTP = Speculation(3, method="mtp")
WITH_MTP_AND_STATES = Speculation(2, method="mtp")  # each draft takes memory for a state
WITHOUT = Speculation(8, method="suffix")


def choose_speculation(
    config: RunnerConfig, checkpoint: Checkpoint, model: ModelConfig
) -> RunnerConfig:
    """Return the settings with a method that suits the model, if they leave it open."""
    if config.speculation is None or config.speculation.method != AUTO:
        return config
    chosen = WITHOUT
    if model.architecture in FAMILIES and has_mtp(checkpoint, model):
        chosen = WITH_MTP if model.recurrent is None else WITH_MTP_AND_STATES
    log.info("--speculative auto: drafting by %s:%d", chosen.method, chosen.num_tokens)
    return replace(config, speculation=chosen)


def open_head(config: RunnerConfig, checkpoint: Checkpoint, target: ModelConfig) -> OpenHead | None:
    """Return the head that the settings name, or None. Raises ModelError and InvalidConfig."""
    method = None if config.speculation is None else HEADS.get(config.speculation.method)
    head = None if method is None else method(config, checkpoint, target)
    if config.speculative_model and (head is None or not head.has_folder):
        raise InvalidConfig(
            f"--speculative-model {config.speculative_model} needs --speculative with a method "
            "that uses it, such as eagle3:3 or draft:3"
        )
    return head
