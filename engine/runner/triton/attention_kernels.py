"""Triton kernels of paged attention.

A program of `attention_kernel` computes a tile: some tokens of one sequence, each with query heads
of one KV head, as rows of a matrix. Keys are read in pieces that begin at multiples of
`num_keys` in the sequence. A piece that a row does not see leaves the row's sums as they are, bit
by bit, so that an output depends on its own context only, not on the batch or on the tile.

Arguments that differ from pass to pass are not specialised: each variant would be compiled.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl


@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets"])
def write_kernel(
    kv,
    slots,
    blocks,
    offsets,
    block_stride,
    head_stride,
    place,
    token_stride,
    slot_stride,
    slot_size: tl.constexpr,
    padded_size: tl.constexpr,
):
    """Write the keys or the values of a token and a KV head into their slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, padded_size)
    is_inside = columns < slot_size
    slot = slots + token * token_stride + head * slot_stride + columns
    numbers = tl.load(slot, mask=is_inside, other=0)
    block, offset = tl.load(blocks + token).to(tl.int64), tl.load(offsets + token)
    dst = kv + block * block_stride + place + head * head_stride + offset * slot_size
    tl.store(dst + columns, numbers, mask=is_inside)


@triton.jit
def find_sequence(query_starts, tile, num_sequences, tile_tokens: tl.constexpr):
    """Return the sequence of a tile: the last one whose first tile is not after it.

    Sequence s begins with tile `query_starts[s] // tile_tokens + s`, which leaves it enough tiles.
    """
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // tile_tokens + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def first_seen(position, window, chunk):
    """Return the first position that a token at this position attends to."""
    in_window = tl.maximum(position - window + 1, 0)
    return tl.maximum(in_window, position // chunk * chunk)


@triton.jit
def load_rows(rows, is_row, size: tl.constexpr, padded_size: tl.constexpr):
    columns = tl.arange(0, padded_size)
    is_inside = is_row[:, None] & (columns < size)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=is_inside, other=0)


@triton.jit
def load_scales(scales, is_loaded):
    """Return float32 numbers from the two bytes of bfloat16 ones."""
    low = tl.load(scales, mask=is_loaded, other=0).to(tl.int32) & 0xFF
    high = tl.load(scales + 1, mask=is_loaded, other=0).to(tl.int32) & 0xFF
    return ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)


