"""Process of a rank that computes what the first one sends."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from baton.core.errors import InvalidConfig, ModelError
from baton.engine.errors import RunnerLost
from baton.engine.runner.adapters.adapters import AdapterTable
from baton.engine.runner.device.cuda import open_device
from baton.engine.runner.device.step_inputs import make_inputs
from baton.engine.runner.kernels.build import best_variant, cpu_features, library
from baton.engine.runner.kernels.calls import Kernels
from baton.engine.runner.kernels.choose import choose_parts
from baton.engine.runner.load import (
    LoadedWeights,
    OpenedModel,
    choose_max_model_len,
    load_weights,
    make_adapters,
    open_model,
    plan_memory,
)
from baton.engine.runner.model.decoder import Decoder
from baton.engine.runner.model.rope import Ropes
from baton.engine.runner.passes.forward_passes import ForwardPasses
from baton.engine.runner.ranks.divided_adapters import FollowedAdapters
from baton.engine.runner.ranks.links import RankLinks, links_bytes, map_shared_memory
from baton.engine.runner.ranks.processes import (
    MAX_MESSAGE_BYTES,
    Begin,
    ComputePass,
    DropAdapter,
    LoadAdapter,
    MultiplyHead,
    Ready,
    Setup,
)
from baton.engine.runner.ranks.sharded_source import shard_of, sharded_source

log = logging.getLogger(__name__)
PR_SET_PDEATHSIG = 1


class AdapterParts(Protocol):
    """Parts of adapters, as the first rank sends them."""

    def load(self, number: int, parts: Any) -> None: ...

    def drop(self, number: int) -> None: ...


class FirstRank:
    """Connection to the first rank. All methods wait for it; this process ends with it."""

    def __init__(self, fd: int, parent: int) -> None:
        _end_with(parent)
        # Service managers send SIGTERM to all processes of a node, whose first rank drains then.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        self._connection = socket.socket(fileno=fd)
        self._name = "rank"

    @classmethod
    def of_command_line(cls) -> FirstRank:
        return cls(*map(int, sys.argv[1:]))

    def receive_setup(self) -> tuple[Setup, int]:
        """Return the settings, and the descriptor of the links' memory. Logs go there from now."""
        setup, links_fd = self._receive()
        assert isinstance(setup, Setup)
        self._name = f"rank {setup.rank}"
        if setup.cpus is not None:  # for all threads that start from now on
            os.sched_setaffinity(0, setup.cpus)
        root = logging.getLogger()
        root.addHandler(_RecordSender(self._connection, self._name))
        root.setLevel(setup.log_level)
        return setup, links_fd

    def receive_begin(self) -> tuple[Begin, int]:
        """Return the size of the KV cache, and its descriptor."""
        begin, kv_fd = self._receive()
        assert isinstance(begin, Begin)
        return begin, kv_fd

    @contextmanager
    def carrying_out(self) -> Iterator[None]:
        """Report the end of the block, or its fault. This process is ended after a fault."""
        fault: Exception | None = None
        try:
            yield
        except (ModelError, InvalidConfig) as error:
            kind = InvalidConfig if isinstance(error, InvalidConfig) else ModelError
            fault = kind(f"{self._name}: {error}")
        except Exception as error:
            log.exception("the start failed")
            fault = RunnerLost(f"{self._name} of this node cannot start: {error!r}")
        with suppress(ConnectionError):  # this process is about to end
            self._connection.send(pickle.dumps(Ready(fault)))
        if fault is not None:
            self._receive()

    def load_adapters(self, adapters: AdapterParts) -> None:
        """Carry out the orders about adapters, in the thread that calls this."""
        while True:
            order, fd = self._receive()
            if isinstance(order, DropAdapter):
                adapters.drop(order.number)
                continue
            assert isinstance(order, LoadAdapter)
            fault: Exception | None = None
            try:
                with open(fd, "rb") as memory:
                    memory.seek(0)
                    adapters.load(order.number, pickle.load(memory))
            except Exception as error:
                log.exception("an adapter cannot be loaded")
                fault = ModelError(f"{self._name} of this node cannot load an adapter: {error!r}")
            with suppress(ConnectionError):  # this process is about to end
                self._connection.send(pickle.dumps(Ready(fault)))

    def _receive(self) -> tuple[object, int]:
        """Return a message, and its descriptor. Ends this process if the connection is closed."""
        written, fds = b"", [-1]
        with suppress(ConnectionError):
            written, fds, *_ = socket.recv_fds(self._connection, MAX_MESSAGE_BYTES, 1)
        if not written:
            sys.exit()
        return pickle.loads(written), fds[0] if fds else -1


