"""Make a model folder of a known shape with random weights, for benchmarks.

    python tools/make_model.py --shape qwen3-0.6b OUT

The weights are written tensor by tensor, so peak memory is one tensor in addition to the page
cache. The output of such a model is meaningless.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.runner.families.read_config import read_model_config
from engine.runner.weights.safetensors import Shape
from engine.runner.weights.tensor_names import expected_tensors

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
SHAPES: Mapping[str, Mapping[str, object]] = {
    "qwen3-0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "qwen3-1.7b": {
        **QWEN3,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "llama3.2-1b": {
        **LLAMA3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
}
DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}


def main() -> int:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = {**SHAPES[args.shape], "dtype": args.dtype}
    (args.out / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(args.out)
    num_bytes = write_weights(args.out, args.dtype, args.seed)
    print(f"{args.out}: {args.shape}, {args.dtype}, {num_bytes / 1e9:.2f} GB of random weights")
    return 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def write_weights(folder: Path, dtype: str, seed: int) -> int:
    """Write the weights as a safetensors file, tensor by tensor; return its size."""
    name, torch_dtype = DTYPES[dtype]
    tensors = expected_tensors(read_model_config(folder))
    generator = torch.Generator().manual_seed(seed)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(_header(tensors, name, torch_dtype.itemsize))
        for tensor, shape in tensors.items():
            drawn = torch.randn(shape, generator=generator) * 0.02
            if tensor.endswith("norm.weight"):
                drawn += 1.0
            file.write(drawn.to(torch_dtype).view(torch.uint8).numpy().tobytes())
        return file.tell()


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte and no merges."""
    alphabet = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _header(tensors: Mapping[str, Shape], dtype: str, itemsize: int) -> bytes:
    entries, end = {}, 0
    for tensor, shape in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * itemsize
        entries[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


if __name__ == "__main__":
    sys.exit(main())
