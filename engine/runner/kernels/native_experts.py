"""Native mixture of experts: routing, and the experts of a layer as arrays of packed matrices."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from baton.engine.runner.host_memory import huge_page_memory
from baton.engine.runner.kernels.abi import GateParams, MixArgs, PackedMatrix, RouteArgs
from baton.engine.runner.model.config import Activation, Scoring
from baton.engine.runner.model.experts import ExpertChoice, Router
from baton.engine.runner.model.ops import MlpGate

_FORMAT_FIELDS = ("bits", "num_rows", "num_columns", "group_size", "is_mxfp4", "scale_type")
_GATE_KINDS = {Activation.SILU: 0, Activation.GELU_TANH: 1, Activation.CLAMPED_SWIGLU: 2}
_SCORINGS = {Scoring.SOFTMAX: 0, Scoring.SOFTMAX_OF_TOP: 1, Scoring.SIGMOID: 2}


def gate_params(gate: MlpGate) -> GateParams:
    return GateParams(_GATE_KINDS[gate.activation], gate.alpha, gate.limit)


class Workspace:
    """Buffer of intermediate results on huge pages, kept from one call to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def split(self, *sizes: int) -> list[int]:
        """Return the addresses of buffers with these sizes in bytes."""
        *starts, total = accumulate((_round_up(size) for size in sizes), initial=0)
        if len(self._memory) < total:
            self._memory = torch.frombuffer(huge_page_memory(total), dtype=torch.uint8)
        return [self._memory.data_ptr() + start for start in starts]


def _round_up(num_bytes: int) -> int:
    """Round up to whole cache lines."""
    return -(-num_bytes // 64) * 64


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Matrices of all experts of a layer. All have the same shape and format."""

    gate_up: ctypes.Array[PackedMatrix]
    down: ctypes.Array[PackedMatrix]

    @classmethod
    def of(
        cls, gate_up: Sequence[PackedMatrix], down: Sequence[PackedMatrix]
    ) -> NativeExperts | None:
        """Return None if the matrices differ in shape or format."""
        if len(set(map(_format, gate_up))) > 1 or len(set(map(_format, down))) > 1:
            return None
        array = PackedMatrix * len(gate_up)
        return cls(array(*gate_up), array(*down))


def _format(matrix: PackedMatrix) -> tuple[int, ...]:
    return tuple(getattr(matrix, name) for name in _FORMAT_FIELDS)


class NativeMoe:
    """Computes routing and experts with a kernel library."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        self._library = library
        self._num_threads = num_threads
        self._workspace = Workspace()

    def route(self, hidden_states: Tensor, router: Router) -> ExpertChoice:
        hidden_states = hidden_states.contiguous()
        config, num_tokens = router.config, len(hidden_states)
        expert_ids = torch.empty(num_tokens, config.top_k, dtype=torch.int64)
        weights = torch.empty(num_tokens, config.top_k)
        self._library.baton_route(
            RouteArgs(
                router=router.weight.data_ptr(),
                bias=_address(router.bias),
                correction_bias=_address(router.correction_bias),
                src=hidden_states.data_ptr(),
                expert_ids=expert_ids.data_ptr(),
                weights=weights.data_ptr(),
                num_tokens=num_tokens,
                hidden_size=hidden_states.shape[1],
                num_experts=config.num_experts,
                top_k=config.top_k,
                num_groups=config.num_groups,
                top_groups=config.top_groups,
                group_best=config.group_best,
                scale=config.scale,
                scoring=_SCORINGS[config.scoring],
                normalizes=config.normalizes,
                num_threads=self._num_threads,
            )
        )
        return ExpertChoice(expert_ids, weights)

    def mix(
        self,
        experts: NativeExperts,
        gate: MlpGate,
        hidden_states: Tensor,
        routing: ExpertChoice,
        *,
        scales_input: bool,
    ) -> Tensor:
        hidden_states = hidden_states.contiguous()
        expert_ids, weights = routing.expert_ids.contiguous(), routing.weights.contiguous()
        output = torch.empty_like(hidden_states)
        num_tokens, top_k = expert_ids.shape
        gate_up, down = experts.gate_up[0], experts.down[0]
        widths = down.num_rows, gate_up.num_rows, down.num_columns
        num_rows = num_tokens * top_k
        buffers = self._workspace.split(*(2 * num_rows * width for width in widths))
        self._library.baton_mix_experts(
            MixArgs(
                gate_up=ctypes.addressof(experts.gate_up),
                down=ctypes.addressof(experts.down),
                src=hidden_states.data_ptr(),
                expert_ids=expert_ids.data_ptr(),
                weights=weights.data_ptr(),
                dst=output.data_ptr(),
                narrow_buf=buffers[0],
                wide_buf=buffers[1],
                gated_buf=buffers[2],
                num_tokens=num_tokens,
                num_experts=len(experts.gate_up),
                top_k=top_k,
                gate=gate_params(gate),
                scales_input=scales_input,
                num_threads=self._num_threads,
            )
        )
        return output


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
