"""ABI of the kernel library: argument structs and function signatures, the mirror of `abi.h`."""

from __future__ import annotations

import ctypes
from pathlib import Path

from baton.engine.runner.kernels.build import KernelsUnavailable

ABI_VERSION = 7

_INT32, _INT64, _FLOAT, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class KernelAbiMismatch(KernelsUnavailable):
    """A kernel library was built from other sources than `abi.py` describes."""

    def __init__(self, path: Path, difference: str) -> None:
        super().__init__(
            f"{path} does not fit this version of Baton ({difference}): delete the file, and it is"
            " built again; if it then differs again, correct abi.h or abi.py"
        )


class PagedKv(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("blocks", _POINTER),
        *((name, _INT64) for name in ("num_layers", "num_tensors", "num_kv_heads")),
        *((name, _INT64) for name in ("block_size", "head_dim", "value_dim", "is_int8")),
    )


class BatchLayout(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("write_blocks", "write_offsets")),
        *((name, _POINTER) for name in ("block_tables", "context_lens")),
        *((name, _POINTER) for name in ("query_starts", "num_queries")),
        *((name, _INT64) for name in ("table_stride", "num_sequences", "num_single", "num_tokens")),
    )


class PackedMatrix(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("packed", "bias")),
        *((name, _INT64) for name in ("bits", "num_rows", "num_columns")),
        *((name, _INT64) for name in ("group_size", "is_mxfp4", "scale_type")),
    )


class PackArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("matrix", PackedMatrix),
        *((name, _POINTER) for name in ("weights", "scales", "zeros")),
        ("num_threads", _INT32),
    )


class LinearArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("matrix", PackedMatrix),
        *((name, _POINTER) for name in ("src", "dst")),
        ("num_tokens", _INT64),
        ("num_threads", _INT32),
    )


class HeadLinearArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("matrices", "src", "dst")),
        *((name, _INT64) for name in ("num_heads", "num_tokens")),
        ("num_threads", _INT32),
    )


class NormParams(ctypes.Structure):
    __slots__ = ()
    _fields_ = (("weight", _POINTER), ("epsilon", _FLOAT), ("is_float32", _INT32))


class RmsNormArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("src", _POINTER),
        ("norm", NormParams),
        ("dst", _POINTER),
        *((name, _INT64) for name in ("num_rows", "size", "src_stride")),
        ("num_threads", _INT32),
    )


class RopeAngles(ctypes.Structure):
    __slots__ = ()
    _fields_ = (("cosines", _POINTER), ("sines", _POINTER))


class RopeArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("src", _POINTER),
        ("norm", NormParams),
        ("angles", RopeAngles),
        ("dst", _POINTER),
        *((name, _INT64) for name in ("src_stride", "num_tokens", "num_heads", "head_dim")),
        ("num_threads", _INT32),
    )


class GateParams(ctypes.Structure):
    __slots__ = ()
    _fields_ = (("kind", _INT32), ("alpha", _FLOAT), ("limit", _FLOAT))


class GateArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("src", "dst")),
        *((name, _INT64) for name in ("num_tokens", "size")),
        ("gate", GateParams),
        ("num_threads", _INT32),
    )


class ArgmaxArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("logits", "indices", "are_finite")),
        *((name, _INT64) for name in ("num_rows", "size")),
        ("num_threads", _INT32),
    )


class WriteKvArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("kv", PagedKv),
        ("batch", BatchLayout),
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _INT64) for name in ("layer", "key_stride", "value_stride")),
        ("num_threads", _INT32),
    )


class AttentionParams(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("sinks", _POINTER),
        *((name, _INT64) for name in ("window", "chunk")),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    )


class AttentionArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("kv", PagedKv),
        ("batch", BatchLayout),
        ("params", AttentionParams),
        *((name, _POINTER) for name in ("queries", "dst")),
        *((name, _INT64) for name in ("layer", "num_heads")),
        ("num_threads", _INT32),
    )


class LayerArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, NormParams) for name in ("input_norm", "q_norm", "k_norm")),
        *((name, NormParams) for name in ("attention_norm", "mlp_norm", "mlp_output_norm")),
        *((name, PackedMatrix) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _INT64) for name in ("index", "num_heads", "query_rope", "key_rope")),
        ("gate", GateParams),
        ("residual_scale", _FLOAT),
        ("norms_all_heads", _INT32),
    )


class PassArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("kv", PagedKv),
        ("batch", BatchLayout),
        *((name, _POINTER) for name in ("attention", "angles")),
        *((name, _POINTER) for name in ("narrow_buf", "wide_buf", "heads_buf")),
        ("num_threads", _INT32),
    )


class RouteArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("router", "bias", "correction_bias")),
        *((name, _POINTER) for name in ("src", "expert_ids", "weights")),
        *((name, _INT64) for name in ("num_tokens", "hidden_size", "num_experts", "top_k")),
        *((name, _INT64) for name in ("num_groups", "top_groups", "group_best")),
        ("scale", _FLOAT),
        *((name, _INT32) for name in ("scoring", "normalizes", "num_threads")),
    )


class MixArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("gate_up", "down", "src", "expert_ids", "weights", "dst")),
        *((name, _POINTER) for name in ("narrow_buf", "wide_buf", "gated_buf")),
        *((name, _INT64) for name in ("num_tokens", "num_experts", "top_k")),
        ("gate", GateParams),
        *((name, _INT32) for name in ("scales_input", "num_threads")),
    )


class StateRows(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("blocks", _POINTER),
        *((name, _INT64) for name in ("block_bytes", "row_bytes", "rows_per_block")),
    )


