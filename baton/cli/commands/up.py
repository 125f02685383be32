"""Life cycle of the cluster that `baton up` starts: starting, running, draining."""

from __future__ import annotations

import queue
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import typer

from baton.checkpoint.hub import open_checkpoint
from baton.cli.commands.curl_example import FirstRequest, curl_example, first_request
from baton.cli.commands.node_restarts import NodeRestarts
from baton.cli.show import console, table_of
from baton.cluster import Child, ClusterFailed, ClusterOptions, LocalCluster
from baton.core.errors import ModelError
from baton.core.units import format_bytes
from baton.engine.runner.config import RunnerConfig
from baton.engine.runner.open_runner import read_any_config
from baton.fork_server import ForkServer
from baton.interrupts import get_interruptibly
from baton.kernels import build_missing_kernels
from baton.rpc.channel import open_blocking_channel
from baton.rpc.node_info import GET_NODE, NodeCard, card_from
from baton.rpc.process_end import exit_on_sigterm
from baton.rpc.security.tls import TlsConfig
from baton.v1 import node_pb2_grpc

INTERRUPTED = 130
ENDING = (signal.SIGINT, signal.SIGTERM)
JOINED = re.compile(r"node (\S+) joined from ")  # in the log of the router
LOADED = re.compile(r"loaded \d+ % of the weights")  # in the logs of nodes


def run_cluster(
    options: ClusterOptions,
    model: RunnerConfig,
    embedders: Sequence[RunnerConfig] = (),
    *,
    forks: ForkServer,
    restarts: bool,
    token_file: Path | None,
) -> None:
    """Run the cluster until a signal ends it. Raises ClusterFailed and ModelError."""
    exit_on_sigterm()
    request = _prepare(model, must_embed=False)
    for each in embedders:
        _prepare(each, must_embed=True)
    runner = ClusterRunner(
        options,
        forks,
        restarts=restarts,
        example_for=partial(
            curl_example,
            tls=options.tls,
            token_file=token_file,
            request=request,
        ),
    )
    with runner.listening():
        try:
            runner.run()
        except ClusterFailed:
            if not runner.is_ending:
                raise
    if runner.was_interrupted_again or not runner.is_up:
        raise typer.Exit(INTERRUPTED)


def _prepare(model: RunnerConfig, *, must_embed: bool) -> FirstRequest:
    """Download and check a model, once, before every process would. Raises ModelError.

    Returns a request that the model can serve.
    """
    checkpoint = open_checkpoint(model.model, mmproj=model.mmproj)
    config = read_any_config(checkpoint)
    if must_embed and not (
        config.num_labels or model.pooling != "auto" or checkpoint.read_pooling()
    ):
        raise ModelError(
            f"--embed {model.model}: the folder names no pooling; give --pooling last, mean or "
            "cls, or a folder of sentence-transformers (modules.json) or of a classifier"
        )
    build_missing_kernels(model, checkpoint, partial(console, stderr=True))
    return first_request(
        generates=config.can_generate,
        num_labels=config.num_labels,
        has_chat_template=bool(checkpoint.read_chat_templates()),
    )


