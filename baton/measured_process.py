"""Processes at the ends of a measured KV transfer, and the transports between them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from baton.core.errors import NamedError
from baton.kv_transfer.protocol.messages import Region
from baton.kv_transfer.transports.base import (
    Channel,
    ChannelBroken,
    ChannelEvent,
    Transport,
    UcxConfig,
    WriteFailed,
)
from baton.kv_transfer.transports.nixl import NixlTransport
from baton.kv_transfer.transports.ucxx import UcxxTransport

END_S = 5.0


class MeasurementFailed(NamedError):
    """A process of the measurement failed, ended or timed out."""


class MeasuredProcess:
    """Handle of a process that executes commands: their names and arguments, sent by a pipe."""

    def __init__(
        self, serve: Callable[..., None], *arguments: object, remaining_s: Callable[[], float]
    ) -> None:
        """`serve` gets the other end of the pipe and the arguments.

        `remaining_s` returns how long the next answer may take.
        """
        context = multiprocessing.get_context("spawn")
        self._pipe: Connection
        self._pipe, child_pipe = context.Pipe()
        self._remaining_s = remaining_s
        self._process = context.Process(target=serve, args=(child_pipe, *arguments), daemon=True)
        self._process.start()
        child_pipe.close()

    def send(self, command: str, *arguments: object) -> None:
        try:
            self._pipe.send((command, arguments))
        except OSError as error:
            raise MeasurementFailed(self._exit_message()) from error

    def receive(self) -> Any:
        """Return the next answer. An answer that is an exception is raised."""
        try:
            if not self._pipe.poll(self._remaining_s()):
                raise MeasurementFailed("a process of the measurement took too long")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise MeasurementFailed(self._exit_message()) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, command: str, *arguments: object) -> Any:
        self.send(command, *arguments)
        return self.receive()

    def close(self) -> None:
        """End the process. It is killed only if it hangs: UCX frees its shared memory at exit."""
        self._pipe.close()
        self._process.join(END_S)
        self._process.kill()
        self._process.join()

    def _exit_message(self) -> str:
        self._process.join(1)
        return f"a process of the measurement ended with code {self._process.exitcode}"


def open_transport(name: str, tls: str, region: Region) -> Transport:
    """Open NIXL or UCXX with this UCX_TLS; empty: UCX chooses."""
    devices = "lo" if tls.startswith("tcp") else ""
    if name == "nixl":
        return NixlTransport(region, UcxConfig(tls=tls, net_devices=devices))
    return UcxxTransport(region, UcxConfig(tls=f"{tls},self" if tls else "", net_devices=devices))


def poll_until(channel: Channel, awaited: ChannelEvent) -> None:
    """Poll until this event. Raises MeasurementFailed."""
    while True:
        for event in channel.poll():
            if event == awaited:
                return
            if isinstance(event, WriteFailed | ChannelBroken):
                raise MeasurementFailed(event.reason)
