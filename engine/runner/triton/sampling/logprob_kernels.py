"""Triton kernel of logprobs. A program computes a row, in an order that depends on its size."""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

from baton.engine.runner.triton.sampling.sampling_kernels import log_total_weight

MAX_INT32 = tl.constexpr((1 << 31) - 1)
LEAST = tl.constexpr(-(1 << 63))
PLACE = tl.constexpr((1 << 32) - 1)  # bits of a key


@triton.jit
def find_highest(logits, size, num_columns: tl.constexpr):
    """Return the largest logit of a row."""
    peaks = tl.full((num_columns,), float("-inf"), tl.float32)
    for start in range(0, size, num_columns):
        columns = start + tl.arange(0, num_columns)
        numbers = tl.load(logits + columns, mask=columns < size, other=float("-inf"))
        peaks = tl.maximum(peaks, numbers)
    return tl.max(peaks, axis=0)


@triton.jit
def load_keys(logits, piece, size, highest, log_total, num_columns: tl.constexpr):
    """Return logprobs of a piece of a row, and keys in their order.

    No two keys are equal, since each ends with its token's place from the end. So among equal
    logprobs, the token with the lowest id is the first.
    """
    columns = piece * num_columns + tl.arange(0, num_columns)
    is_inside = columns < size
    numbers = tl.load(logits + columns, mask=is_inside, other=float("-inf"))
    logprobs = numbers - highest - log_total
    bits = logprobs.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ MAX_INT32, bits).to(tl.int64)
    keys = (ordered << 32) | (size - 1 - columns).to(tl.int64)
    return tl.where(is_inside, logprobs, float("-inf")), tl.where(is_inside, keys, LEAST)


@triton.jit
def logprob_of_key(key):
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ MAX_INT32, ordered).to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=["has_rows", "num_tops"],
    do_not_specialize_on_alignment=["chosen", "rows"],
)
def logprobs_kernel(
    token_ids,
    logprobs,
    ranks,
    top_token_ids,
    top_logprobs,
    logits,
    chosen,
    rows,
    has_rows,
    row_stride,
    size,
    num_tops,
    num_pieces: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Logprobs of the chosen token of a row, with its rank, and of the top tokens.

    Rows are all, or those of `rows`, which is no variant to compile. The highest key of each piece
    is kept, so that only the piece of a top token is read again.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program
    if has_rows != 0:
        row = tl.load(rows + program)
    logits += row * row_stride
    highest = find_highest(logits, size, num_columns)
    log_total = log_total_weight(logits, size, highest, 1.0, float("inf"), num_columns)
    token_id = tl.load(chosen + row)
    own = tl.load(logits + token_id) - highest - log_total
    pieces, num_above = tl.arange(0, num_pieces), 0
    peaks = tl.full((num_pieces,), LEAST, tl.int64)
    for piece in range(tl.cdiv(size, num_columns)):
        values, keys = load_keys(logits, piece, size, highest, log_total, num_columns)
        num_above += tl.sum((values > own).to(tl.int32), axis=0)
        peaks = tl.where(pieces == piece, tl.max(keys, axis=0), peaks)
    tl.store(token_ids + program, token_id)
    tl.store(logprobs + program, own)
    tl.store(ranks + program, num_above + 1)
    for place in range(num_tops):
        key = tl.max(peaks, axis=0)
        top_id = size - 1 - (key & PLACE)
        tl.store(top_token_ids + program * num_tops + place, top_id)
        tl.store(top_logprobs + program * num_tops + place, logprob_of_key(key))
        piece = (top_id // num_columns).to(tl.int32)
        _, keys = load_keys(logits, piece, size, highest, log_total, num_columns)
        next_key = tl.max(tl.where(keys < key, keys, LEAST), axis=0)
        peaks = tl.where(pieces == piece, next_key, peaks)
