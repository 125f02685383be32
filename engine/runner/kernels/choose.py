"""Selects native kernels, Triton kernels or plain torch for a model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton.core.errors import InvalidConfig
from baton.engine.runner.adapters.low_rank import TORCH_LOW_RANK, LowRankProducts
from baton.engine.runner.attention.kv_blocks import MakeBlockHashes, no_block_hashes
from baton.engine.runner.attention.paged_attention import (
    LayerAttention,
    PagedAttention,
    TorchPagedAttention,
)
from baton.engine.runner.kernels.build import (
    KernelsUnavailable,
    best_variant,
    cpu_features,
    library,
)
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.native import NativeOps
from baton.engine.runner.kernels.native_attention import NativePagedAttention
from baton.engine.runner.kernels.native_layers import native_layers
from baton.engine.runner.kernels.native_linear_attention import NativeLinearAttention
from baton.engine.runner.kernels.native_low_rank import NativeLowRankProducts
from baton.engine.runner.kernels.native_sampling import NativeSampling
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.layer_weights import Layer
from baton.engine.runner.model.layers import DecoderLayer, unfused_layers
from baton.engine.runner.model.linear import Moe, TorchLinear
from baton.engine.runner.model.ops import Ops
from baton.engine.runner.sampling.torch_sampling import TORCH_SAMPLING, SamplingBackend
from baton.engine.runner.state.linear_attention import LinearAttention, TorchLinearAttention
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.triton.availability import require_triton, uses_interpreter
from baton.engine.runner.weights.packed_weight import Packer

log = logging.getLogger(__name__)


def _wait_always(_: Moe) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Parts:
    """Implementation of a model's operations, attention, layers and sampling."""

    name: str
    ops: Ops
    make_attention: Callable[[Tensor, Sequence[LayerAttention]], PagedAttention]
    make_layers: Callable[[ModelConfig, Sequence[Layer]], Sequence[DecoderLayer]]
    make_linear_attention: Callable[[Tensor, StateShape], LinearAttention] = TorchLinearAttention
    packer: Packer | None = None  # None: matrices are used as they are loaded
    sampling: SamplingBackend = TORCH_SAMPLING
    low_rank: LowRankProducts = TORCH_LOW_RANK
    # Whether a decode's launches depend on its numbers of rows and blocks only, as graphs need.
    has_static_launches: bool = False
    # Whether the CPU reads which experts of a mixture are chosen. Called once they are loaded.
    waits_for_experts: Callable[[Moe], bool] = _wait_always
    make_block_hashes: MakeBlockHashes = no_block_hashes
    # Those of towers, which multiply many patches at once, if they are not `ops`.
    tower_ops: Ops | None = None
    # Names an option that changes the bits of KV. See ModelInfo.
    numerics: str = ""


_TORCH_OPS = Ops()
TORCH = Parts("torch", _TORCH_OPS, TorchPagedAttention, partial(unfused_layers, _TORCH_OPS))


def choose_parts(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    activation_dtype: str = "auto",
    batch_invariant: bool = False,
) -> Parts:
    """Select the implementation by `name`: auto, native, triton or torch.

    Raises InvalidConfig if kernels are requested by name or needed, but not available.
    """
    fits = dtype is torch.bfloat16 and device.type == "cpu"
    if name == "native" and not fits:
        raise InvalidConfig(
            f"kernels 'native' support bfloat16 on the CPU, not {dtype} on {device}"
        )
    is_native = fits and name in ("auto", "native")
    needs_int8 = activation_dtype == "int8"
    if needs_int8 and not is_native:
        raise InvalidConfig(
            "--activation-dtype int8 needs the native kernels, which compute bfloat16 on the CPU, "
            f"not {dtype} on {device} with kernels {name!r}"
        )
    if name in MAKERS:
        return MAKERS[name](dtype, device, batch_invariant=batch_invariant)
    if batch_invariant and not is_native:
        raise InvalidConfig(
            "--batch-invariant needs the native kernels, which compute bfloat16 on the CPU, or "
            f"--kernels triton, not {dtype} on {device} with kernels {name!r}"
        )
    if not is_native:
        return TORCH
    try:
        return native_parts(activation_dtype)
    except KernelsUnavailable as error:
        if name == "native" or needs_int8 or batch_invariant:
            raise InvalidConfig(f"kernels 'native' are not available: {error}") from error
        log.warning(
            "Using plain torch, which is two to three times slower, and gives other tokens than "
            "nodes with kernels now and then: %s",
            error,
        )
        return TORCH


