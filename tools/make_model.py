"""Make a model folder of a known shape with random weights, for benchmarks.

    python -m tools.make_model --shape qwen3-30b-a3b OUT

The weights are written in small parts, so that memory holds one part in addition to the page
cache. The output of such a model is meaningless. Its norms are near 1, and its tokens spread over
the experts: embeddings of mixtures of experts are as large as the outputs of layers, else all
tokens of a prompt would choose alike.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from baton.checkpoint.checkpoint import Shape
from baton.checkpoint.safetensors_folder import SafetensorsFolder
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.weights.decoder_weights import expected_tensors
from tools.model_shapes import SHAPES, Fields

DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}
STD = 0.02  # of weights
PART_NUMBERS = 1 << 24  # numbers drawn at once
MXFP4_BLOCK = 32  # numbers with a common scale
# Fields of gpt-oss's config.json.
MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}

OnBytes = Callable[[int, int], None]  # written and total


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the file, and how its numbers are drawn."""

    shape: Shape
    kind: str  # its dtype in safetensors
    draw: Callable[[Shape, torch.Generator], Tensor]
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.itemsize


def main() -> int:
    args = parse_args()
    try:
        config = SHAPES[args.shape].scale(args.layers, args.experts)
        with writing_bar() as bar:
            num_bytes = make_model(args.out, config, args.dtype, args.quantization, args.seed, bar)
    except ValueError as error:
        print(f"{args.shape}: {error}", file=sys.stderr)
        return 2
    text = f"{args.shape}, {num_bytes / 1e9:.2f} GB of random weights in {args.dtype}"
    print(f"{args.out}: {text}{' and MXFP4' if args.quantization else ''}")
    return 0


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    sizes = "\n".join(f"  {name:15} {shape.describe()}" for name, shape in SHAPES.items())
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_model",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog=f"default size of each shape, and that of the published model:\n{sizes}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--layers", type=_parse_count, help="number of layers")
    parser.add_argument("--experts", type=_parse_count, help="number of experts in each layer")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument(
        "--quantization", choices=["mxfp4"], help="store the experts of gpt-oss in this format"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make_model(
    folder: Path,
    config: Fields,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    seed: int = 0,
    on_bytes: OnBytes = lambda _written, _total: None,
) -> int:
    """Write config, tokenizer and weights; return the size of the weights. Raises ValueError."""
    if quantization is not None and config["model_type"] != "gpt_oss":
        raise ValueError(f"only gpt-oss has {quantization}")
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**config, "dtype": dtype}
    _write_config(folder, fields)
    tensors = stored_tensors(read_model_config(SafetensorsFolder(folder)), dtype, quantization)
    if quantization is not None:
        _write_config(folder, {**fields, "quantization_config": MXFP4_CONFIG})
    write_tokenizer(folder)
    return write_weights(folder / "model.safetensors", tensors, seed, on_bytes)


def stored_tensors(
    config: ModelConfig, dtype: str, quantization: str | None
) -> dict[str, StoredTensor]:
    """Return the tensors of a new folder by name."""
    tensors: dict[str, StoredTensor] = {}
    for name, shape in expected_tensors(config).items():
        if quantization is not None and name.endswith(
            ("experts.gate_up_proj", "experts.down_proj")
        ):
            tensors |= _mxfp4(name, shape)
        else:
            tensors[name] = _floats(shape, dtype, *_mean_and_std(name, config))
    return tensors


def write_weights(
    path: Path, tensors: Mapping[str, StoredTensor], seed: int, on_bytes: OnBytes
) -> int:
    """Write a safetensors file, a part of a tensor at a time; return its size."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with path.open("wb") as file:
        file.write(_header(tensors))
        for tensor in tensors.values():
            for shape in _parts(tensor.shape):
                drawn = tensor.draw(shape, generator)
                file.write(drawn.view(torch.uint8).numpy().tobytes())
                on_bytes(file.tell(), total)
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


@contextmanager
def writing_bar() -> Iterator[OnBytes]:
    """Show a progress bar on standard error."""
    columns = (TextColumn("writing weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda written, total: bar.update(task, completed=written, total=total)


def _parse_count(written: str) -> int:
    if not written.isdecimal() or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written!r} is not a number above 0")
    return int(written)


def _write_config(folder: Path, fields: Fields) -> None:
    (folder / "config.json").write_text(json.dumps(fields, indent=2))


def _mean_and_std(name: str, config: ModelConfig) -> tuple[float, float]:
    if name.endswith(("linear_attn.norm.weight", "mamba.norm.weight")):
        return 1.0, STD
    if name.endswith("norm.weight"):
        return 1.0 - config.norm.weight_offset, STD
    is_embedding = name.endswith("embed_tokens.weight")
    return 0.0, 1.0 if is_embedding and config.moe is not None else STD


def _floats(shape: Shape, dtype: str, mean: float, std: float) -> StoredTensor:
    kind, torch_dtype = DTYPES[dtype]

    def draw(part: Shape, generator: torch.Generator) -> Tensor:
        return torch.randn(part, generator=generator).mul_(std).add_(mean).to(torch_dtype)

    return StoredTensor(shape, kind, draw, torch_dtype.itemsize)


def _mxfp4(name: str, shape: Shape) -> dict[str, StoredTensor]:
    """Return the tensors of a stack of transposed matrices: four-bit numbers, and their scales."""
    num_experts, columns, rows = shape
    blocks = (num_experts, rows, columns // MXFP4_BLOCK)
    return {
        f"{name}_blocks": _bytes((*blocks, MXFP4_BLOCK // 2), range(256)),
        # Random four-bit floats have a standard deviation of 2.9, and 2.9 * 2**(120 - 127) = 0.023.
        f"{name}_scales": _bytes(blocks, range(119, 121)),
    }


def _bytes(shape: Shape, values: range) -> StoredTensor:
    def draw(part: Shape, generator: torch.Generator) -> Tensor:
        limits = values.start, values.stop
        return torch.randint(*limits, part, generator=generator, dtype=torch.uint8)

    return StoredTensor(shape, "U8", draw, 1)


def _parts(shape: Shape) -> Iterator[Shape]:
    """Split a tensor along its first dimension."""
    size = max(1, PART_NUMBERS // torch.Size(shape[1:]).numel())
    for start in range(0, shape[0], size):
        yield (min(size, shape[0] - start), *shape[1:])


def _header(tensors: Mapping[str, StoredTensor]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.num_bytes
        entries[name] = {"dtype": tensor.kind, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


if __name__ == "__main__":
    sys.exit(main())
