"""Runner settings. Values only, so that option parsing does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.core.errors import InvalidConfig
from baton.engine.spec_decode.config import Speculation

if TYPE_CHECKING:
    from baton.engine.runner.model.config import ModelConfig

DTYPE_NAMES = ("float32", "bfloat16", "float16")
KERNEL_NAMES = ("auto", "native", "torch")
KV_DTYPE_NAMES = ("auto", "int8")
QUANTIZE_NAMES = ("none", "int8", "int4")
DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Settings of the model runner.

    The KV cache takes `kv_cache_bytes` if set, else `kv_cache_share` of the memory that is free
    after loading if set, else the automatic size (`engine.runner.attention.kv_budget`).
    """

    model: str  # a folder, or a name on the Hugging Face hub
    dtype: str = "auto"  # as in the model folder
    device: str = "cpu"
    block_size: int = 16
    kv_cache_dtype: str = "auto"  # as dtype; int8: with a scale for each token and KV head
    kv_cache_bytes: int | None = None
    kv_cache_share: float | None = 0.5
    nodes_per_machine: int | None = None  # divides the automatic size; None: 2 on CPU, 1 on GPU
    max_num_seqs: int = 256
    max_model_len: int | None = None  # None: the model's maximum context length
    num_threads: int | None = None  # torch threads of the whole process
    offline: bool = False
    kernels: str = "auto"  # native if available for this dtype and device, else torch
    quantize: str = "none"  # weights are quantized to this at load
    logits_processors: tuple[
        str, ...
    ] = ()  # entry points; see engine.runner.sampling.logits_processors
    speculation: Speculation | None = None  # the scheduler needs as many lookahead slots

    def __post_init__(self) -> None:
        _check(
            self.dtype in ("auto", *DTYPE_NAMES),
            f"dtype {self.dtype!r}: auto, {', '.join(DTYPE_NAMES)}",
        )
        is_known = self.kv_cache_dtype in KV_DTYPE_NAMES
        _check(is_known, f"kv_cache_dtype {self.kv_cache_dtype!r}: {', '.join(KV_DTYPE_NAMES)}")
        _check(self.block_size >= 1, f"block_size {self.block_size}: at least 1")
        share = self.kv_cache_share
        _check(share is None or 0 < share < 1, f"kv_cache_share {share}: from 0 to 1")
        _check(self.max_num_seqs >= 1, f"max_num_seqs {self.max_num_seqs}: at least 1")
        for name in ("kv_cache_bytes", "max_model_len", "num_threads", "nodes_per_machine"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"{name} {value}: at least 1, or left out")
        is_known = self.kernels in KERNEL_NAMES
        _check(is_known, f"kernels {self.kernels!r}: {', '.join(KERNEL_NAMES)}")
        is_known = self.quantize in QUANTIZE_NAMES
        _check(is_known, f"quantize {self.quantize!r}: {', '.join(QUANTIZE_NAMES)}")
        is_device = DEVICE_NAME.fullmatch(self.device) is not None
        _check(is_device, f"device {self.device!r}: cpu, cuda or cuda:N")


def dtype_name(config: RunnerConfig, model: ModelConfig) -> str:
    """Return the name of the dtype that the model computes in."""
    if config.dtype != "auto":
        return config.dtype
    # Quantized checkpoints name float16 because GPU kernels use it; CPU kernels use bfloat16.
    if model.quantization is not None and config.device == "cpu":
        return "bfloat16"
    return model.dtype


def fits_kernels(config: RunnerConfig, model: ModelConfig) -> bool:
    """Return whether the model would compute with the native kernels."""
    is_fitting = config.device == "cpu" and dtype_name(config, model) == "bfloat16"
    return is_fitting and config.kernels != "torch"


def _check(is_good: bool, message: str) -> None:
    if not is_good:
        raise InvalidConfig(message)
