"""Compile the Triton kernels for GPUs, and report registers, shared memory and spills.

Needs the package triton, but no GPU: `python -m tools.report_triton_kernels` records the launches
of the runner's parts for typical sizes and compiles each kernel ahead of time. The programs and
warps that a multiprocessor runs at the same time are computed from them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from baton.core.ids import RequestId
from baton.core.sampling import SamplingParams
from baton.engine.plan import PlanRow
from baton.engine.runner.attention.byte_kv import scale_bytes
from baton.engine.runner.attention.paged_attention import LayerAttention
from baton.engine.runner.device.step_inputs import SHARED_INPUTS
from baton.engine.runner.model.config import Activation, Recurrence, RecurrentConfig
from baton.engine.runner.model.ops import MlpGate, Norm, Ops
from baton.engine.runner.model.pass_layout import PassLayout, TokenRun
from baton.engine.runner.model.recurrent.gated_delta import GatedDelta
from baton.engine.runner.model.recurrent.mamba2 import Mamba2
from baton.engine.runner.model.recurrent.rule import RecurrentRule
from baton.engine.runner.model.recurrent.table import RULES
from baton.engine.runner.sampling.sampling import SampledRows
from baton.engine.runner.state.state_shape import StateShape
from baton.engine.runner.state.state_tables import StateLayout
from baton.engine.runner.triton.availability import INTERPRETER_VARIABLE
from tools.gpu_occupancy import occupancy
from tools.triton_compilation import (
    KernelResources,
    Launch,
    compile_kernel,
    parts,
    recorded_launches,
)
from tools.triton_product_launches import (
    expert_launches,
    low_rank_launches,
    plain_launches,
    product_launches,
    routing_launches,
)

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = 576, 512  # of keys and of values, as in DeepSeek V3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 8, 2, 16
LATENT_HEADS = 128  # with one KV head
LONG_CONTEXT = 4096  # that several programs share
HIDDEN_SIZE, VOCAB_SIZE = 4096, 128_256
RECURRENT_CONFIGS = {
    "qwen3-next": RecurrentConfig(16, 32, 128, 128, 4),
    "granite-4-h-tiny": RecurrentConfig(1, 48, 128, 64, 4, Recurrence.MAMBA2),
    "granite-4-h-small": RecurrentConfig(1, 128, 128, 64, 4, Recurrence.MAMBA2),
}
STATE_BLOCK_BYTES = 393_216  # a block of Qwen3-Next


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", action="append", help="sm_90, gfx942; repeatable")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    if os.environ.pop(INTERPRETER_VARIABLE, None):
        parser.error(f"{INTERPRETER_VARIABLE} must not be set")
    launches = {name: launch for name, launch in all_launches().items() if options.only in name}
    found = [
        compile_kernel(name, launch, target)
        for name, launch in launches.items()
        for target in options.target or TARGETS
    ]
    if options.json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        print_table(found)


def print_table(found: Sequence[KernelResources]) -> None:
    header = f"{'kernel':42} {'target':6} {'registers':>9} {'shared':>7} {'stack':>5}"
    print(f"{header} {'warps':>5} {'programs':>8} {'occupancy':>9}")
    for each in found:
        print(
            f"{each.name:42} {each.target:6} {each.registers:9} {each.shared_bytes:7} "
            f"{each.stack_bytes:5} {each.num_warps:5} {describe_occupancy(each)}"
        )


def describe_occupancy(kernel: KernelResources) -> str:
    sizes = kernel.registers, kernel.shared_bytes, kernel.num_warps
    found = occupancy(kernel.target, *sizes)
    return f"{'-':>8} {'-':>9}" if found is None else f"{found.programs:8} {found.percent:8}%"


def all_launches() -> dict[str, Launch]:
    """Return a launch of each kernel in each variant, by name."""
    launches = sampling_launches() | hash_launches() | dict(routing_launches())
    for dtype in DTYPES:
        suffix = str(dtype).removeprefix("torch.")
        launches |= {f"{name} {suffix}": each for name, each in ops_launches(dtype)}
        launches |= {f"{name} {suffix}": each for name, each in product_launches(dtype)}
        launches |= {f"{name} {suffix}": each for name, each in plain_launches(dtype)}
        launches |= {f"{name} {suffix}": each for name, each in expert_launches(dtype)}
        launches |= {f"{name} {suffix}": each for name, each in low_rank_launches(dtype)}
        for head_dim in HEAD_DIMS:
            for kv_dtype in (dtype, torch.int8):
                name = f"attention {head_dim} {suffix}" + (" int8-kv" * (kv_dtype != dtype))
                launches |= attention_launches(name, dtype, kv_dtype, head_dim)
        for kv_dtype in (dtype, torch.int8):
            head_dim, value_dim = LATENT_DIMS
            name = f"attention {head_dim}/{value_dim} {suffix}" + (" int8-kv" * (kv_dtype != dtype))
            launches |= attention_launches(name, dtype, kv_dtype, head_dim, value_dim=value_dim)
        for model, config in RECURRENT_CONFIGS.items():
            found = recurrent_launches(config, dtype)
            launches |= {f"{name} {model} {suffix}": each for name, each in found}
    options = {"window": 512, "softcap": 30.0, "sinks": torch.zeros(8)}
    name = "attention 128 bfloat16 softcap sinks"
    return launches | attention_launches(name, torch.bfloat16, torch.bfloat16, 128, **options)


def ops_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of the elementwise operations."""
    ops = parts().ops
    rows, gates = torch.zeros(2, HIDDEN_SIZE, dtype=dtype), torch.zeros(2, 1, dtype=dtype)
    heads = torch.zeros(2, 8, 128, dtype=dtype)
    angles = (heads[:, :1].contiguous(), heads[:, :1].contiguous())
    norm, head_norm = Norm(rows[0], 1e-6), Norm(heads[0, 0], 1e-6)
    with recorded_launches() as launches:
        ops.rms_norm(rows, norm)
        ops.apply_ropes((heads, heads), (head_norm, head_norm), angles)
        for activation in Activation:
            ops.apply_gate(rows, MlpGate(activation, 1.702, 7.0))
        ops.multiply_sigmoid(rows, gates)
        ops.multiply_sigmoid(rows, rows)
        ops.add(rows, rows, 0.5)
        ops.add_and_norm(rows, rows, 0.5, norm)
        if dtype is torch.float32:
            ops.find_peaks(torch.zeros(2, VOCAB_SIZE))
    for launch in launches:
        variant = launch.arguments.get("activation", launch.arguments.get("is_scalar", ""))
        name = launch.kernel.__name__.removesuffix("_kernel")
        yield f"{name} {variant}".strip(), launch


