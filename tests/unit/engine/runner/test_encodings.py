"""Encodings of pictures, and the tokens of a pass that take their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.media import DIGEST_BYTES, MediaSegment, Picture
from baton.core.sampling import SamplingParams
from baton.engine.errors import EncodingMissing
from baton.engine.plan import MediaOrders, PlanRow
from baton.engine.runner.batch.encodings import Encodings, LayerDone
from baton.engine.runner.model.pass_layout import TokenRun

CAT, DOG = (Picture(bytes([number]) * DIGEST_BYTES, 1, 1, bytes([number] * 3)) for number in (1, 2))


class NumberEncoder:
    """Encodes a picture as rows 10, 11, … or 20, 21, …, and counts the pictures."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(
        self, pictures: Sequence[Picture], layer_done: LayerDone | None = None
    ) -> list[Tensor]:
        self.num_encoded += len(pictures)
        return [10.0 * each.rgb[0] + torch.arange(4.0)[:, None] for each in pictures]


def _run(num_tokens: int, end: int, *media: MediaSegment) -> TokenRun:
    tokens = tuple(range(end))
    row = PlanRow(RequestId("r"), tokens, end, 0, ((),), SamplingParams(), 0, media=media)
    return TokenRun(row, 0, num_tokens, end, np.array(tokens, dtype=np.int64))


def _orders(*pictures: Picture, freed: Sequence[Picture] = ()) -> MediaOrders:
    return MediaOrders(tuple(each.digest for each in freed), {RequestId("r"): pictures})


def test_tokens_of_a_chunk_take_the_rows_of_their_places_in_the_pictures() -> None:
    encodings = Encodings(NumberEncoder())
    encodings.apply(_orders(CAT, DOG))
    split = MediaSegment(1, 2, CAT.digest), MediaSegment(4, 2, CAT.digest, 2)
    cut = MediaSegment(2, 4, DOG.digest)

    found = encodings.rows_for([_run(1, 9), _run(6, 6, *split), _run(2, 5, cut)])

    assert found is not None
    assert found.tokens.tolist() == [2, 3, 5, 6, 7, 8]
    assert found.rows[:, 0].tolist() == [10, 11, 12, 13, 21, 22]


def test_tokens_of_text_take_nothing() -> None:
    assert Encodings(NumberEncoder()).rows_for([_run(1, 9, MediaSegment(1, 4, CAT.digest))]) is None


def test_a_picture_is_encoded_once_until_it_is_freed() -> None:
    encoder = NumberEncoder()
    encodings = Encodings(encoder)
    encodings.apply(_orders(CAT))
    encodings.apply(_orders(CAT, DOG))
    assert encoder.num_encoded == 2

    encodings.apply(_orders(DOG, freed=[CAT]))

    with pytest.raises(EncodingMissing, match="none"):
        encodings.rows_for([_run(4, 4, MediaSegment(0, 4, CAT.digest))])
    with pytest.raises(EncodingMissing, match="4 rows"):
        encodings.rows_for([_run(5, 5, MediaSegment(0, 5, DOG.digest))])
