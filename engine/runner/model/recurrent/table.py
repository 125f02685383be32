"""Table of the rules of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.runner.model.config import Recurrence
from baton.engine.runner.model.recurrent.gated_delta import GatedDelta, KimiDelta
from baton.engine.runner.model.recurrent.mamba2 import Mamba2
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.short_conv import ShortConv

RULES: Mapping[Recurrence, type[RecurrentRule]] = {
    Recurrence.GATED_DELTA: GatedDelta,
    Recurrence.KIMI_DELTA: KimiDelta,
    Recurrence.MAMBA2: Mamba2,
    Recurrence.SHORT_CONV: ShortConv,
}
