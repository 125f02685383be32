"""The life of the cluster that `baton up` starts: coming up, running, told to end."""

from __future__ import annotations

import queue
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

import typer

from baton.cli.show import console, table_of
from baton.cluster import Child, ClusterFailed, ClusterOptions, LocalCluster
from baton.interrupts import get_interruptibly
from baton.units import format_bytes
from baton.v1 import node_pb2, node_pb2_grpc
from engine.model_folder import resolve_model_folder
from serving.channel import open_blocking_channel
from serving.node import NodeCard, card_from
from serving.tls import TlsConfig

INTERRUPTED = 130
ENDING = (signal.SIGINT, signal.SIGTERM)


def run_cluster(options: ClusterOptions, num_processes: int) -> None:
    """Until it is told to end. Raises ClusterFailed and ModelError."""
    resolve_model_folder(options.model)  # downloaded once, before many would
    life = Life(options, num_processes)
    with life.listening():
        try:
            life.run()
        except ClusterFailed:
            if not life.is_told:
                raise
    if life.was_hurried or not life.is_up:
        raise typer.Exit(INTERRUPTED)


class Life:
    """One cluster between its start and its end, with the signals that it gets meanwhile."""

    def __init__(self, options: ClusterOptions, num_processes: int) -> None:
        self._options = replace(options, on_up=self._note_up, on_end=self._note_end)
        self._cluster = LocalCluster(self._options)
        self._num_processes = num_processes
        self._num_up = 0
        self._screen = console(stderr=True)
        self._status = self._screen.status("") if self._screen.is_terminal else None
        self.is_up = False
        # None: told to end. Simple queues may be put into by signal handlers.
        self._news: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self.is_told = False
        self.was_hurried = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """For the whole life: a signal never breaks off what is under way, it ends it in order."""
        before = {number: signal.signal(number, self._hear) for number in ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> None:
        with self._starting(), self._cluster_up() as cluster:
            if self._status is not None:
                self._status.stop()
            print(f"serving on {_where(cluster, self._options.tls)}; Ctrl-C ends", flush=True)
            self._screen.print(table_of("", _rows(cluster, self._options)))
            self._until_told(cluster)
            print("draining; Ctrl-C ends at once", file=sys.stderr)

    @contextmanager
    def _cluster_up(self) -> Iterator[LocalCluster]:
        with self._cluster as cluster:
            self.is_up = True
            yield cluster

    def _until_told(self, cluster: LocalCluster) -> None:
        """A cluster that cannot serve any more is over."""
        ended: set[str] = set()
        while (child := get_interruptibly(self._news)) is not None:
            ended.add(child.name)
            code = child.process.wait()
            if child is cluster.router or ended.issuperset(one.name for one in cluster.decodes):
                raise ClusterFailed(f"{child.name} ended with code {code}; nobody can serve")
            print(f"baton: {child.name} ended with code {code}", file=sys.stderr)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        """While it comes up there is nothing to drain, and a second time nothing is waited for."""
        self.was_hurried = self.is_told
        if self.is_told or not self.is_up:
            self._cluster.kill()
        self.is_told = True
        self._news.put(None)

    # --- coming up ----------------------------------------------------------------

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

    def _note_end(self, child: Child) -> None:
        if self.is_up and not self.is_told:
            self._news.put(child)

    def _show_progress(self) -> None:
        if self._status is not None:
            self._status.update(
                f"loading: {self._num_up} of {self._num_processes} processes are up"
            )


def _where(cluster: LocalCluster, tls: TlsConfig) -> str:
    if not cluster.router.http_address:
        return cluster.address
    scheme = "https" if tls.listens else "http"
    return f"{cluster.address} and {scheme}://{cluster.router.http_address}/v1"


def _rows(cluster: LocalCluster, options: ClusterOptions) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"process": "router", "pid": cluster.router.process.pid, "address": cluster.address}
    ]
    rows[0] |= {"model": options.model, "KV cache": "", "longest request": ""}
    for child in (*cluster.prefills, *cluster.decodes):
        card = _card_at(child.address, options.tls)
        num_tokens = card.num_blocks * card.fingerprint.block_size
        size = format_bytes(card.num_blocks * card.block_bytes)
        where = {"process": child.name, "pid": child.process.pid, "address": child.address}
        cache = {"KV cache": f"{size}, {num_tokens} tokens", "longest request": _longest(card)}
        rows.append({**where, "model": card.model, **cache})
    return rows


def _longest(card: NodeCard) -> str:
    if card.longest_sequence >= card.max_model_len:
        return f"{card.max_model_len} tokens"
    return f"{card.longest_sequence} of {card.max_model_len} tokens"


def _card_at(address: str, tls: TlsConfig) -> NodeCard:
    with open_blocking_channel(address, tls) as channel:
        stub = node_pb2_grpc.NodeServiceStub(channel)
        return card_from(stub.GetNode(node_pb2.GetNodeRequest(), wait_for_ready=True, timeout=30))
