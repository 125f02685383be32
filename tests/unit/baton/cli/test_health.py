"""`baton health` against a real server, in this process and as a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from baton.rpc.server import Running, serving
from tests.support.baton_command import call_baton

PATIENCE_S = 60
UNUSED_ADDRESS = "127.0.0.1:1"  # a port that only root can bind


async def health_of(address: str, *options: str) -> tuple[int, str]:
    """Return the exit code and all output of the command in this process."""
    ended = await asyncio.to_thread(call_baton, "health", address, *options, "--timeout", "30")
    return ended.returncode, ended.stdout + ended.stderr


async def health_of_a_process(
    address: str, *, python_options: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Return the exit code and all output of a real process."""
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            *python_options,
            "-m",
            "baton",
            "health",
            address,
            "--timeout",
            "30",
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    code = process.returncode
    assert code is not None
    return code, output.decode()


@asynccontextmanager
async def a_server(*, is_ready: bool) -> AsyncIterator[Running]:
    async with serving("127.0.0.1", 0, ()) as server:
        await server.health.set_ready(is_ready)
        yield server


def test_health_of_a_ready_server_exits_with_0() -> None:
    async def scenario() -> None:
        async with a_server(is_ready=True) as server:
            code, output = await health_of_a_process(server.address)
        assert (code, output) == (0, f"{server.address} is serving\n")

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_health_of_a_server_that_is_not_ready_exits_with_1() -> None:
    async def scenario() -> None:
        async with a_server(is_ready=False) as server:
            code, output = await health_of(server.address)
        assert code == 1  # Docker reserves 2
        assert "is not ready: NOT_SERVING" in output

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_the_liveness_probe_of_a_server_that_is_not_ready_succeeds() -> None:
    async def scenario() -> None:
        async with a_server(is_ready=False) as server:
            assert (await health_of(server.address, "--live"))[0] == 0
            server.health.is_alive = False
            code, output = await health_of(server.address, "--live")
        assert code == 1
        assert "is not alive: NOT_SERVING" in output

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_health_of_an_address_without_a_server_exits_with_1() -> None:
    code, output = asyncio.run(asyncio.wait_for(health_of(UNUSED_ADDRESS), PATIENCE_S))

    assert code == 1
    assert f"{UNUSED_ADDRESS} did not answer: UNAVAILABLE: connection refused\n" in output


def test_the_health_command_does_not_import_torch() -> None:
    async def scenario() -> None:
        async with a_server(is_ready=True) as server:
            _, output = await health_of_a_process(
                server.address, python_options=("-X", "importtime")
            )
        loaded = {line.rpartition("|")[2].strip() for line in output.splitlines()}
        assert "baton.cli.health_check" in loaded
        assert not loaded & {"torch", "numpy", "tokenizers", "nixl_cu13"}

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))
