"""Triton functions that compute a softmax over keys which are read bit by bit.

Sums of a row over some keys are the highest score, the sum of the weights, which are exponentials
of the scores less the highest one, and the sum of the weighted values.
"""

# Triton reads the annotations, which must not be strings.

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Sums(NamedTuple):
    """Sums of each row over some keys."""

    highest: Any
    total: Any
    output: Any


@triton.jit
def no_sums(num_rows: tl.constexpr, value_dim: tl.constexpr):
    """Return the sums over no keys."""
    return Sums(
        tl.full((num_rows,), float("-inf"), tl.float32),
        tl.zeros((num_rows,), tl.float32),
        tl.zeros((num_rows, value_dim), tl.float32),
    )


@triton.jit
def first_sums(sinks, tile, sizes: tl.constexpr, value_dim: tl.constexpr):
    """Return the sums before the first key: those over the sinks, which have no value."""
    sums = no_sums(sizes.num_rows, value_dim)
    if sizes.has_sinks:
        highest = tl.load(sinks + tile.heads, mask=tile.is_row, other=0.0)
        sums = Sums(highest, sums.total + 1.0, sums.output)
    return sums


@triton.jit
def subtrahend(highest):
    """Return what is subtracted from scores: the highest one, but not -inf."""
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def add_piece(sums, scores, values):
    """Add the values of a piece of keys, weighted by their scores, to the sums of each row."""
    # A NaN is left to the weights: maxima treat it differently from device to device.
    ordered = tl.where(scores == scores, scores, float("-inf"))
    highest = tl.maximum(sums.highest, tl.max(ordered, axis=1))
    shift = subtrahend(highest)
    weights, decay = tl.exp(scores - shift[:, None]), tl.exp(sums.highest - shift)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return Sums(
        highest,
        sums.total * decay + tl.sum(weights, axis=1),
        sums.output * decay[:, None] + added,
    )


@triton.jit
def merge_sums(sums, added):
    """Return the sums over the keys of both. Sums over no key change nothing, bit by bit."""
    highest = tl.maximum(sums.highest, added.highest)
    shift = subtrahend(highest)
    decay, factor = tl.exp(sums.highest - shift), tl.exp(added.highest - shift)
    return Sums(
        highest,
        sums.total * decay + added.total * factor,
        sums.output * decay[:, None] + added.output * factor[:, None],
    )


@triton.jit
def score(product, scores, sizes: tl.constexpr):
    """Return the scores of products of queries and keys."""
    scaled = product * scores.scale
    if sizes.has_softcap:
        scaled = scores.softcap * (2.0 * tl.sigmoid(2.0 * (scaled / scores.softcap)) - 1.0)
    return scaled


@triton.jit
def hide_unseen(scored, keys, tile, seen_from):
    """Set the scores of keys that a row does not attend to to -inf."""
    is_seen = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] < tile.seen_ends[:, None])
    return tl.where(is_seen & tile.is_row[:, None], scored, float("-inf"))
