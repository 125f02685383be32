"""Launches of the Triton kernels of linear layers and experts, in the formats of weights.

Those of plain matrices are launched with `--batch-invariant`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from baton.checkpoint.quantized import Quantized
from baton.engine.runner.adapters.low_rank import ExpertPass
from baton.engine.runner.model.adapters import Group, Part, Place
from baton.engine.runner.model.config import MoeConfig, Scoring
from baton.engine.runner.model.linear import ExpertChoice, Linear, Mlp, Moe, Router
from baton.engine.runner.model.ops import MlpGate
from tools.triton_compilation import Launch, batch_invariant_parts, parts, recorded_launches

HIDDEN_SIZE = 4096
# Bits, columns of a group and dtype of the scales of quantized matrices.
FORMATS = {
    "int8": (8, HIDDEN_SIZE, torch.float32),
    "int4 group 32": (4, 32, torch.bfloat16),
    "int4 group 128": (4, 128, torch.float16),
    "q4_k": (4, 32, torch.float16),
    "q6_k": (8, 16, torch.float16),
    "mxfp4": (4, 32, torch.float32),
}
EXPERT_FORMATS = ("plain", "int4 group 128", "q4_k", "mxfp4")
NUM_EXPERTS, TOP_K, EXPERT_SIZE = 8, 2, 256
NUM_HEADS, HEAD_DIM, LATENT_DIM = 8, 128, 512


def product_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of linear layers of quantized matrices, and of their rows."""
    ids = torch.arange(2)
    for name in FORMATS:
        matrix = quantized(name, 512, HIDDEN_SIZE, dtype)
        for num_tokens in (1, 64):
            src = torch.zeros(num_tokens, HIDDEN_SIZE, dtype=dtype)
            with recorded_launches() as launches:
                parts().ops.linear(matrix, torch.zeros(512, dtype=dtype))(src)
            yield f"linear {name} tokens {num_tokens}", launches[0]
        with recorded_launches() as launches:
            parts().ops.linear(matrix, None).rows(ids)
        yield f"rows {name}", launches[0]
    name = "int4 group 128"
    matrix = quantized(name, 512, HIDDEN_SIZE, dtype)
    ordered = replace(matrix, order=torch.arange(HIDDEN_SIZE))
    with recorded_launches() as launches:
        parts().ops.linear(ordered, None)(src)
    yield f"linear {name} ordered", launches[0]


def plain_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of linear layers of plain matrices, and of one matrix for each head."""
    ops = batch_invariant_parts().ops
    linear = ops.linear(torch.zeros(512, HIDDEN_SIZE, dtype=dtype), torch.zeros(512, dtype=dtype))
    heads = ops.head_linears(torch.zeros(NUM_HEADS, LATENT_DIM, HEAD_DIM, dtype=dtype))
    for num_tokens in (1, 64):
        with recorded_launches() as launches:
            linear(torch.zeros(num_tokens, HIDDEN_SIZE, dtype=dtype))
            heads(torch.zeros(num_tokens, NUM_HEADS, HEAD_DIM, dtype=dtype))
        yield f"linear plain tokens {num_tokens}", launches[0]
        yield f"heads plain tokens {num_tokens}", launches[1]


def low_rank_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of the products of adapters."""
    part = Part(torch.zeros(16, HIDDEN_SIZE), torch.zeros(16, 512), first_row=0)
    of_heads = Part(torch.zeros(16, HEAD_DIM), torch.zeros(16, LATENT_DIM), first_row=0)
    places = {
        Place(0, f"linear {dtype}"): [part],
        Place(0, "key", 1): [of_heads],
        Place(0, "gate_up", 1): [part],
        Place(0, "down", 1): [part],
    }
    products = type(parts().low_rank)()
    with recorded_launches() as launches:
        adapter = products.prepare(places, torch.zeros(0, dtype=dtype), 1)
    for launch in launches:
        kind = launch.arguments["kind"]
        yield f"{launch.kernel.__name__.removesuffix('_kernel')} {kind}", launch
    config = MoeConfig(2, 1, 512, scales_input=True)
    linear = parts().ops.linear(torch.zeros(512, HIDDEN_SIZE, dtype=dtype), None)
    router = Router(config, torch.zeros(2, HIDDEN_SIZE), None, None)
    moe = Moe(config, router, [Mlp(linear, linear)] * 2, None, None)
    src, choice = torch.zeros(1, HIDDEN_SIZE, dtype=dtype), torch.zeros(1, 1)
    own = ExpertPass(
        parts().ops, moe, 0, MlpGate(), src, ExpertChoice(choice.long(), choice.float())
    )
    with recorded_launches() as launches:
        products.mix_experts(own, [Group(adapter, torch.zeros(1, dtype=torch.int64))])
    scaled = [each for each in launches if each.kernel.__name__ == "project_kernel"]
    yield "project gate_up scaled", scaled[0]


