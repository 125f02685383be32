"""Vectors of texts: decoding, and shortening of embeddings (Matryoshka)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.core.errors import InvalidRequest

Floats = npt.NDArray[np.float32]


def decode_vector(vector: bytes) -> Floats:
    """Return the numbers of `Output.vector`."""
    return np.frombuffer(vector, "<f4").astype(np.float32)


def check_dimensions(num_dimensions: int | None, size: int) -> None:
    """Raise InvalidRequest unless an embedding of this size has so many; None: all of them."""
    if num_dimensions is not None and not 1 <= num_dimensions <= size:
        raise InvalidRequest(
            f"dimensions is {num_dimensions}; this model's embeddings have {size}", "dimensions"
        )


def shorten(vector: Floats, num_dimensions: int | None) -> Floats:
    """Return the first dimensions of an embedding, scaled to length one; None: all as they are.

    Raises InvalidRequest if it has fewer.
    """
    if num_dimensions is None:
        return vector
    check_dimensions(num_dimensions, len(vector))
    return scaled(vector[:num_dimensions])


def scaled(vector: Floats) -> Floats:
    """Return the vector of length one in the same direction; zeros stay zeros."""
    length = np.linalg.norm(vector)
    return vector / length if length else vector
