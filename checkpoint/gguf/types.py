"""Types of GGUF tensors: how many numbers a block has, and in how many bytes. No torch."""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """A type stores numbers in blocks; blocks lie within a row."""

    name: str
    numbers: int  # per block
    num_bytes: int  # per block

    @property
    def is_plain(self) -> bool:
        """Return whether this is a dtype of its own rather than quantized."""
        return self.numbers == 1


# By the number in the file. Others exist; those are refused by number or name.
BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
# Types that are refused, by the names that users know.
OTHER_TYPES = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
