"""Folders of adapters that no node may serve, each made from a good one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from baton.checkpoint.peft_config import CONFIG
from baton.checkpoint.peft_folder import WEIGHTS

BAD = "bad"  # folder of them, below that of the nodes' adapters
HUGE_RANK = 4096
HUGE_FILE_BYTES, HUGE_JSON_BYTES = 1 << 40, 1 << 30  # sparse files
NUM_PATTERNS, NUM_HEADER_ENTRIES = 20_000, 100_000

Tensors = dict[str, torch.Tensor]


def with_nan(tensors: Tensors) -> None:
    next(iter(tensors.values())).fill_(torch.nan)


def with_other_shapes(tensors: Tensors) -> None:
    for name in tensors:
        tensors[name] = torch.zeros(4, 4)


def with_huge_rank(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        is_down = "lora_A" in name
        shape = (HUGE_RANK, tensor.shape[1]) if is_down else (tensor.shape[0], HUGE_RANK)
        tensors[name] = torch.zeros(shape)


def with_other_modules(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("layers.", "layers.9")] = tensors.pop(name)


def write_bad(
    good: Path, folder: Path, change: Callable[[Tensors], None] = lambda _: None, **settings: Any
) -> Path:
    """Copy a good adapter with changes of its tensors and settings."""
    folder.mkdir(parents=True)
    tensors = load_file(good / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    found = json.loads((good / CONFIG).read_text(encoding="utf-8"))
    (folder / CONFIG).write_text(json.dumps({**found, **settings}), encoding="utf-8")
    return folder


SETTINGS: Mapping[str, dict[str, Any]] = {
    "endless-pattern": {"rank_pattern": {"(.*.*.*.*.*)*x": 4}},
    "many-patterns": {"alpha_pattern": {f"a{n}|b|.*c": 1 for n in range(NUM_PATTERNS)}},
    "infinite-scale": {"alpha_pattern": {".*": float("inf")}},
    "huge-scale": {"lora_alpha": 1e300},
    "zero-rank": {"r": 0},
    "nan-rank": {"r": float("nan")},
    "text-rank": {"r": "4"},
    "other-type": {"peft_type": "IA3"},
}
TENSORS: Mapping[str, Callable[[Tensors], None]] = {
    "nan": with_nan,
    "other-shapes": with_other_shapes,
    "other-modules": with_other_modules,
    "no-tensors": lambda tensors: tensors.clear(),
}


def write_bad_adapters(good: Path, root: Path) -> None:
    """Write all bad folders below `root`. Links lead to a copy of the good one next to `root`."""
    bad = root / BAD
    for name, settings in SETTINGS.items():
        write_bad(good, bad / name, **settings)
    for name, change in TENSORS.items():
        write_bad(good, bad / name, change)
    write_bad(good, bad / "huge-rank", with_huge_rank, r=HUGE_RANK)
    for name, content in (("nested-json", b"[" * 100_000), ("garbage-json", b"\xff" * 1000)):
        (write_bad(good, bad / name) / CONFIG).write_bytes(content)
    (write_bad(good, bad / "garbage-weights") / WEIGHTS).write_bytes(b"\xff" * 1000)
    (write_bad(good, bad / "cut-weights") / WEIGHTS).write_bytes(b"\x10" + bytes(7))
    os.truncate(write_bad(good, bad / "huge-json") / CONFIG, HUGE_JSON_BYTES)
    os.truncate(write_bad(good, bad / "huge-weights") / WEIGHTS, HUGE_FILE_BYTES)
    _write_huge_header(write_bad(good, bad / "huge-header") / WEIGHTS)
    pipe = write_bad(good, bad / "pipe") / WEIGHTS
    pipe.unlink()
    os.mkfifo(pipe)
    _write_links(good, root, bad)


def _write_huge_header(weights: Path) -> None:
    """Write many empty tensors, whose parsing takes long."""
    entry = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    header = json.dumps({str(number): entry for number in range(NUM_HEADER_ENTRIES)}).encode()
    weights.write_bytes(len(header).to_bytes(8, "little") + header)


def _write_links(good: Path, root: Path, bad: Path) -> None:
    outside = root.parent / f"{root.name}-outside"
    shutil.copytree(good, outside)
    (bad / "link-out").symlink_to(outside)
    weights = write_bad(good, bad / "weights-link-out") / WEIGHTS
    weights.unlink()
    weights.symlink_to(outside / WEIGHTS)
    (bad / "link-loop").symlink_to(bad / "link-loop")
    (bad / "empty").mkdir()