class StateRuns(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("first_tokens", "num_tokens_of", "reads", "writes")),
        ("first_runs", _POINTER),
        *((name, _INT64) for name in ("num_blocks", "num_runs", "num_sequences", "num_tokens")),
    )


class DeltaArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("states", StateRows),
        ("runs", StateRuns),
        *((name, _POINTER) for name in ("projected", "gates", "conv")),
        *((name, _POINTER) for name in ("decay_bias", "decay_rate")),
        ("norm", NormParams),
        *((name, _POINTER) for name in ("dst", "inputs_buf", "mixed_buf", "gates_buf")),
        *((name, _INT64) for name in ("first_row", "num_key_heads", "num_value_heads")),
        *((name, _INT64) for name in ("key_dim", "value_dim", "conv_size")),
        ("num_threads", _INT32),
    )


class MambaArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        ("states", StateRows),
        ("runs", StateRuns),
        *((name, _POINTER) for name in ("projected", "gates", "conv", "conv_bias")),
        *((name, _POINTER) for name in ("step_bias", "decay_rate", "skip")),
        ("norm", NormParams),
        *((name, _POINTER) for name in ("dst", "inputs_buf", "mixed_buf", "gates_buf")),
        ("outputs_buf", _POINTER),
        *((name, _INT64) for name in ("first_row", "num_key_heads", "num_value_heads")),
        *((name, _INT64) for name in ("key_dim", "value_dim", "conv_size")),
        ("num_threads", _INT32),
    )


class SigmoidArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("dst", "gates")),
        *((name, _INT64) for name in ("num_rows", "size", "gate_stride")),
        *((name, _INT32) for name in ("has_one_gate", "num_threads")),
    )


class CopyArgs(ctypes.Structure):
    __slots__ = ()
    _fields_ = (
        *((name, _POINTER) for name in ("src_addresses", "dst_addresses", "digests")),
        *((name, _INT64) for name in ("num_blocks", "block_bytes")),
    )


STRUCTS: tuple[type[ctypes.Structure], ...] = (
    *(PagedKv, BatchLayout, PackedMatrix, PackArgs, LinearArgs, HeadLinearArgs, NormParams),
    *(
        RmsNormArgs,
        RopeAngles,
        RopeArgs,
        GateParams,
        GateArgs,
        ArgmaxArgs,
        WriteKvArgs,
        AttentionParams,
    ),
    *(AttentionArgs, LayerArgs, PassArgs, RouteArgs, MixArgs),
    *(StateRows, StateRuns, DeltaArgs, MambaArgs, SigmoidArgs, CopyArgs),
)

_pointer = ctypes.POINTER
# By name: the types of the result and of the arguments.
FUNCTIONS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "baton_abi_version": (_INT32, ()),
    "baton_struct_size": (_INT64, (ctypes.c_char_p,)),
    "baton_packed_bytes": (_INT64, (_pointer(PackedMatrix),)),
    "baton_pack": (None, (_pointer(PackArgs),)),
    "baton_get_rows": (None, (_pointer(PackedMatrix), _POINTER, _INT64, _POINTER)),
    "baton_linear": (None, (_pointer(LinearArgs),)),
    "baton_head_linear": (None, (_pointer(HeadLinearArgs),)),
    "baton_rms_norm": (None, (_pointer(RmsNormArgs),)),
    "baton_rope": (None, (_pointer(RopeArgs),)),
    "baton_gate": (None, (_pointer(GateArgs),)),
    "baton_argmax": (None, (_pointer(ArgmaxArgs),)),
    "baton_route": (None, (_pointer(RouteArgs),)),
    "baton_mix_experts": (None, (_pointer(MixArgs),)),
    "baton_add": (None, (_POINTER, _POINTER, _INT64, _FLOAT, _INT32)),
    "baton_write_kv": (None, (_pointer(WriteKvArgs),)),
    "baton_attention": (None, (_pointer(AttentionArgs),)),
    "baton_layer": (None, (_pointer(LayerArgs), _pointer(PassArgs), _POINTER)),
    "baton_layer_attention": (
        None,
        (_pointer(LayerArgs), _pointer(PassArgs), _POINTER, _POINTER),
    ),
    "baton_layer_write_kv": (None, (_pointer(LayerArgs), _pointer(PassArgs), _POINTER)),
    "baton_delta": (None, (_pointer(DeltaArgs),)),
    "baton_mamba": (None, (_pointer(MambaArgs),)),
    "baton_multiply_sigmoid": (None, (_pointer(SigmoidArgs),)),
    "baton_copy_blocks": (None, (_pointer(CopyArgs),)),
    "baton_read_memory": (ctypes.c_uint32, (_POINTER, _INT64, _INT32)),
    "baton_multiply_registers": (_FLOAT, (_INT64, _INT32)),
}


def load_library(path: Path) -> ctypes.CDLL:
    """Load a kernel library with typed functions. Raises KernelAbiMismatch."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in FUNCTIONS.items():
        if not hasattr(library, name):
            raise KernelAbiMismatch(path, f"it has no function {name}")
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    version = library.baton_abi_version()
    if version != ABI_VERSION:
        raise KernelAbiMismatch(path, f"its ABI version is {version}, not {ABI_VERSION}")
    for struct in STRUCTS:
        size = library.baton_struct_size(struct.__name__.encode())
        if size != ctypes.sizeof(struct):
            difference = f"its {struct.__name__} has {size} bytes, not {ctypes.sizeof(struct)}"
            raise KernelAbiMismatch(path, difference)
    return library
