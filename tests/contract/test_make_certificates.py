"""Certificates of tools/make_certificates.sh match the names used by Compose and Kubernetes."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from baton.client import AsyncClient, BatonError
from baton.rpc.security.tls import TlsConfig
from tests.support.routers import a_router

PATIENCE_S = 30
SCRIPT = Path(__file__).parents[2] / "tools/make_certificates.sh"

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run([SCRIPT, folder, "llm.example"], check=True, capture_output=True)
    return folder


def identity(made: Path, role: str) -> TlsConfig:
    """Return the TLS settings of a cluster process."""
    ca = made / "ca.crt"
    return TlsConfig(made / f"{role}.crt", made / f"{role}.key", ca, None, "node.baton")


async def model_of(server: TlsConfig, client: TlsConfig) -> str:
    async with (
        a_router(tls=server) as (_, address),
        AsyncClient(address, tls=client, timeout_s=PATIENCE_S) as asking,
    ):
        return (await asking.model()).name


@pytest.mark.parametrize("name", ["", "localhost", "router", "router.baton.svc", "llm.example"])
def test_clients_verify_the_router_under_all_its_names(made: Path, name: str) -> None:
    client = TlsConfig(ca=made / "ca.crt", server_name=name)

    assert asyncio.run(model_of(identity(made, "router"), client)) == "tiny"


@pytest.mark.parametrize("role", ["router", "node"])
def test_nodes_accept_the_certificates_of_routers_and_other_nodes(made: Path, role: str) -> None:
    node = replace(identity(made, "node"), client_ca=made / "ca.crt")

    assert asyncio.run(model_of(node, identity(made, role))) == "tiny"


def test_nodes_refuse_clients_without_a_certificate(made: Path) -> None:
    node = replace(identity(made, "node"), client_ca=made / "ca.crt")
    client = TlsConfig(ca=made / "ca.crt", server_name="node.baton")

    with pytest.raises(BatonError) as refusal:
        asyncio.run(model_of(node, client))

    assert "if it wants a client certificate, give --tls-cert" in refusal.value.message


def test_keys_are_readable_by_their_owner_only(made: Path) -> None:
    keys = sorted(made.glob("*.key"))

    assert [key.name for key in keys] == ["ca.key", "node.key", "router.key"]
    assert {key.stat().st_mode & 0o077 for key in keys} == {0}
    assert not list(made.glob("*.csr")) + list(made.glob("*.ext"))
