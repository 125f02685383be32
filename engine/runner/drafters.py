"""Tables of drafters and of draft heads, by the method that the settings name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

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


class HeadMethod(NamedTuple):
    """Opens a head before the weights of the model are loaded."""

    open: Callable[[RunnerConfig, Checkpoint, ModelConfig], OpenHead]
    # Whether a model's own files have all that the method needs: then `auto` chooses it.
    has_all: Callable[[Checkpoint, ModelConfig], bool] = lambda *_: False


HEADS: Mapping[str, HeadMethod] = {
    "draft": HeadMethod(open_draft_model),
    "eagle": HeadMethod(open_eagle),
    "eagle3": HeadMethod(open_eagle),
    "mtp": HeadMethod(open_mtp, has_mtp),
}
NUM_DRAFTED, NUM_DRAFTED_WITH_STATES = 3, 2  # each draft takes memory for a recurrent state
OTHERWISE = Speculation(8, method="suffix")


def choose_speculation(
    config: RunnerConfig, checkpoint: Checkpoint, model: ModelConfig
) -> RunnerConfig:
    """Return the settings with a method that suits the model, if they leave it open."""
    if config.speculation is None or config.speculation.method != AUTO:
        return config
    number = NUM_DRAFTED if model.recurrent is None else NUM_DRAFTED_WITH_STATES
    chosen = OTHERWISE
    for method, head in HEADS.items():
        if model.architecture in FAMILIES and head.has_all(checkpoint, model):
            chosen = Speculation(number, method=method)
    log.info("--speculative auto: drafting by %s:%d", chosen.method, chosen.num_tokens)
    return replace(config, speculation=chosen)


def open_head(config: RunnerConfig, checkpoint: Checkpoint, target: ModelConfig) -> OpenHead | None:
    """Return the head that the settings name, or None. Raises ModelError and InvalidConfig."""
    method = None if config.speculation is None else HEADS.get(config.speculation.method)
    head = None if method is None else method.open(config, checkpoint, target)
    if config.speculative_model and (head is None or not head.has_folder):
        raise InvalidConfig(
            f"--speculative-model {config.speculative_model} needs --speculative with a method "
            "that uses it, such as eagle3:3 or draft:3"
        )
    return head