def routing_launches() -> Iterator[tuple[str, Launch]]:
    """Yield the launches of routing: by softmax, and by groups as in DeepSeek V3."""
    configs = {
        "softmax": MoeConfig(128, 8, EXPERT_SIZE, normalizes=True),
        "groups": MoeConfig(
            256,
            8,
            EXPERT_SIZE,
            Scoring.SIGMOID,
            normalizes=True,
            num_groups=8,
            top_groups=4,
            has_correction_bias=True,
        ),
    }
    for name, config in configs.items():
        correction = torch.zeros(config.num_experts) if config.has_correction_bias else None
        router = Router(config, torch.zeros(config.num_experts, HIDDEN_SIZE), None, correction)
        with recorded_launches() as launches:
            parts().ops.route(torch.zeros(1, HIDDEN_SIZE), router)
        yield f"choose_experts {name}", launches[0]


def expert_launches(dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a mixture of experts."""
    ops, gate = parts().ops, MlpGate()
    for name in EXPERT_FORMATS:
        mlp = Mlp(
            biased_linear(name, 2 * EXPERT_SIZE, HIDDEN_SIZE, dtype),
            biased_linear(name, HIDDEN_SIZE, EXPERT_SIZE, dtype),
        )
        for num_tokens, scales_input in ((1, False), (512, False), (512, True)):
            config = MoeConfig(NUM_EXPERTS, TOP_K, EXPERT_SIZE, scales_input=scales_input)
            router = Router(config, torch.zeros(NUM_EXPERTS, HIDDEN_SIZE), None, None)
            moe = Moe(config, router, [mlp] * NUM_EXPERTS, None, None)
            choice = torch.zeros(num_tokens, TOP_K)
            src = torch.zeros(num_tokens, HIDDEN_SIZE, dtype=dtype)
            with recorded_launches() as launches:
                ops.mix_experts(moe, gate, src, ExpertChoice(choice.long(), choice))
            plan, gate_up, _, down, total = launches
            suffix = f"{name} tokens {num_tokens}" + " scaled" * scales_input
            yield f"experts up {suffix}", gate_up
            yield f"experts down {suffix}", down
            yield f"plan_tiles {num_tokens}", plan
            yield "sum_experts" + " scaled" * scales_input, total


def biased_linear(name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Linear:
    bias = torch.zeros(num_rows, dtype=dtype)
    if name == "plain":
        return parts().ops.linear(torch.zeros(num_rows, num_columns, dtype=dtype), bias)
    return parts().ops.linear(quantized(name, num_rows, num_columns, dtype), bias)


def quantized(name: str, num_rows: int, num_columns: int, dtype: torch.dtype) -> Quantized:
    """Return a matrix of zeros in a format."""
    bits, group, scale_dtype = FORMATS[name]
    scales = torch.zeros(num_rows, -(-num_columns // group), dtype=scale_dtype)
    has_zeros = name not in ("q4_k", "mxfp4")
    return Quantized(
        torch.zeros(num_rows, num_columns, dtype=torch.uint8),
        scales,
        scales.to(torch.uint8) if has_zeros else scales[:, :0].to(torch.uint8),
        bits,
        group,
        dtype,
        is_mxfp4=name == "mxfp4",
        offsets=scales if name == "q4_k" else None,
    )
