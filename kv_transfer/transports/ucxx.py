"""UCXX transport, two-sided: P sends tagged messages, D receives them.

Messages use UCX's rendezvous protocol: P announces a message, then D reads it from P's memory
(CMA) or requests it (TCP). Only messages of a single packet arrive without a request.
"""

from __future__ import annotations

import os
import re
from typing import Any

from baton.core.errors import InvalidConfig
from baton.core.ids import BlockId
from baton.kv_transfer.errors import PeerUnreachable
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import ChannelEvent, UcxConfig, Write
from baton.kv_transfer.transports.staging import Staging
from baton.kv_transfer.transports.ucxx_library import Ucxx
from baton.kv_transfer.transports.ucxx_receives import UcxxReceives
from baton.kv_transfer.transports.ucxx_sends import UcxxSends

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(\S+)")
# Excluded: protocols that send without D's request, or leave half a message if P disconnects.
_PROTOCOLS = "^egr/multi/*,rndv/put/*,rndv/send/*"
_TCP_PACKET = "256k"
_MIN_RENDEZVOUS_BYTES = 8192  # messages larger than a packet always use rendezvous
_MAX_ROUNDS = 64  # progress calls per poll
_MAX_IDLE_ROUNDS = 8  # without a receive that begins or ends; CMA fetches 512 KiB in each
_MAX_CLOSE_ROUNDS = 2000


class UcxxTransport:
    """One UCX context, with one worker per pair."""

    name = "ucxx"
    is_one_sided = False
    moves_device_memory = False

    def __init__(self, region: Region, config: UcxConfig) -> None:
        if region.device != "cpu":
            raise InvalidConfig(
                f"the ucxx transport supports CPU memory only, not {region.device}; use nixl"
            )
        self._ucxx = ucxx = Ucxx()
        self._region = region
        self._staging = Staging()
        try:
            self._context = ucxx.module.UCXContext(
                _ucx_settings(config), (ucxx.module.Feature.TAG,)
            )
        except ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot start: {error!r}") from error

    def open(self) -> UcxxChannel:
        try:
            worker = self._ucxx.module.UCXWorker(self._context)
            return UcxxChannel(self._ucxx, worker, self._region, self._staging)
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot create a worker: {error!r}") from error

    @property
    def ways(self) -> list[str]:
        """UCX resources on this machine, as transport/device: tcp/eth0, cma/memory."""
        return list(dict.fromkeys(_RESOURCE.findall(self._context.info)))

    def close(self) -> None:
        self._context = None


class UcxxChannel:
    """Channel with its own UCX worker and at most one peer."""

    def __init__(self, ucxx: Ucxx, worker: Any, region: Region, staging: Staging) -> None:
        self._ucxx = ucxx
        self._worker = worker
        self._metadata: bytes = worker.address.tobytes()
        self._endpoint: Any = None
        self._staging = staging
        self._receives = UcxxReceives(ucxx, worker, region, staging)
        self._sends = UcxxSends(ucxx, region, staging)

    @property
    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, metadata: bytes, region: Region) -> None:
        """Create the endpoint. D sends nothing, but needs an endpoint to force the path closed."""
        if not metadata:
            raise PeerUnreachable("the peer sent no connection data")
        try:
            address = self._ucxx.module.UCXAddress.create_from_buffer(metadata)
            self._endpoint = self._ucxx.module.UCXEndpoint.create_from_worker_address(
                self._worker, address, endpoint_error_handling=True
            )
        except self._ucxx.error as error:
            raise PeerUnreachable(f"UCX cannot reach the peer: {error!r}") from error
        self._sends.connect(self._endpoint, region)

    def receive_into(self, region: Region) -> None:
        self._receives = UcxxReceives(self._ucxx, self._worker, region, self._staging)

    @property
    def close_stops_writes(self) -> bool:
        return True

    def is_peer_gone(self) -> bool:
        return False  # not needed: `close` stops all writes

    def expect(self, ticket: int, block_ids: tuple[BlockId, ...]) -> None:
        self._receives.expect(ticket, block_ids)

    def cancel(self, ticket: int) -> None:
        self._receives.cancel(ticket)

    def post(self, write: Write) -> None:
        self._sends.post(write)

    def notify(self, ticket: int, note: bytes) -> None:
        """No-op: D counts the received bytes itself."""

    def poll(self) -> list[ChannelEvent]:
        num_idle = 0
        for _ in range(_MAX_ROUNDS):
            self._worker.progress()
            is_moving = self._receives.look() + self._receives.take_messages() > 0
            num_idle = 0 if is_moving else num_idle + 1
            if not self._receives.is_receiving or num_idle == _MAX_IDLE_ROUNDS:
                break
        return [*self._receives.take_events(), *self._sends.look()]

    def close(self) -> None:
        """Force the endpoint closed before the worker is destroyed.

        When UCXX destroys a worker, it receives pending messages and waits for their rest
        indefinitely. Once the endpoint is closed, there is nothing left to wait for.
        """
        if self._worker is None:
            return
        if self._endpoint is not None:
            self._endpoint.close_blocking(period=0, max_attempts=1)
        for _ in range(_MAX_CLOSE_ROUNDS):
            self._worker.progress_once()
            # Until they complete, requests and the worker reference each other.
            under_way = (*self._sends.under_way(), *self._receives.under_way())
            if all(request.completed for request in under_way):
                break
        self._receives.close()
        self._sends.close()
        self._endpoint = self._worker = None


def _is_set(name: str) -> bool:
    return f"UCX_{name}" in os.environ


def _ucx_settings(config: UcxConfig) -> dict[str, str]:
    wanted = {
        "TLS": config.tls,
        "NET_DEVICES": config.net_devices,
        "RNDV_THRESH": str(_MIN_RENDEZVOUS_BYTES),
        "PROTOS": _PROTOCOLS,
        # Packet size of the data that D requests; UCX's 8 and 64 KiB are a third slower.
        "TCP_TX_SEG_SIZE": _TCP_PACKET,
        "TCP_RX_SEG_SIZE": _TCP_PACKET,
    }
    if not _is_set("RCACHE_ENABLE"):
        # Enables CMA fetches on endpoints with error handling. The option promises that nobody
        # reads P's memory once P has closed, which CMA cannot guarantee: until D is notified
        # it may continue to read, and discards the data. Without the registration cache,
        # UCX 1.21 crashes at the end of a fetch (UCX PR 11714).
        wanted |= {"RCACHE_ENABLE": "y", "CMA_MEMORY_INVALIDATE": "y"}
    return {name: value for name, value in wanted.items() if value and not _is_set(name)}
