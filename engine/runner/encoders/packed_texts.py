"""Tokens of several texts, one after the other without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from baton.core.request import EmbedTask
from baton.engine.plan import PlanRow
from baton.engine.runner.model.pass_layout import Ints


class EqualTexts(NamedTuple):
    """Neighbouring texts of the same length."""

    first: int  # index of their first token
    num_texts: int
    num_tokens: int  # of each

    @property
    def end(self) -> int:
        return self.first + self.num_texts * self.num_tokens


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Flat batch of whole texts, the shortest first."""

    rows: Sequence[PlanRow]
    token_ids: Ints
    positions: Ints  # of tokens in their texts, from 0
    token_types: Ints  # 1 in the second text of a pair, else 0
    starts: Ints  # [texts + 1]: index of each text's first token, and the end of the last text
    groups: Sequence[EqualTexts]

    @property
    def max_len(self) -> int:
        return self.groups[-1].num_tokens


def pack_texts(rows: Sequence[PlanRow]) -> PackedTexts:
    """Pack at least one text."""
    rows = sorted(rows, key=lambda row: len(row.token_ids))
    lens = [len(row.token_ids) for row in rows]
    starts = np.cumsum([0, *lens], dtype=np.int64)
    groups, first = [], 0
    for num_tokens, members in groupby(lens):
        groups.append(EqualTexts(first, len(list(members)), num_tokens))
        first = groups[-1].end
    positions = np.arange(first, dtype=np.int64) - starts[:-1].repeat(lens)
    seconds = np.array(list(map(_second_start, rows)))
    return PackedTexts(
        rows=rows,
        token_ids=np.concatenate([np.array(row.token_ids, dtype=np.int64) for row in rows]),
        positions=positions,
        token_types=(positions >= seconds.repeat(lens)).astype(np.int64),
        starts=starts,
        groups=groups,
    )


def _second_start(row: PlanRow) -> int:
    """Return where the second text begins: after the last token if there is none."""
    start = row.task.second_text_start if isinstance(row.task, EmbedTask) else 0
    return start or len(row.token_ids)