def sampling_launches() -> dict[str, Launch]:
    """Return the launches of a row with constraints of all kinds, of its draw and its logprobs."""
    params = SamplingParams(
        banned_token_ids=(1,), logit_bias={1: 1.0}, repetition_penalty=1.1, top_k=50, top_p=0.9
    )
    row = PlanRow(RequestId("sampled"), (0,), 1, 0, ((),), params, 0)
    run = TokenRun(row, 0, 1, 1, np.zeros(1, dtype=np.int64))
    logits = torch.zeros(1, VOCAB_SIZE)
    rows = SampledRows([run], (), VOCAB_SIZE, logits.device)
    step, token_ids = parts().sampling.begin(rows, SHARED_INPUTS), torch.zeros(1, dtype=torch.int64)
    with recorded_launches() as launches:
        scores = step.constrain(logits)
        step.choose(scores)
        step.draw(scores, token_ids)
        parts().sampling.compute_logprobs(logits, token_ids, 5)
    return {each.kernel.__name__.removesuffix("_kernel"): each for each in launches}


def hash_launches() -> dict[str, Launch]:
    """Return the launches of hashes of KV blocks."""
    hashes = parts().make_block_hashes(torch.zeros(2, 1, 2, 2, BLOCK_SIZE, 128))
    assert hashes is not None
    with recorded_launches() as launches:
        hashes(torch.zeros(2, dtype=torch.int64))
    return {each.kernel.__name__.removesuffix("_kernel"): each for each in launches}


