"""Triton kernels of sampling: constraints of rows of logits, and random draws.

A program of a draw computes one row, in an order that depends on the size of the row
only. A draw sums counts and probabilities as integers, which need no order at all.
"""

# Triton reads the annotations, which must not be strings. Arrays that were copied together are
# aligned to 8 bytes: kernels must not be compiled anew for those that happen to be aligned to 16.

import triton
import triton.language as tl

IN_PROMPT = tl.constexpr(1 << 30)  # flag in a count of outputs
NUM_OUTPUTS = tl.constexpr((1 << 30) - 1)  # bits of the count
INFINITE = tl.constexpr(0x7F800000)  # bits of an infinite float32
ALL = tl.constexpr(0xFFFFFFFF)  # cut that keeps all tokens
ONE = tl.constexpr(2.0**56)  # probability 1 as an integer
# Constants of splitmix64, as in randomness.py.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def piece_of_list(bounds, row, num_columns: tl.constexpr):
    """Return the start of a row's list, its program's indices, and which of them it has."""
    start, end = tl.load(bounds + row * 2), tl.load(bounds + row * 2 + 1)
    indices = start + tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    return start, indices, indices < end


@triton.jit(do_not_specialize_on_alignment=["token_ids", "bounds", "first_outputs"])
def count_tokens_kernel(
    counts, token_ids, bounds, first_outputs, vocab_size, num_columns: tl.constexpr
):
    """Count a row's output tokens and flag its prompt tokens, in a piece of its history."""
    row = tl.program_id(0).to(tl.int64)
    start, indices, is_inside = piece_of_list(bounds, row, num_columns)
    counters = counts + row * vocab_size + tl.load(token_ids + indices, mask=is_inside, other=0)
    is_output = indices - start >= tl.load(first_outputs + row)
    ones = tl.full((num_columns,), 1, tl.int32)
    tl.atomic_add(counters, ones, mask=is_inside & is_output, sem="relaxed")
    tl.atomic_or(counters, ones * IN_PROMPT, mask=is_inside & ~is_output, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["token_ids", "values", "bounds"])
def scatter_bias_kernel(dst, token_ids, values, bounds, vocab_size, num_columns: tl.constexpr):
    """Write a piece of a row's logit biases into its row of [rows, vocab_size]."""
    row = tl.program_id(0).to(tl.int64)
    _, indices, is_inside = piece_of_list(bounds, row, num_columns)
    columns = tl.load(token_ids + indices, mask=is_inside, other=0)
    biases = tl.load(values + indices, mask=is_inside, other=0.0)
    tl.store(dst + row * vocab_size + columns, biases, mask=is_inside)


@triton.jit
def penalised(numbers, counts, penalties):
    """Apply penalties: repetition to prompt and outputs, presence and frequency to outputs."""
    repetition, presence = tl.load(penalties), tl.load(penalties + 1)
    frequency = tl.load(penalties + 2)
    repeated = tl.where(numbers > 0, tl.div_rn(numbers, repetition), numbers * repetition)
    numbers = tl.where(counts != 0, repeated, numbers)
    num_outputs = counts & NUM_OUTPUTS
    lowered = numbers - (frequency * num_outputs.to(tl.float32) + presence)
    return tl.where(num_outputs > 0, lowered, numbers)


