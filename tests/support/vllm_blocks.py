"""KV of prompts as a vLLM server on a CPU has it, computed by Baton's own runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.core.ids import RequestId
from baton.core.request import EngineRequest
from baton.core.sampling import SamplingParams
from baton.engine.config import EngineOptions
from baton.engine.factory import build_engine
from baton.engine.plan import Plan, StepObserver
from baton.engine.runner.model_runner import TorchRunner
from tests.support.fake_vllm import FakeVllm


class _Tables(StepObserver):
    """Remembers the blocks of the request that started last."""

    def __init__(self) -> None:
        self.block_ids: tuple[int, ...] = ()

    def note_plan(self, plan: Plan, now_s: float) -> None:
        for row in plan.started:
            self.block_ids = row.block_tables[0]


class Prefilled(NamedTuple):
    block_ids: tuple[int, ...]
    logprobs: list[float | None]  # of the prompt's tokens


def prefill(server: FakeVllm, runner: TorchRunner, prompt: Sequence[int]) -> Prefilled:
    """Compute a prompt, and write its KV into blocks of the server."""
    tables = _Tables()
    engine = build_engine(runner, EngineOptions(), observers=[tables])
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    logprobs: list[float | None] = []
    engine.scheduler.add(EngineRequest(RequestId("prefill"), tuple(prompt), sampling, seed=0))
    while engine.scheduler.has_work:
        for output in engine.step():
            logprobs += [each if each is None else each.logprob for each in output.prompt_logprobs]
    kv = runner.blocks.kv[list(tables.block_ids)]
    by_token = kv.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)  # [layers, 2, heads, tokens, dim]
    size = server.geometry.block_size
    num_blocks = -(-len(prompt) // size)
    padded = torch.zeros(*by_token.shape[:3], num_blocks * size, by_token.shape[4]).to(kv.dtype)
    padded[:, :, :, : len(prompt)] = by_token[:, :, :, : len(prompt)]
    first = server.num_used_blocks
    if first + num_blocks > server.geometry.num_blocks:
        first = 0  # the oldest ones have been read long ago
    server.num_used_blocks = first + num_blocks
    for index in range(num_blocks):
        block = padded[:, :, :, index * size : (index + 1) * size]
        server.write_block(first + index, [_packed(layer) for layer in block])
    return Prefilled(tuple(range(first, first + num_blocks)), logprobs)


def _packed(layer: Tensor) -> bytes:
    """Return the bytes of a block in one layer, [2, heads, tokens, dim], packed for `vec`."""
    keys, values = layer
    halves = torch.stack((keys.transpose(1, 2).flatten(1), values.flatten(1)), dim=1)
    return halves.contiguous().view(torch.uint8).numpy().tobytes()
