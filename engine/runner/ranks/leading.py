"""First rank of a node: it schedules, and has the others compute each pass with it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from baton.checkpoint.hub import open_checkpoint
from baton.core.errors import InvalidConfig
from baton.core.exclusions import Feature, check_exclusions
from baton.engine.errors import RunnerLost
from baton.engine.runner.adapters.low_rank import ActiveAdapters
from baton.engine.runner.attention.kv_tensor import KvShape
from baton.engine.runner.batch.encodings import MediaRows
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.device.device import FencedHook
from baton.engine.runner.device.step_inputs import StepInputs
from baton.engine.runner.drafters import OTHERWISE
from baton.engine.runner.families.read_config import read_model_config
from baton.engine.runner.kernels.build import (
    KernelsUnavailable,
    best_variant,
    cpu_features,
    library,
)
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.load import load_runner
from baton.engine.runner.model.adapters import Selection
from baton.engine.runner.model.config import ModelConfig
from baton.engine.runner.model.linear import Linear
from baton.engine.runner.model.pass_layout import Ints
from baton.engine.runner.model.rank_group import Shard
from baton.engine.runner.model_info import LoadProgress, LoadProgressCallback
from baton.engine.runner.model_runner import TorchRunner
from baton.engine.runner.passes.forward_passes import ForwardPasses, PassStep
from baton.engine.runner.ranks.divided_adapters import LedAdapters
from baton.engine.runner.ranks.links import PATIENCE_S, RankLinks, links_bytes, make_shared_memory
from baton.engine.runner.ranks.processes import (
    ComputePass,
    MultiplyHead,
    RankProcesses,
    RankWatch,
    SentStep,
)
from baton.engine.runner.ranks.sharded_source import shard_of, sharded_source
from baton.engine.runner.sampling.output_heads import HiddenStates
from baton.engine.runner.weights.shards import shard_config
from baton.engine.spec_decode.config import AUTO

log = logging.getLogger(__name__)
NODES = Path("/sys/devices/system/node")

Cpus = frozenset[int]


def load_in_ranks(
    config: RunnerConfig, on_progress: LoadProgressCallback | None = None
) -> TorchRunner:
    """Start the processes of all other ranks, and load the shard of the first one.

    Raises ModelError and InvalidConfig, also for what the others find, and RunnerLost.
    """
    config = _checked(config)
    shard = shard_of(config, 0)
    # Before processes are started and weights are read, which take long.
    shard_config(read_model_config(open_checkpoint(config.model)), shard)
    allowed = os.sched_getaffinity(0)
    cpus = cpus_by_rank(shard.size, allowed)
    threads = config.num_threads or max(1, len(allowed) // shard.size)
    config = replace(config, num_threads=threads)
    kernels = _kernels(threads)
    memory, fd = make_shared_memory("baton ranks", links_bytes(kernels, shard.size))
    links = LeadingLinks(kernels, memory, shard)
    watch = RankWatch(links.idle_beats, PATIENCE_S)
    processes = RankProcesses(config, fd, links.end, cpus=cpus, watch=watch)

    def report(progress: LoadProgress) -> None:
        processes.check()
        if on_progress is not None:
            on_progress(progress)

    try:
        if cpus[0] is not None:
            listed = "; ".join(str(sorted(own or ())) for own in cpus)
            log.info("CPUs of each rank, by memory nodes: %s", listed)
            os.sched_setaffinity(0, cpus[0])
        return load_runner(
            config,
            report,
            source=sharded_source(links, processes.wait_until_loaded),
            ranks=LeadingRank(links, processes, None if cpus[0] is None else allowed),
        )
    except BaseException:
        processes.close()
        if cpus[0] is not None:
            os.sched_setaffinity(0, allowed)
        raise


def _checked(config: RunnerConfig) -> RunnerConfig:
    speculation = config.speculation
    if speculation is not None and speculation.method == AUTO:
        speculation = OTHERWISE
    check_exclusions({
        Feature.SEVERAL_RANKS: True,
        Feature.GPU: config.device != "cpu",
        Feature.TRAINED_DRAFTS: speculation is not None and not speculation.looks_up,
    })  # fmt: skip
    return replace(config, speculation=speculation)


def _kernels(num_threads: int) -> Kernels:
    try:
        return Kernels(library(best_variant(cpu_features())), num_threads)
    except KernelsUnavailable as error:
        raise InvalidConfig(
            f"--tensor-parallel-size: ranks exchange numbers by native kernels: {error}"
        ) from error


class LeadingLinks(RankLinks):
    """Links of the first rank, which has the others multiply with it.

    It alone loses patience: it ends the others.
    """

    def __init__(self, kernels: Kernels, memory: mmap, shard: Shard) -> None:
        super().__init__(kernels, memory, shard, PATIENCE_S)
        self._owner = os.getpid()
        self._is_idle = False

    def idle_beats(self, rank: int) -> int | None:
        """Return the beats of a rank that waits for messages; None: it has one. Any thread."""
        return self.beats(rank) if self._is_idle else None

    def begin(self) -> None:
        """Expect all ranks to wait for messages from now on."""
        self._is_idle = True

    @contextmanager
    def carrying_out(self, message: object) -> Iterator[None]:
        """Have the other ranks carry out a message with the block, in which they wait.

        Raises any exception of the block as RunnerLost.
        """
        self._is_idle = False
        self.send(message)
        try:
            yield
        except RunnerLost:
            raise
        except Exception as error:
            raise RunnerLost(f"a pass failed in the first rank: {error!r}") from error
        self._is_idle = True

    def multiply(self, part: Linear, hidden_states: Tensor, num_rows: int) -> Tensor:
        with self.carrying_out(MultiplyHead(len(hidden_states))):
            hidden_states = self.broadcast(hidden_states)
            products = self._padded(part(hidden_states), num_rows)
            gathered = torch.empty(self.shard.size, *products.shape, dtype=products.dtype)
            self.gather(products, gathered)
            return gathered.transpose(0, 1).flatten(1)[:, :num_rows]

    def send(self, message: object) -> None:
        if os.getpid() != self._owner:
            raise RunnerLost("a fork cannot use the ranks of the process that it was forked from")
        super().send(message)


class LeadingRank:
    """Implements `Ranks`."""

    def __init__(
        self, links: LeadingLinks, processes: RankProcesses, allowed_cpus: set[int] | None
    ) -> None:
        """`allowed_cpus` are given back to the thread that closes this; None: all are in use."""
        self._allowed_cpus = allowed_cpus
        self._links = links
        self._processes = processes

    def allocate(self, kv: KvShape, num_blocks: int) -> Tensor:
        memory, fd = make_shared_memory("baton KV cache", num_blocks * kv.block_bytes)
        try:
            self._processes.begin(num_blocks, fd)
        finally:
            os.close(fd)
        self._links.begin()
        return kv.over(memory)

    def make_adapters(
        self,
        active: ActiveAdapters,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *limits: int,
    ) -> LedAdapters:
        shard = self._links.shard
        return LedAdapters(
            active, config, dtype, device, *limits, shard=shard, orders=self._processes
        )

    def lead(self, passes: ForwardPasses) -> ForwardPasses:
        return LedPasses(passes, self._links)

    def when_lost(self, call: Callable[[Exception], None]) -> None:
        self._processes.when_lost(call)

    def read_collectives_s(self) -> float:
        return self._links.spent_s

    def close(self) -> None:
        self._processes.close()
        if self._allowed_cpus is not None:
            os.sched_setaffinity(0, self._allowed_cpus)


class LedPasses(ForwardPasses):
    """Passes that all ranks compute."""

    def __init__(self, own: ForwardPasses, links: LeadingLinks) -> None:
        super().__init__(
            own.decoder,
            own.ropes,
            own.attention,
            own.linear_attention,
            own.max_model_len,
            own.adapters,
        )
        self._links = links

    def prepare(
        self,
        step: PassStep,
        inputs: StepInputs,
        hook: FencedHook | None,
        selection: Selection | None,
        media: MediaRows | None = None,
        grid: Ints | None = None,
        *,
        needs_all: bool,
    ) -> Callable[[], HiddenStates]:
        last_writer = self.decoder.config.last_writer
        late = None if hook is None else _LateHook(hook, last_writer)
        launch = super().prepare(step, inputs, late, selection, media, grid, needs_all=needs_all)
        table = self.adapters
        sent = table.sent(selection) if isinstance(table, LedAdapters) else None
        message = ComputePass(SentStep.of(step), media, grid, needs_all, sent)

        def launch_all() -> HiddenStates:
            with self._links.carrying_out(message):
                hidden_states = launch()
                self._links.meet()
            if late is not None:
                late.report()
            return hidden_states

        return launch_all


class _LateHook(FencedHook):
    """Reports the last layers at the end of a pass, when other ranks have written their KV, too.

    Of the layers before, they have: this rank has their sum.
    """

    def __init__(self, hook: FencedHook, last_writer: int) -> None:
        self._own = hook
        self._last_writer = last_writer
        self._late: list[int] = []

    def layer_done(self, layer: int) -> None:
        if layer < self._last_writer:
            self._own.layer_done(layer)
        else:
            self._late.append(layer)

    def report(self) -> None:
        for layer in self._late:
            self._own.layer_done(layer)


def cpus_by_rank(
    num_ranks: int, allowed: AbstractSet[int], nodes: Path = NODES
) -> Sequence[Cpus | None]:
    """Return the CPUs of each rank among those allowed; None: it can use all of them.

    Ranks are divided among memory nodes, or the nodes among ranks if there are more of them. Memory
    is on the node of the CPU that first touches it.
    """
    local = [cpus & allowed for cpus in _cpus_by_node(nodes)]
    usable = [cpus for cpus in local if cpus]  # some nodes have memory alone
    if len(usable) < 2:
        return [None] * num_ranks
    return [
        frozenset().union(*(usable[node] for node in Shard(rank, num_ranks).part_of(len(usable))))
        for rank in range(num_ranks)
    ]


def _cpus_by_node(nodes: Path) -> list[Cpus]:
    found = sorted(nodes.glob("node[0-9]*"), key=lambda node: int(node.name.removeprefix("node")))
    return [_cpus((node / "cpulist").read_text(encoding="ascii")) for node in found]


def _cpus(written: str) -> Cpus:
    """Return the CPUs of a list such as 0-3,8."""
    ranges = (part.split("-") for part in written.strip().split(",") if part)
    return frozenset(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1))
