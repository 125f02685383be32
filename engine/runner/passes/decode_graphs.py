"""Decode steps as graphs: a padded batch of single tokens, captured once and replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from baton.core.units import format_bytes
from baton.engine.runner.device.device import Device, Graph, GraphPool
from baton.engine.runner.device.graphs import EagerCause, GraphSize, StepShape, choose_graph
from baton.engine.runner.device.step_inputs import PackedInputs, StepInputs
from baton.engine.runner.model.adapters import NO_TOKENS, Selection
from baton.engine.runner.model.pass_layout import Ints, PassLayout
from baton.engine.runner.state.state_tables import StateLayout

log = logging.getLogger(__name__)


class DecodeBatch(NamedTuple):
    """Arrays of a step in which every sequence has one token."""

    token_ids: Ints
    layout: PassLayout
    states: StateLayout | None  # if the model has recurrent layers
    adapters: Selection | None = None

    def pad(self, size: GraphSize, scratch_block: int) -> DecodeBatch:
        """Return the batch with more rows, which write into the scratch block only."""
        num_added = size.num_rows - len(self.token_ids)
        return DecodeBatch(
            np.concatenate((self.token_ids, np.zeros(num_added, dtype=np.int64))),
            self.layout.pad(size.num_rows, size.num_blocks, scratch_block),
            None if self.states is None else self.states.pad(size.num_rows, scratch_block),
            None if self.adapters is None else self.adapters.pad(size.num_rows),
        )


# Puts the arrays of a batch, and returns the function that launches its pass once they are sent.
T = TypeVar("T")
Prepare = Callable[[DecodeBatch, StepInputs], Callable[[], T]]


class DecodeGraphs(Generic[T]):
    """Graphs by size. A replay reads and writes only the memory of its capture.

    The inputs are its own, because the memory of those of other steps can be replaced by more.
    """

    def __init__(
        self, device: Device, pool: GraphPool, prepare: Prepare[T], scratch_block: int
    ) -> None:
        self._device = device
        self._pool = pool
        self._prepare = prepare
        self._scratch_block = scratch_block
        self.inputs = PackedInputs(device)
        self._captured: dict[GraphSize, _Captured[T]] = {}
        self._sizes: tuple[GraphSize, ...] = ()

    def capture(self, sizes: Sequence[GraphSize], nothing: DecodeBatch) -> None:
        """Capture a pass over padding rows alone for each size, the largest first."""
        self._put(sizes[0], _with_adapters(nothing, sizes[0]))
        self.inputs.fix()
        for has_adapters, its_sizes in groupby(sizes, lambda size: size.has_adapters):
            self._capture_all([*its_sizes], nothing, " with adapters" if has_adapters else "")
        self._sizes = tuple(self._captured)

    def _capture_all(self, sizes: Sequence[GraphSize], nothing: DecodeBatch, kind: str) -> None:
        free_before = self._device.free_bytes()
        for size in sizes:
            batch = _with_adapters(nothing, size)
            self._captured[size] = self._capture(self._put(size, batch))
        self._device.drain()
        log.info(
            "captured %d graphs of decode steps%s: %s",
            len(sizes),
            kind,
            format_bytes(free_before - self._device.free_bytes()),
        )

    def choose(self, step: StepShape) -> GraphSize | EagerCause:
        """Return the graph that fits, or the reason why none does."""
        return choose_graph(step, self._sizes)

    def prepare(self, size: GraphSize, batch: DecodeBatch) -> Callable[[], T]:
        """Put the arrays of a batch into `inputs`, and return the function that launches its pass.

        That returns what the pass returned when it was captured, which the next replay overwrites.
        """
        captured = self._captured[size]
        self._put(size, batch)
        if self.inputs.num_packed_bytes != captured.num_packed_bytes:
            raise RuntimeError(
                f"inputs of {self.inputs.num_packed_bytes} bytes for the graph of {size}, which"
                f" reads {captured.num_packed_bytes}"
            )

        def replay() -> T:
            captured.graph.replay()
            return captured.outputs

        return replay

    def _put(self, size: GraphSize, batch: DecodeBatch) -> Callable[[], T]:
        self.inputs.begin()
        return self._prepare(batch.pad(size, self._scratch_block), self.inputs)

    def _capture(self, run: Callable[[], T]) -> _Captured[T]:
        self.inputs.send()
        outputs = [run()]  # what happens only once, such as compilation, is not captured

        def launch() -> None:
            outputs[:] = [run()]

        graph = self._pool.capture(launch)
        return _Captured(graph, outputs[0], self.inputs.num_packed_bytes)


def _with_adapters(nothing: DecodeBatch, size: GraphSize) -> DecodeBatch:
    return nothing._replace(adapters=NO_TOKENS if size.has_adapters else None)


@dataclass(frozen=True, slots=True)
class _Captured(Generic[T]):
    graph: Graph
    outputs: T  # in the memory of the graph
    num_packed_bytes: int
