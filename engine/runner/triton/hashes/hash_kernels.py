"""Triton kernels of xxh3-64, with the default secret and no seed, for blocks above 240 bytes.

A block is read as stripes of 64 bytes: 8 lanes of 64 bits. The products of 16 stripes (a piece) are
sums, in any order; only between pieces are the sums scrambled in turn. One kernel sums the pieces
of all blocks, and reads all bytes. Another scrambles the sums of each block, 64 bytes for each KiB.
"""

# Triton reads the annotations, which must not be strings.

import triton
import triton.language as tl

LANES = tl.constexpr(8)
STRIPES = tl.constexpr(16)  # of a piece
# Words of the table of constants.
SECRET = tl.constexpr(0)
SCRAMBLE_SECRET = tl.constexpr(16)
LAST_SECRET = tl.constexpr(24)
MERGE_SECRET = tl.constexpr(32)
START = tl.constexpr(40)
LENGTH = tl.constexpr(48)  # of a block, times a prime


@triton.jit
def load_words(src, is_inside):
    return tl.load(src, mask=is_inside, other=0).to(tl.uint64, bitcast=True)


@triton.jit
def multiply_halves(words, secret):
    """Return the products of the lower and the upper halves of mixed words."""
    mixed = words ^ secret
    return (mixed & 0xFFFFFFFF) * (mixed >> 32)


@triton.jit
def sum_pieces_kernel(
    dst,
    src,
    table,
    block_ids,
    block_words,
    num_pieces,
    num_stripes,
    pieces_at_once: tl.constexpr,
):
    """Sums of some pieces of a block, [blocks, num_pieces, LANES]. The last piece can be short."""
    place, block = tl.program_id(0).to(tl.int64), tl.load(block_ids + tl.program_id(0))
    first = tl.program_id(1) * pieces_at_once
    pieces = first + tl.arange(0, pieces_at_once)
    stripes, lanes = tl.arange(0, STRIPES)[None, :, None], tl.arange(0, LANES)[None, None, :]
    stripe = pieces[:, None, None] * STRIPES + stripes
    is_inside = (stripe < num_stripes) & (lanes >= 0)
    start = src + block * block_words + stripe * LANES
    secret = load_words(table + SECRET + stripes + lanes, lanes >= 0)
    products = multiply_halves(load_words(start + lanes, is_inside), secret)
    # A lane adds the words of its neighbour to its own products.
    added = load_words(start + (lanes ^ 1), is_inside)
    sums = tl.sum(tl.where(is_inside, products, 0) + added, axis=1)
    to = dst + (place * num_pieces + pieces[:, None]) * LANES + tl.arange(0, LANES)[None, :]
    tl.store(to, sums.to(tl.int64, bitcast=True), mask=(pieces < num_pieces)[:, None])


@triton.jit
def scramble(sums, secret):
    return (sums ^ (sums >> 47) ^ secret) * 0x9E3779B1


@triton.jit
def load_lanes(table, offset):
    return load_words(table + offset + tl.arange(0, LANES), tl.arange(0, LANES) >= 0)[None, :]


@triton.jit
def add_last_stripe(sums, src, starts, is_block, table):
    """Add the products of the last 64 bytes, which can overlap the stripe before."""
    lanes = tl.arange(0, LANES)[None, :]
    words = load_words(src + starts + lanes, is_block)
    swapped = load_words(src + starts + (lanes ^ 1), is_block)
    return sums + multiply_halves(words, load_lanes(table, LAST_SECRET)) + swapped


@triton.jit
def merge_lanes(sums, table, num_blocks: tl.constexpr):
    """Return a hash of each row of lanes."""
    mixed = sums ^ load_lanes(table, MERGE_SECRET)
    even, odd = tl.split(tl.reshape(mixed, [num_blocks, LANES // 2, 2]))
    folded = (even * odd) ^ tl.umulhi(even, odd)
    length = load_words(table + LENGTH, True)
    hashes = tl.sum(folded, axis=1) + length
    hashes = (hashes ^ (hashes >> 37)) * 0x165667919E3779F9
    return hashes ^ (hashes >> 32)


@triton.jit
def merge_pieces_kernel(
    dst,
    src,
    table,
    block_ids,
    sums,
    block_words,
    num_pieces,
    num_blocks,
    blocks_at_once: tl.constexpr,
    pieces_at_once: tl.constexpr,
):
    """Hashes of some blocks, from the sums of their pieces."""
    places = tl.program_id(0) * blocks_at_once + tl.arange(0, blocks_at_once)
    is_block = (places < num_blocks)[:, None]
    lanes = tl.arange(0, LANES)[None, :]
    rows = sums + places.to(tl.int64)[:, None] * num_pieces * LANES + lanes
    secret = load_lanes(table, SCRAMBLE_SECRET)
    total = load_lanes(table, START) + tl.zeros([blocks_at_once, LANES], tl.uint64)
    for first in range(0, num_pieces, pieces_at_once):
        # Pieces that do not depend on each other are loaded together.
        for offset in tl.static_range(pieces_at_once):
            piece = first + offset + tl.zeros_like(lanes)
            added = total + load_words(rows + piece * LANES, is_block & (piece < num_pieces))
            # The last piece is not scrambled.
            total = tl.where(piece < num_pieces - 1, scramble(added, secret), added)
    blocks = tl.load(block_ids + places, mask=places < num_blocks, other=0)[:, None]
    starts = blocks * block_words + block_words - LANES
    total = add_last_stripe(total, src, starts, is_block, table)
    hashes = merge_lanes(total, table, blocks_at_once)
    tl.store(dst + places, hashes.to(tl.int64, bitcast=True), mask=places < num_blocks)
