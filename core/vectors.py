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
    """Return the first dimensions of embeddings, scaled to length one; None: all as they are.

    Raises InvalidRequest if they have fewer.
    """
    if num_dimensions is None:
        return vector
    check_dimensions(num_dimensions, vector.shape[-1])
    return scaled(vector[..., :num_dimensions])


def scaled(vector: Floats) -> Floats:
    """Return vectors of length one in the same directions; zeros stay zeros."""
    lengths = np.linalg.norm(vector, axis=-1, keepdims=True)
    return (vector / np.where(lengths, lengths, 1)).astype(np.float32)
