"""Decoding and shortening of vectors."""

from __future__ import annotations

import numpy as np
import pytest

from baton.core.errors import InvalidRequest
from baton.core.vectors import decode_vector, shorten


def test_shortening_scales_to_length_one() -> None:
    vector = np.array([3.0, 4.0, 12.0], np.float32)

    assert shorten(vector, None) is vector
    assert shorten(vector, 2).tolist() == pytest.approx([0.6, 0.8])
    assert shorten(np.zeros(3, np.float32), 2).tolist() == [0.0, 0.0]
    for wrong in (-1, 0, 4):
        with pytest.raises(InvalidRequest, match="have 3"):
            shorten(vector, wrong)


def test_decoding() -> None:
    assert decode_vector(np.array([1.5, -2.0], "<f4").tobytes()).tolist() == [1.5, -2.0]
    assert decode_vector(b"").tolist() == []
