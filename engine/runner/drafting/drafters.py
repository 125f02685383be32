"""Table of drafters: what proposes tokens, by the method that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from baton.engine.runner.device.device import Device
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.sampling.output_heads import OutputHead
from baton.engine.spec_decode.config import Speculation
from baton.engine.spec_decode.proposer import Proposer
from baton.engine.spec_decode.suffix_proposer import SuffixProposer


class Drafter(NamedTuple):
    """Proposes tokens between passes, and can compute in each pass what it proposes from.

    The head is launched with every pass, those over prompts included, on prefill nodes, too. It
    gets the hidden states of all tokens if it needs them.
    """

    proposer: Proposer
    head: OutputHead | None = None


# Called once the model is loaded.
MakeDrafter = Callable[[Speculation, Decoder, Device], Drafter]


DRAFTERS: Mapping[str, MakeDrafter] = {
    "ngram": lambda speculation, *_: Drafter(SuffixProposer(speculation)),
    "suffix": lambda speculation, *_: Drafter(SuffixProposer(speculation)),
}