@triton.jit(do_not_specialize_on_alignment=["slots", "masks", "penalties"])
def constrain_kernel(
    dst,
    logits,
    slots,
    masks,
    biases,
    counts,
    penalties,
    row_stride,
    vocab_size,
    num_words,
    num_columns: tl.constexpr,
):
    """Constrain a piece of a row: token mask, logit bias and penalties.

    `slots`: the row's index among the masks, the biases and the counts, or -1 without.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    is_inside = columns < vocab_size
    numbers = tl.load(logits + row * row_stride + columns, mask=is_inside, other=0.0)
    mask_slot = tl.load(slots + row * 3)
    bias_slot, count_slot = tl.load(slots + row * 3 + 1), tl.load(slots + row * 3 + 2)
    if mask_slot >= 0:
        words = tl.load(masks + mask_slot * num_words + columns // 32, mask=is_inside, other=0)
        numbers = tl.where(((words >> (columns % 32)) & 1) != 0, numbers, float("-inf"))
    if bias_slot >= 0:
        bias = tl.load(biases + bias_slot * vocab_size + columns, mask=is_inside, other=0.0)
        numbers = tl.where(bias != 0.0, numbers + bias, numbers)
    if count_slot >= 0:
        count = tl.load(counts + count_slot * vocab_size + columns, mask=is_inside, other=0)
        numbers = penalised(numbers, count, penalties + count_slot * 3)
    tl.store(dst + row * vocab_size + columns, numbers, mask=is_inside)


@triton.jit
def load_distances(scores, columns, size, highest, temperature, farthest):
    """Load distances to the largest score, divided by the temperature.

    Distances greater than `farthest`, or NaN, become infinite: those tokens are excluded. The bits
    of distances are in the same order as the distances, because none is negative.
    """
    numbers = tl.load(scores + columns, mask=columns < size, other=float("-inf"))
    distances = tl.div_rn(highest - numbers, temperature)
    return tl.where(distances <= farthest, distances, float("inf"))


@triton.jit
def log_total_weight(scores, size, highest, temperature, farthest, num_columns: tl.constexpr):
    """Return the logarithm of the sum of exp(-distance)."""
    weights = tl.full((num_columns,), 0.0, tl.float32)
    for start in range(0, size, num_columns):
        columns = start + tl.arange(0, num_columns)
        weights += tl.exp(-load_distances(scores, columns, size, highest, temperature, farthest))
    return tl.log(tl.sum(weights, axis=0))


@triton.jit
def find_cut(
    target,
    scores,
    size,
    highest,
    temperature,
    farthest,
    log_total,
    is_count: tl.constexpr,
    num_columns: tl.constexpr,
):
    """Find the distance at which a sum over tokens, likeliest first, reaches the target.

    Sums up numbers of tokens or probabilities, of which ONE is 1. Returns the bits of the distance
    and the sum below it. The bits are found from the highest on, two at a time.
    """
    cut = tl.full((), 0, tl.uint32)
    below = tl.full((), 0, tl.int64)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _ in range(16):
        digits = tl.arange(0, 4).to(tl.uint32) * unit
        bounds = (cut + digits)[None, :]
        amounts = tl.full((num_columns, 4), 0, tl.int64)
        for start in range(0, size, num_columns):
            columns = start + tl.arange(0, num_columns)
            distances = load_distances(scores, columns, size, highest, temperature, farthest)
            amount = (columns < size).to(tl.int64)
            if not is_count:
                amount = (tl.exp(-distances - log_total) * ONE).to(tl.int64)
            is_below = distances.to(tl.uint32, bitcast=True)[:, None] < bounds
            amounts += tl.where(is_below, amount[:, None], 0)
        sums = tl.sum(amounts, axis=0)
        is_low = sums < target
        cut += tl.max(tl.where(is_low, digits, 0), axis=0)
        below = tl.max(tl.where(is_low, sums, 0), axis=0)
        unit = unit >> 2
    return cut, below


@triton.jit
def exponential_times(key, token_ids):
    """Return the Exponential(1) numbers of tokens, as randomness.py."""
    bits = (token_ids + 1).to(tl.uint64) * GOLDEN + key.to(tl.uint64, bitcast=True)
    bits = (bits ^ (bits >> 30)) * FIRST
    bits = (bits ^ (bits >> 27)) * SECOND
    bits = (bits ^ (bits >> 31)) >> 1
    uniform = (bits.to(tl.int64, bitcast=True).to(tl.float32) + 0.5) * 2.0**-63
    uniform = tl.minimum(uniform, 1 - 2.0**-24)
    # -log1p(-uniform) without the error of 1 - uniform.
    rest = 1.0 - uniform
    corrected = tl.log(rest) * tl.div_rn(uniform, rest - 1.0)
    return tl.where(rest == 1.0, uniform, corrected)


@triton.jit
def draw_kept(
    key,
    cut,
    below,
    target,
    scores,
    size,
    highest,
    temperature,
    farthest,
    log_total,
    num_columns: tl.constexpr,
):
    """Draw a token by weight exp(-distance) among those up to the cut.

    Tokens at the cut are kept in the order of their ids, until the sum reaches the target.
    """
    best, best_id = -1.0, 0
    num_ties = tl.full((), 0, tl.int64)
    for start in range(0, size, num_columns):
        columns = start + tl.arange(0, num_columns)
        distances = load_distances(scores, columns, size, highest, temperature, farthest)
        bits = distances.to(tl.uint32, bitcast=True)
        is_tie = (bits == cut).to(tl.int64)
        rank = num_ties + tl.cumsum(is_tie, axis=0) - is_tie
        probabilities = (tl.exp(-distances - log_total) * ONE).to(tl.int64)
        is_early = below + rank * probabilities < target
        is_kept = (bits < cut) | ((is_tie != 0) & is_early)
        ratios = tl.div_rn(tl.exp(-distances), exponential_times(key, columns))
        ratios = tl.where(is_kept & (columns < size), ratios, -1.0)
        highest_ratio = tl.max(ratios, axis=0)
        winner = start + tl.argmax(ratios, axis=0, tie_break_left=True)
        best_id = tl.where(highest_ratio > best, winner, best_id)
        best = tl.maximum(best, highest_ratio)
        num_ties += tl.sum(is_tie, axis=0)
    return best_id


@triton.jit(do_not_specialize_on_alignment=["integers", "floats"])
def draw_kernel(token_ids, scores, integers, floats, row_stride, size, num_columns: tl.constexpr):
    """Replace the argmax of a row by a draw after min-p, top-k and top-p.

    By program, `integers`: row, key and top-k; `floats`: temperature, farthest distance and top-p.
    """
    program = tl.program_id(0)
    row, key = tl.load(integers + program * 3), tl.load(integers + program * 3 + 1)
    top_k = tl.load(integers + program * 3 + 2)
    temperature, farthest = tl.load(floats + program * 3), tl.load(floats + program * 3 + 1)
    top_p = tl.load(floats + program * 3 + 2)
    scores += row * row_stride
    highest = tl.load(scores + tl.load(token_ids + row))
    if top_k > 0:
        cut, _ = find_cut(
            top_k, scores, size, highest, temperature, farthest, 0.0, True, num_columns
        )
        # Ties with the k-th token are kept.
        bits = tl.minimum(cut, INFINITE)
        farthest = tl.minimum(farthest, bits.to(tl.float32, bitcast=True))
    cut = tl.full((), ALL, tl.uint32)
    below = tl.full((), 0, tl.int64)
    target = tl.full((), 0, tl.int64)
    log_total = tl.full((), 0.0, tl.float32)
    if top_p < 1.0:
        log_total = log_total_weight(scores, size, highest, temperature, farthest, num_columns)
        target = tl.maximum((top_p * ONE).to(tl.int64), 1)
        cut, below = find_cut(
            target, scores, size, highest, temperature, farthest, log_total, False, num_columns
        )
    chosen = draw_kept(
        key,
        cut,
        below,
        target,
        scores,
        size,
        highest,
        temperature,
        farthest,
        log_total,
        num_columns,
    )
    tl.store(token_ids + row, chosen.to(tl.int64))


@triton.jit
def find_best_kernel(token_ids, are_empty, scores, row_stride, size, num_columns: tl.constexpr):
    """Argmax of a row, the first of equal values, and whether all of the row is -inf."""
    row = tl.program_id(0).to(tl.int64)
    best, best_id = float("-inf"), 0
    for start in range(0, size, num_columns):
        columns = start + tl.arange(0, num_columns)
        places = scores + row * row_stride + columns
        numbers = tl.load(places, mask=columns < size, other=float("-inf"))
        numbers = tl.where(numbers == numbers, numbers, float("-inf"))
        highest = tl.max(numbers, axis=0)
        highest_id = start + tl.argmax(numbers, axis=0, tie_break_left=True)
        best_id = tl.where(highest > best, highest_id, best_id)
        best = tl.maximum(best, highest)
    tl.store(token_ids + row, best_id)
    tl.store(are_empty + row, best == float("-inf"))