class _RecordSender(QueueHandler):
    """Sends records to the first rank, which logs them in the format of the node."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        super().__init__(SimpleQueue())
        self._connection = connection
        self._prefix = f"{name}: "

    def enqueue(self, record: logging.LogRecord) -> None:
        record.msg = self._prefix + record.msg
        with suppress(ConnectionError):  # this process is about to end
            self._connection.send(pickle.dumps(record))


def _end_with(parent: int) -> None:
    """Have the kernel end this process with the thread that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        sys.exit()


def main() -> None:
    first = FirstRank.of_command_line()
    setup, links_fd = first.receive_setup()
    with first.carrying_out():
        follower = _load(setup, links_fd)
    begin, kv_fd = first.receive_begin()
    with first.carrying_out():
        follower.begin(begin.num_blocks, kv_fd)
    if follower.adapters is not None:
        loads = threading.Thread(
            target=first.load_adapters, args=[follower.adapters], name="adapters", daemon=True
        )
        loads.start()
    follower.run()


class Follower:
    """A rank's decoder, and its part of the KV cache."""

    def __init__(
        self,
        opened: OpenedModel,
        weights: LoadedWeights,
        links: RankLinks,
        adapters: AdapterTable | None,
    ) -> None:
        self.adapters = None if adapters is None else FollowedAdapters(adapters)
        self._opened = opened
        self._weights = weights
        self._links = links
        self._passes: ForwardPasses | None = None

    def begin(self, num_blocks: int, kv_fd: int) -> None:
        config, _, _, dtype, device, kernels, *_ = self._opened
        shape, state, _ = plan_memory(config, self._opened.cached_layers, dtype)
        kv = shape.over(map_shared_memory(kv_fd, num_blocks * shape.block_bytes))
        os.close(kv_fd)
        decoder = self._weights.decoder
        longest = self._opened.model.max_context_len()
        self._passes = ForwardPasses(
            decoder,
            Ropes(decoder.config, device.torch_device, dtype),
            kernels.make_attention(kv, self._weights.attention),
            None if state is None else kernels.make_linear_attention(kv, state),
            choose_max_model_len(config, longest),
            None if self.adapters is None else self.adapters.table,
        )

    def run(self) -> None:
        """Compute until the first rank ends."""
        with torch.inference_mode():
            while True:
                try:
                    self._compute(self._links.receive())
                except RunnerLost:
                    return
                except Exception:
                    log.exception("a pass failed")
                    sys.exit(1)

    def _compute(self, message: object) -> None:
        decoder, passes = self._weights.decoder, self._passes
        assert passes is not None
        match message:
            case ComputePass(step, media, grid, needs_all, sent):
                inputs = make_inputs(self._opened.device)
                inputs.begin()
                selection = None if self.adapters is None else self.adapters.select(sent)
                launch = passes.prepare(
                    step, inputs, None, selection, media, grid, needs_all=needs_all
                )
                inputs.send()
                launch()
                self._links.meet()
            case MultiplyHead(num_rows):
                assert isinstance(decoder, Decoder)
                shape = num_rows, decoder.config.hidden_size
                decoder.head(self._links.broadcast(torch.empty(shape, dtype=self._opened.dtype)))


def _load(setup: Setup, links_fd: int) -> Follower:
    config = setup.config
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    shard = shard_of(config, setup.rank)
    kernels = Kernels(library(best_variant(cpu_features())), torch.get_num_threads())
    memory = map_shared_memory(links_fd, links_bytes(kernels, shard.size))
    os.close(links_fd)
    links = RankLinks(kernels, memory, shard)
    source = sharded_source(links, lambda: None)
    opened = open_model(config, open_device, choose_parts, source)
    adapters = make_adapters(opened)
    active = None if adapters is None else adapters.active
    return Follower(opened, load_weights(opened, source, active=active), links, adapters)


if __name__ == "__main__":
    main()