class ClusterRunner:
    """One cluster from start to end, with its signal handlers."""

    def __init__(
        self,
        options: ClusterOptions,
        forks: ForkServer,
        *,
        restarts: bool,
        example_for: Callable[[str], str],
    ) -> None:
        """`example_for` returns a first request to an address of HTTP, for a shell."""
        self._options = replace(
            options, on_up=self._note_up, on_end=self._note_end, on_line=self._note_line
        )
        self._cluster = LocalCluster(self._options, forks)
        self._example_for = example_for
        self._num_processes = options.num_nodes + 1
        self._num_up = 0
        self._screen = console(stderr=True)
        self._status = self._screen.status("") if self._screen.is_terminal else None
        self.is_up = False
        # Calls on the main thread, of other threads. None: a signal asks for the end. Signal
        # handlers may put into a SimpleQueue.
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._restarts = NodeRestarts(self._cluster, self._events.put) if restarts else None
        self._lost: set[str] = set()  # names of nodes that ended and are not restarted
        self._joined: set[str] = set()  # names of nodes that the router can use
        self._is_announced = False
        self.is_ending = False
        self.was_interrupted_again = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals by an orderly end instead of an exception."""
        before = {number: signal.signal(number, self._on_signal) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        with self._starting(), self._cluster_up() as cluster:
            if self._status is not None:
                self._status.stop()
            self._screen.print(table_of("", _rows(cluster, self._options)))
            self._is_announced = True
            print(self._announcement(), flush=True)
            self._run_until_signal()
            print("draining; Ctrl-C ends at once", file=sys.stderr)

    @contextmanager
    def _cluster_up(self) -> Iterator[LocalCluster]:
        with self._cluster as cluster:
            self.is_up = True
            yield cluster

    def _run_until_signal(self) -> None:
        """Wait for a signal. Raises ClusterFailed if the remaining processes cannot serve."""
        while (event := get_interruptibly(self._events)) is not None:
            if not self.is_ending:  # a node that dies now is not restarted
                event()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Drain; kill at once during start-up and on a second signal."""
        self.was_interrupted_again = self.is_ending
        if self.is_ending or not self.is_up:
            self._cluster.kill()
        self.is_ending = True
        if self._restarts is not None:
            self._restarts.end()
        self._events.put(None)

    # --- running ---------------------------------------------------------------

    def _note_end(self, child: Child) -> None:
        if not self.is_ending:
            self._events.put(partial(self._on_end, child))

    def _on_end(self, child: Child) -> None:
        """Restart a node that died, or report that it is lost."""
        code = child.process.wait()
        what = child.end_message(code)
        self._joined.discard(child.name)
        if child is self._cluster.router:
            raise ClusterFailed(f"{what}; the cluster cannot serve without it")
        if self._restarts is None:
            advice = "--restart would restart it"
        else:
            advice, is_restarted = self._restarts.plan(child, code)
            if is_restarted:
                _report(f"{what}; {advice}")
                return
        self._lost.add(child.name)
        if self._lost.issuperset(one.name for one in self._cluster.decodes):
            raise ClusterFailed(f"{what}; the cluster cannot serve without it ({advice})")
        _report(f"{what}; {advice}{self._loss(child)}")

    def _loss(self, child: Child) -> str:
        """Describe the loss of a node as a clause."""
        if child in self._cluster.embedders:
            return "; requests for its model fail, unless another node serves it"
        prefills = self._cluster.prefills
        if child in prefills and self._lost.issuperset(one.name for one in prefills):
            return "; no prefill node is left: decode nodes compute the prompts, which is slower"
        return ""

    def _note_line(self, child: Child, line: str) -> None:
        """Show progress, and again where the cluster serves, below lines about late nodes."""
        loaded = LOADED.search(line)
        if loaded is not None and not self.is_up:
            self._show_progress(f"; {child.name} has {loaded[0]}")
        found = JOINED.search(line) if child.name == "router" else None
        if found is not None:
            self._joined.add(found[1])
            is_last = self._joined.issuperset(one.name for one in self._cluster.nodes)
            if self._is_announced and is_last and self._screen.is_terminal:
                self._events.put(self._announce_again)

    def _announce_again(self) -> None:
        self._screen.print(self._announcement(), highlight=False, soft_wrap=True)

    def _announcement(self) -> str:
        where = f"serving on {_where(self._cluster, self._options.tls)}; Ctrl-C ends"
        http_address = self._cluster.router.http_address
        return f"{where}\n{self._example_for(http_address)}" if http_address else where

    # --- start-up --------------------------------------------------------------

    @contextmanager
    def _starting(self) -> Iterator[None]:
        if self._status is None:
            print(f"starting {self._num_processes} processes", file=sys.stderr)
            yield
            return
        with self._status:
            self._show_progress()
            yield

    def _note_up(self, child: Child) -> None:
        self._num_up += 1
        if self._status is None:
            print(f"{child.name} listens on {child.address}", file=sys.stderr)
        else:
            self._show_progress()

    def _show_progress(self, detail: str = "") -> None:
        if self._status is not None:
            self._status.update(
                f"loading: {self._num_up} of {self._num_processes} processes are up{detail}"
            )


def _report(message: str) -> None:
    print(f"baton: {message}", file=sys.stderr)


def _where(cluster: LocalCluster, tls: TlsConfig) -> str:
    if not cluster.router.http_address:
        return cluster.address
    scheme = "https" if tls.listens else "http"
    return f"{cluster.address} and {scheme}://{cluster.router.http_address}/v1"


def _rows(cluster: LocalCluster, options: ClusterOptions) -> list[dict[str, object]]:
    cards = [(child, _card_at(child.address, options.tls)) for child in cluster.nodes]
    models = ", ".join(sorted({card.model for _, card in cards}))
    router = {"process": "router", "pid": cluster.router.process.pid, "address": cluster.address}
    rows: list[dict[str, object]] = [
        {**router, "model": models, "KV cache": "", "longest request": ""}
    ]
    for child, card in cards:
        num_tokens = card.num_blocks * card.fingerprint.layout.block_size
        size = f"{format_bytes(card.num_blocks * card.block_bytes)}, {num_tokens} tokens"
        where = {"process": child.name, "pid": child.process.pid, "address": child.address}
        kv_cache = size if card.num_blocks else "none"
        cache = {"KV cache": kv_cache, "longest request": _longest(card)}
        rows.append({**where, "model": card.model, **cache})
    return rows


def _longest(card: NodeCard) -> str:
    if card.max_sequence_length >= card.max_model_len:
        return f"{card.max_model_len} tokens"
    return f"{card.max_sequence_length} of {card.max_model_len} tokens"


def _card_at(address: str, tls: TlsConfig) -> NodeCard:
    with open_blocking_channel(address, tls) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        return card_from(stub.GetNode(GET_NODE, wait_for_ready=True, timeout=30))