def attention_launches(
    name: str, dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, **options: Any
) -> dict[str, Launch]:
    """Return the launches of a pass with a prompt of 32 tokens.

    In bfloat16, there are also those of a pass with a token that has a long context.
    """
    is_latent = "value_dim" in options
    num_tensors, num_kv_heads = (1, 1) if is_latent else (2, NUM_KV_HEADS)
    slots = num_kv_heads, BLOCK_SIZE, head_dim + scale_bytes(kv_dtype)
    kv = torch.zeros(2, 1, num_tensors, *slots, dtype=kv_dtype)
    layer = LayerAttention(head_dim**-0.5, **options)
    keys = torch.zeros(32, num_kv_heads, head_dim, dtype=dtype)
    num_heads = LATENT_HEADS if is_latent else NUM_HEADS
    query = torch.zeros(32, num_heads, head_dim, dtype=dtype)
    attention = parts().make_attention(kv, [layer])
    with recorded_launches() as launches:
        attention_pass = attention.begin(make_layout(num_tokens=32, context_len=32))
        attention_pass.write(0, keys, None if is_latent else keys)
        attention_pass.attend(0, query)
        if dtype is torch.bfloat16:
            decodes = attention.begin(make_layout(num_tokens=1, context_len=LONG_CONTEXT))
            decodes.attend(0, query[:1])
    kinds = [launch.kernel.__name__.removesuffix("_kernel") for launch in launches]
    return {
        name.replace("attention", kind): launch
        for kind, launch in zip(kinds, launches, strict=True)
    }


def make_layout(num_tokens: int, context_len: int) -> PassLayout:
    """Return the layout of a sequence in the first blocks of the cache."""
    positions = np.arange(context_len - num_tokens, context_len)
    return PassLayout(
        num_queries=np.array([num_tokens]),
        context_lens=np.array([context_len]),
        block_tables=np.arange(-(-context_len // BLOCK_SIZE))[None, None],
        positions=positions,
        write_blocks=(positions // BLOCK_SIZE)[None],
        write_offsets=positions % BLOCK_SIZE,
    )


def recurrent_launches(config: RecurrentConfig, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a recurrent layer in a pass with a prompt of 32 tokens."""
    name = str(dtype).removeprefix("torch.")
    shape = StateShape(config, 36, name, dtype.itemsize, STATE_BLOCK_BYTES)
    kv = torch.zeros(2, STATE_BLOCK_BYTES // dtype.itemsize, dtype=dtype)
    tables = np.zeros((1, shape.num_blocks), dtype=np.int64)
    layout = StateLayout(np.array([0]), np.array([32]), tables, tables, np.array([0]))
    projected = torch.zeros(32, config.num_channels + config.num_values, dtype=dtype)
    _, gate_rows = RULES[config.rule].stored_rows(config)
    gates = torch.zeros(32, len(gate_rows), dtype=dtype)
    with recorded_launches() as launches:
        state_pass = parts().make_linear_attention(kv, shape).begin(layout)
        state_pass.mix(1, recurrent_weights(config, dtype), projected, gates)
    for launch in launches:
        yield launch.kernel.__name__.removesuffix("_kernel"), launch


def recurrent_weights(config: RecurrentConfig, dtype: torch.dtype) -> RecurrentRule:
    by_head, conv = torch.zeros(config.num_value_heads), torch.zeros(4, config.num_channels)
    norm = Norm(torch.zeros(config.num_values, dtype=dtype), 1e-6)
    gates = Ops().linear(torch.zeros(1, 1), None)
    if config.rule is Recurrence.GATED_DELTA:
        return GatedDelta(gates, conv, by_head, norm, by_head)
    return Mamba2(gates, conv, by_head, norm, conv[0], by_head, by_head)


if __name__ == "__main__":
    main()
