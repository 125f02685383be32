"""UCXX, two-sided: P sends tagged messages, D receives them.

Bytes move by rendezvous only: P says that it has them, and D fetches them out of P's memory (CMA)
or asks P to send them (TCP). The one thing that arrives unasked is a message of one packet.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kv_transfer.errors import InvalidKvSetting, PeerUnreachable
from kv_transfer.messages import Region
from kv_transfer.staging import BlockRows, Staging
from kv_transfer.transport import ChannelEvent, Write
from kv_transfer.types import BlockId
from kv_transfer.ucxx_library import Ucxx
from kv_transfer.ucxx_receives import Receives
from kv_transfer.ucxx_sends import Sends

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)")
# Without these D would not be asked, or would be left with half a message when P goes away.
_PROTOCOLS = "^egr/multi/*,rndv/put/*,rndv/send/*"
_TCP_PACKET = "256k"
_MAX_ROUNDS = 64  # of receives in one poll
_MAX_IDLE_ROUNDS = 8  # in which none begins or ends: CMA fetches half a MiB in each
_NUM_LAST_LOOKS = 2000


@dataclass(frozen=True, slots=True)
class UcxxConfig:
    """UCX settings of this transport alone. An UCX_* variable of the environment goes first."""

    tls: str = ""  # such as "tcp" or "tcp,sm,self"; empty lets UCX choose
    net_devices: str = ""  # such as "lo" or "eth0"
    # From this size on a message waits with P until D asks for it. A larger message than a packet
    # of the transport does so at any rate.
    rendezvous_threshold_bytes: int = 8192

    def for_ucx(self) -> dict[str, str]:
        wanted = {
            "TLS": self.tls,
            "NET_DEVICES": self.net_devices,
            "RNDV_THRESH": str(self.rendezvous_threshold_bytes),
            "PROTOS": _PROTOCOLS,
            # Of what D asks P to send, in one packet: with UCX's own 8 and 64 KiB a third slower.
            "TCP_TX_SEG_SIZE": _TCP_PACKET,
            "TCP_RX_SEG_SIZE": _TCP_PACKET,
        }
        if not _is_set("RCACHE_ENABLE"):
            # Lets UCX fetch by CMA where a peer's end must be told. What it promises, that no one
            # reads P's memory once P has closed, CMA cannot keep: D may read on, in vain, until
            # it is told. Without the cache UCX 1.21 crashes as it ends a fetch (UCX PR 11714).
            wanted |= {"RCACHE_ENABLE": "y", "CMA_MEMORY_INVALIDATE": "y"}
        return {name: value for name, value in wanted.items() if value and not _is_set(name)}


class UcxxTransport:
    """One UCX context; a worker per pair."""

    name = "ucxx"
    is_one_sided = False

    def __init__(self, region: Region, config: UcxxConfig = UcxxConfig()) -> None:
        if region.device != "cpu":
            raise InvalidKvSetting(
                f"the ucxx transport moves CPU memory, not {region.device}: use nixl"
            )
        self._ucxx = ucxx = Ucxx()
        self._region = region
        self._staging = Staging()
        try:
            self._context = ucxx.module.UCXContext(config.for_ucx(), (ucxx.module.Feature.TAG,))
        except ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot start: {error!r}") from error

    def open(self) -> UcxxChannel:
        try:
            worker = self._ucxx.module.UCXWorker(self._context)
            return UcxxChannel(self._ucxx, worker, self._region, self._staging)
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot make a worker: {error!r}") from error

    @property
    def ways(self) -> list[str]:
        """What UCX has here, by transport and device: tcp/eth0, cma/memory."""
        return list(dict.fromkeys(_RESOURCE.findall(self._context.info)))

    def close(self) -> None:
        self._context = None


class UcxxChannel:
    """One worker, at most one peer."""

    def __init__(self, ucxx: Ucxx, worker: Any, region: Region, staging: Staging) -> None:
        self._ucxx = ucxx
        self._worker = worker
        self._metadata: bytes = worker.address.tobytes()
        self._endpoint: Any = None
        rows = BlockRows(region)
        self._receives = Receives(ucxx, worker, region, rows, staging)
        self._sends = Sends(ucxx, region, rows, staging)

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """D sends nothing, but an endpoint is what can be closed by force."""
        if not metadata:
            raise PeerUnreachable("the peer did not say how to reach it")
        try:
            address = self._ucxx.module.UCXAddress.create_from_buffer(metadata)
            self._endpoint = self._ucxx.module.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX has no way to the peer: {error!r}") from error
        self._sends.connect(self._endpoint, region)

    @property
    def close_stops_writes(self) -> bool:
        return True

    def is_peer_gone(self) -> bool:
        return False  # nobody needs to know: closing is enough

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._receives.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self._receives.cancel(ticket)

    def post(self, write: Write) -> None:
        self._sends.post(write)

    def notify(self, ticket: int, note: bytes) -> None:
        """D counts what comes and needs no notice."""

    def poll(self) -> list[ChannelEvent]:
        num_idle = 0
        for _ in range(_MAX_ROUNDS):
            self._worker.progress()
            is_moving = self._receives.look() + self._receives.take_messages() > 0
            num_idle = 0 if is_moving else num_idle + 1
            if not self._receives.is_filling or num_idle == _MAX_IDLE_ROUNDS:
                break
        return [*self._receives.take_events(), *self._sends.look()]

    def close(self) -> None:
        """By force, and before the worker goes.

        UCXX takes what has come from a worker that it destroys, and waits for the rest of it
        without end. Once the path to the peer is closed there is no rest to wait for.
        """
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=0, max_attempts=1)
        for _ in range(_NUM_LAST_LOOKS):
            self._worker.progress_once()
            if all(request.completed for request in self._under_way()):
                break
        self._receives.close()
        self._sends.close()
        self._endpoint = self._worker = None

    def _under_way(self) -> Iterator[Any]:
        """Requests that hold on to the worker, and the worker to them, until they have ended."""
        yield from self._sends.under_way()
        yield from self._receives.under_way()


def _is_set(name: str) -> bool:
    return f"UCX_{name}" in os.environ
