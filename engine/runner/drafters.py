"""Tables of drafters and of draft heads, by the method that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from baton.checkpoint.checkpoint import Checkpoint
from baton.core.errors import InvalidConfig
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.draft_heads.draft_model import open_draft_model
from baton.engine.runner.draft_heads.eagle_loading import open_eagle
from baton.engine.runner.draft_heads.head_drafter import make_head_drafter
from baton.engine.runner.draft_heads.mtp_head import open_mtp
from baton.engine.runner.drafting.draft_head import OpenHead
from baton.engine.runner.drafting.drafter import Drafter, MakeDrafter
from baton.engine.runner.model.config import ModelConfig
from baton.engine.spec_decode.suffix_proposer import SuffixProposer

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
