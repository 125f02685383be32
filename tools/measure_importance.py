"""Measures the importance of a model's columns for quantize-importance.

    python -m tools.measure_importance MODEL --text FILE --output importance.safetensors

transformers computes a calibration text in float32, and the mean square of each input of each
linear layer is written. Mixtures of experts have none for their experts, which are stacked in
tensors there: these are quantized without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from baton.checkpoint.hub import open_checkpoint

HEAD = "lm_head"  # is not quantized to 4 bits


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder in a format of transformers")
    parser.add_argument("--text", type=Path, required=True, help="calibration text, in UTF-8")
    parser.add_argument("--output", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="maximum number of windows")
    return parser.parse_args(arguments)


def measure_importance(model: nn.Module, windows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return the mean square of each input of each linear layer, by the layer's name."""
    squares: dict[str, Tensor] = {}
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != HEAD
    }
    hooks = [
        layer.register_forward_pre_hook(partial(_add_squares, squares, name))
        for name, layer in layers.items()
    ]
    try:
        with torch.inference_mode():
            for window in windows:
                model(torch.tensor([window]))
    finally:
        for hook in hooks:
            hook.remove()
    num_tokens = sum(map(len, windows))
    return {name: (total / num_tokens).contiguous() for name, total in squares.items()}


def _add_squares(
    squares: dict[str, Tensor], name: str, _: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    total = inputs[0].float().square().flatten(0, -2).sum(dim=0)
    squares[name] = squares[name] + total if name in squares else total


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    tokenizer = open_checkpoint(args.model).load_tokenizer()
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    starts = range(0, max(1, len(ids) - args.window + 1), args.window)
    windows = [ids[start : start + args.window] for start in starts][: args.windows]
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    importance = measure_importance(model, windows)
    save_file(importance, args.output)
    print(f"{args.output}: {len(importance)} layers, from {sum(map(len, windows))} tokens")


if __name__ == "__main__":
    main()