@triton.jit
def load_slots(
    slots,
    is_loaded,
    dtype: tl.constexpr,
    size: tl.constexpr,
    head_dim: tl.constexpr,
    padded_size: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Return the first `size` numbers of each slot, and zeros for those that are not loaded.

    Zeros, because a weight of zero does not hide a NaN.
    """
    numbers = load_rows(slots, is_loaded, size, padded_size)
    if is_int8:
        scales = load_scales(slots + head_dim, is_loaded)
        numbers = (numbers.to(tl.float32) * scales[:, None]).to(dtype)
    return numbers


@triton.jit
def score(queries, keys, scale, softcap, has_softcap: tl.constexpr):
    """Return the scores of queries, [rows, size], and keys, [keys, size]."""
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if has_softcap:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * (scores / softcap)) - 1.0)
    return scores


@triton.jit
def add_piece(scores, values, highest, total, output):
    """Add the values of a piece, weighted by their scores, to the sums of each row."""
    # A NaN is left to the weights: maxima treat it differently from device to device.
    ordered = tl.where(scores == scores, scores, float("-inf"))
    now_highest = tl.maximum(highest, tl.max(ordered, axis=1))
    shift = tl.where(now_highest == float("-inf"), 0.0, now_highest)
    weights = tl.exp(scores - shift[:, None])
    decay = tl.exp(highest - shift)
    total = total * decay + tl.sum(weights, axis=1)
    added = tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return now_highest, total, output * decay[:, None] + added


@triton.jit
def locate_tile(query_starts, num_sequences, tile, tile_tokens: tl.constexpr):
    """Return a tile's sequence, its first flat token, its tokens, and the first of the tile."""
    sequence = find_sequence(query_starts, tile, num_sequences, tile_tokens)
    query_start = tl.load(query_starts + sequence).to(tl.int32)
    num_queries = tl.load(query_starts + sequence + 1).to(tl.int32) - query_start
    first_token = (tile - query_start // tile_tokens - sequence) * tile_tokens
    return sequence, query_start, num_queries, first_token


@triton.jit
def find_slots(
    first_slot,
    block_table,
    keys,
    is_loaded,
    block_stride,
    slot_size: tl.constexpr,
    block_size: tl.constexpr,
):
    """Return pointers to the slots of keys. `first_slot` is that of block 0."""
    block = tl.load(block_table + keys // block_size, mask=is_loaded, other=0).to(tl.int64)
    return first_slot + block * block_stride + keys % block_size * slot_size


@triton.jit
def hide_unseen(scores, keys, positions, is_row, window, chunk):
    """Set the scores of keys that a row does not attend to to -inf."""
    seen_from = first_seen(positions, window, chunk)
    is_seen = (keys[None, :] >= seen_from[:, None]) & (keys[None, :] <= positions[:, None])
    return tl.where(is_seen & is_row[:, None], scores, float("-inf"))


@triton.jit
def store_rows(rows, numbers, is_row, size: tl.constexpr, padded_size: tl.constexpr):
    columns = tl.arange(0, padded_size)
    is_inside = is_row[:, None] & (columns < size)[None, :]
    tl.store(rows[:, None] + columns[None, :], numbers, mask=is_inside)


@triton.jit
def begin_sums(sinks, is_row, num_rows: tl.constexpr, has_sinks: tl.constexpr):
    """Return the highest score and the sum of weights of each row before the first key."""
    highest = tl.full((num_rows,), float("-inf"), tl.float32)
    total = tl.zeros((num_rows,), tl.float32)
    if has_sinks:
        highest = tl.load(sinks, mask=is_row, other=0.0)
        total = total + 1.0
    return highest, total


@triton.jit(
    do_not_specialize=["num_sequences", "table_stride"],
    do_not_specialize_on_alignment=["sinks", "block_table", "query_starts", "context_lens"],
)
def attention_kernel(
    dst,
    queries,
    kv,
    sinks,
    block_table,
    query_starts,
    context_lens,
    num_sequences,
    table_stride,
    num_heads,
    block_stride,
    head_stride,
    key_place,
    value_place,
    scale,
    softcap,
    window,
    chunk,
    gqa_group_size: tl.constexpr,
    tile_heads: tl.constexpr,
    head_dim: tl.constexpr,
    value_dim: tl.constexpr,
    slot_size: tl.constexpr,
    block_size: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
    num_rows: tl.constexpr,
    num_keys: tl.constexpr,
    has_softcap: tl.constexpr,
    has_sinks: tl.constexpr,
    is_int8: tl.constexpr,
):
    """Attention of a tile: `num_rows // tile_heads` tokens, and `tile_heads` of a KV head's heads.

    The last tile of a KV head has fewer if `gqa_group_size` is no multiple of `tile_heads`.
    """
    tile_tokens: tl.constexpr = num_rows // tile_heads
    head_tiles: tl.constexpr = (gqa_group_size + tile_heads - 1) // tile_heads
    sequence, query_start, num_queries, first_token = locate_tile(
        query_starts, num_sequences, tl.program_id(0), tile_tokens
    )
    if first_token >= num_queries:
        return
    kv_head, head_tile = tl.program_id(1) // head_tiles, tl.program_id(1) % head_tiles
    rows = tl.arange(0, num_rows)
    group_heads = head_tile * tile_heads + rows % tile_heads
    heads = kv_head * gqa_group_size + group_heads
    tokens = first_token + rows // tile_heads
    end_token = tl.minimum(first_token + tile_tokens, num_queries)
    is_row = (tokens < end_token) & (group_heads < gqa_group_size)
    num_computed = tl.load(context_lens + sequence).to(tl.int32) - num_queries
    positions = num_computed + tokens
    lowest = first_seen(num_computed + first_token, window, chunk)
    end = num_computed + end_token

    query_rows = (query_start + tokens).to(tl.int64) * num_heads + heads
    query = load_rows(queries + query_rows * head_dim, is_row, head_dim, padded_dim)
    highest, total = begin_sums(sinks + heads, is_row, num_rows, has_sinks)
    output = tl.zeros((num_rows, padded_value_dim), tl.float32)
    for start in range(lowest // num_keys * num_keys, end, num_keys):
        keys = start + tl.arange(0, num_keys)
        is_loaded = (keys >= lowest) & (keys < end)
        slots = find_slots(
            kv + kv_head * head_stride,
            block_table + sequence.to(tl.int64) * table_stride,
            keys,
            is_loaded,
            block_stride,
            slot_size,
            block_size,
        )
        key = load_slots(
            slots + key_place, is_loaded, query.dtype, head_dim, head_dim, padded_dim, is_int8
        )
        value = load_slots(
            slots + value_place,
            is_loaded,
            query.dtype,
            value_dim,
            head_dim,
            padded_value_dim,
            is_int8,
        )
        scores = score(query, key, scale, softcap, has_softcap)
        scores = hide_unseen(scores, keys, positions, is_row, window, chunk)
        highest, total, output = add_piece(scores, value, highest, total, output)

    dst_rows = dst + query_rows * value_dim
    store_rows(dst_rows, output / total[:, None], is_row, value_dim, padded_value_dim)