def merges_routers(name: str) -> bool:
    """Return whether adapters have routers of their own with these kernels, which are not loaded.

    It is that of `Parts.low_rank`.
    """
    return name != "triton"


def encoder_kernels(name: str, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """Load the native kernels of encoders, which compute float32 on the CPU. None: torch computes.

    Raises InvalidConfig if they are requested by name, but not available.
    """
    is_fitting = dtype is torch.float32 and device.type == "cpu"
    if not is_fitting or name not in ("auto", "native"):
        return None
    try:
        return Kernels(library(best_variant(cpu_features())), torch.get_num_threads())
    except KernelsUnavailable as error:
        if name == "native":
            raise InvalidConfig(f"kernels 'native' are not available: {error}") from error
        log.warning("Using plain torch, which is slower: %s", error)
        return None


def native_parts(activation_dtype: str = "auto") -> Parts:
    """Load the native kernels. Raises KernelsUnavailable."""
    variant = best_variant(cpu_features())
    kernels = Kernels(library(variant), torch.get_num_threads())
    # Tiles of bfloat16 multiply many tokens faster than sums of integers do.
    is_int8 = activation_dtype == "int8" or (activation_dtype == "auto" and not variant.has_tiles)
    ops = NativeOps(kernels, int8_activations=is_int8)
    multiplies_integers = variant.name == "avx2" and activation_dtype != "bfloat16"
    return Parts(
        variant.name,
        ops,
        partial(NativePagedAttention, kernels),
        partial(native_layers, kernels),
        partial(NativeLinearAttention, kernels),
        ops,
        sampling=NativeSampling(kernels),
        low_rank=NativeLowRankProducts(kernels),
        tower_ops=NativeOps(kernels, int8_activations=is_int8, as_integers=multiplies_integers),
    )


def triton_parts(
    dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False
) -> Parts:
    """Import the Triton kernels, which takes a second."""
    from baton.engine.runner.triton.adapters.triton_low_rank import TritonLowRankProducts
    from baton.engine.runner.triton.attention.triton_attention import TritonPagedAttention
    from baton.engine.runner.triton.hashes.triton_hashes import make_block_hashes
    from baton.engine.runner.triton.products.plain_linear import PlainLinear
    from baton.engine.runner.triton.products.triton_linear import TritonPacker
    from baton.engine.runner.triton.recurrent.triton_linear_attention import make_linear_attention
    from baton.engine.runner.triton.sampling.triton_sampling import TritonSampling
    from baton.engine.runner.triton.triton_ops import BatchInvariantOps, TritonOps

    if uses_interpreter():
        from baton.engine.runner.triton.interpreter import correct_interpreter, speed_up_calls

        correct_interpreter()
        speed_up_calls()
    ops = BatchInvariantOps() if batch_invariant else TritonOps()
    return Parts(
        "triton",
        ops,
        # One processor is never idle: contexts are not split, which would depend on the batch.
        partial(TritonPagedAttention, num_processors=1 if batch_invariant else None),
        partial(unfused_layers, ops),
        make_linear_attention,
        TritonPacker(dtype, device, PlainLinear if batch_invariant else TorchLinear),
        sampling=TritonSampling(),
        low_rank=TritonLowRankProducts(),
        has_static_launches=True,
        waits_for_experts=ops.waits_for_experts,
        make_block_hashes=make_block_hashes,
        numerics="batch-invariant" if batch_invariant else "",
    )


def _required_triton_parts(
    dtype: torch.dtype, device: torch.device, *, batch_invariant: bool
) -> Parts:
    require_triton(device)
    return triton_parts(dtype, device, batch_invariant=batch_invariant)


# Kernels that are chosen by their name only.
MAKERS: dict[str, Callable[..., Parts]] = {"triton": _required_triton_parts}
