"""Prefill of `python -m benchmarks kv`: real matrix products and writes, without a model.

It follows the order of an engine step: orders, layers, poll.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.core.ids import BlockId, HandoffId
from baton.core.output import FirstToken
from baton.kv_transfer.types import Complete, KvOrders, Send
from baton.kv_transfer.worker import KvTransferWorker

MATRIX = 512
NUM_TOKENS = 16

# Arguments: blocks, layer, value. Writes that layer of the blocks.
Fill = Callable[[tuple[BlockId, ...], int, int], None]


@dataclass(frozen=True, slots=True)
class Prefill:
    handoff_id: HandoffId
    chunks: Sequence[tuple[BlockId, ...]]
    chunk_s: float  # compute time of a chunk
    value: int  # byte that fills the blocks
    push: str  # chunk, layer, or none: compute only


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Monotonic seconds."""

    began_s: float
    last_chunk_s: float  # end of the last layer of the last chunk


def compute(
    prefill: Prefill, worker: KvTransferWorker, num_layers: int, fill: Fill
) -> PrefillTimes:
    began_s = time.monotonic()
    place, orders = 0, tuple[Send, ...]()
    for blocks in prefill.chunks:
        layers = Send(prefill.handoff_id, place, blocks)
        layer_sends = (layers,) if prefill.push == "layer" else ()
        worker.start(KvOrders(sends=orders, layer_sends=layer_sends), time.monotonic())
        for layer in range(num_layers):
            _multiply_for(prefill.chunk_s / num_layers)
            fill(blocks, layer, prefill.value)
            worker.layer_done(layer, time.monotonic())
        worker.poll(time.monotonic())
        orders = (Send(prefill.handoff_id, place, blocks),) if prefill.push != "none" else ()
        place += len(blocks)
    last_chunk_s = time.monotonic()
    if prefill.push == "none":
        return PrefillTimes(began_s, last_chunk_s)
    complete = Complete(prefill.handoff_id, NUM_TOKENS, FirstToken(0))
    worker.start(KvOrders(sends=orders, completes=(complete,)), last_chunk_s)
    while prefill.handoff_id not in worker.poll(time.monotonic()).finished_sending:
        time.sleep(worker.next_poll_s(time.monotonic()) or 0)
    return PrefillTimes(began_s, last_chunk_s)


def _multiply_for(seconds: float) -> None:
    left, right = (np.ones((MATRIX, MATRIX), np.float32) for _ in range(2))
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        left @ right
