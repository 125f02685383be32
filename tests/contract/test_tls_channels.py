"""TLS channels: every combination of secured and plain servers and clients."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from baton.client import AsyncClient, BatonError, Client
from baton.cluster import ClusterFailed, await_serving
from baton.core.errors import InvalidConfig
from baton.rpc.security.tls import PLAIN, TlsConfig
from tests.support.certificates import Authority, make_authority
from tests.support.routers import a_router

PATIENCE_S = 30
EXPIRED_FOR = timedelta(hours=1)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("theirs"), "stranger")


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> TlsConfig:
    return authority.mutual("both", "127.0.0.1", "localhost")


def model_at(address: str, tls: TlsConfig) -> str:
    with Client(address, tls=tls, timeout_s=PATIENCE_S) as client:
        return client.model().name


async def model_over(server: TlsConfig, client: TlsConfig, host: str = "") -> str:
    """Return the model's name, requested by both kinds of client."""
    async with a_router(tls=server) as (_, address):
        address = address.replace("127.0.0.1", host) if host else address
        await asyncio.to_thread(await_serving, address, PATIENCE_S, client)
        async with AsyncClient(address, tls=client, timeout_s=PATIENCE_S) as other:
            name = (await other.model()).name
        assert await asyncio.to_thread(model_at, address, client) == name
    return name


@pytest.mark.parametrize("host", ["", "localhost", "dns:///localhost"])
def test_mutual_tls_connects_with_certificates_on_both_sides(mutual: TlsConfig, host: str) -> None:
    assert asyncio.run(model_over(mutual, mutual, host)) == "tiny"


def test_a_server_without_client_certificates_requires_only_the_authority(
    mutual: TlsConfig, authority: Authority
) -> None:
    server = replace(mutual, client_ca=None)

    assert asyncio.run(model_over(server, TlsConfig(ca=authority.ca))) == "tiny"


def test_a_certificate_for_another_name_is_accepted_with_that_server_name(
    authority: Authority,
) -> None:
    cert, key = authority.issue("elsewhere", "router.example")
    named = TlsConfig(ca=authority.ca, server_name="router.example")

    assert asyncio.run(model_over(TlsConfig(cert, key), named)) == "tiny"


def refusals(server: TlsConfig, client: TlsConfig) -> set[tuple[grpc.StatusCode, str, str]]:
    """Return the errors of both kinds of client; the health check must report the same."""

    def blocking(address: str) -> BatonError:
        with pytest.raises(BatonError) as refusal:
            model_at(address, client)
        with pytest.raises(ClusterFailed) as unhealthy:
            await_serving(address, PATIENCE_S, client)
        assert refusal.value.message in str(unhealthy.value)
        return refusal.value

    async def scenario() -> list[BatonError]:
        async with a_router(tls=server) as (router, address):
            async with AsyncClient(address, tls=client, timeout_s=PATIENCE_S) as other:
                with pytest.raises(BatonError) as refusal:
                    await other.generate((1, 2))
            reported = await asyncio.to_thread(blocking, address)
            assert router.num_asked == 0
        return [refusal.value, reported]

    errors = asyncio.run(scenario())
    return {(one.code, one.reason, one.message.partition(" ")[2]) for one in errors}


def the_refusal(server: TlsConfig, client: TlsConfig, reason: str = "TLS_FAILED") -> str:
    [(code, found, message)] = refusals(server, client)
    assert (code, found) == (grpc.StatusCode.UNAVAILABLE, reason)
    return message


def the_closed_connection(server: TlsConfig, client: TlsConfig) -> str:
    """Return the text for a connection that the server closed, which does not say why."""
    message = the_refusal(server, client, "UNREACHABLE")
    assert "closed the connection" in message
    return message


def test_a_plain_text_client_of_a_tls_server_gets_the_advice_to_use_tls(mutual: TlsConfig) -> None:
    for server in (mutual, replace(mutual, client_ca=None)):
        reported = the_closed_connection(server, PLAIN)
        assert "if it speaks TLS only, give --tls-ca" in reported


def test_a_tls_client_of_a_plain_text_server_gets_the_advice_to_use_no_tls(
    authority: Authority,
) -> None:
    reported = the_refusal(PLAIN, TlsConfig(ca=authority.ca))

    assert "does not speak TLS; leave --tls-ca out" in reported


def test_a_client_with_another_authority_gets_the_missing_authority(
    mutual: TlsConfig, stranger: Authority
) -> None:
    reported = the_refusal(mutual, replace(mutual, ca=stranger.ca))

    assert f"is not signed by an authority in --tls-ca {stranger.ca}" in reported


def test_a_client_without_a_certificate_gets_the_advice_to_present_one(
    mutual: TlsConfig, authority: Authority
) -> None:
    reported = the_closed_connection(mutual, TlsConfig(ca=authority.ca))

    assert "if it wants a client certificate, give --tls-cert and --tls-key" in reported


def test_a_client_with_an_untrusted_certificate_gets_the_possible_reason(
    mutual: TlsConfig, authority: Authority, stranger: Authority
) -> None:
    cert, key = stranger.issue("client", "client.example")

    reported = the_closed_connection(mutual, TlsConfig(cert, key, authority.ca))

    assert f"{cert} must be signed by an authority of its --tls-client-ca" in reported


def test_a_certificate_for_another_host_is_reported_with_the_remedy(
    authority: Authority,
) -> None:
    cert, key = authority.issue("elsewhere", "router.example")

    reported = the_refusal(TlsConfig(cert, key), TlsConfig(ca=authority.ca))

    assert "is not for that host" in reported
    assert "--tls-server-name" in reported


def test_an_expired_certificate_is_reported(authority: Authority) -> None:
    cert, key = authority.issue("expired", "127.0.0.1", lifetime=-EXPIRED_FOR)

    assert "has expired" in the_refusal(TlsConfig(cert, key), TlsConfig(ca=authority.ca))


def test_an_address_without_a_server_gives_no_advice_about_tls(mutual: TlsConfig) -> None:
    async def scenario() -> BatonError:
        async with a_router() as (_, address):
            pass  # the port is free again
        async with AsyncClient(address, tls=mutual, timeout_s=PATIENCE_S) as client:
            with pytest.raises(BatonError) as refusal:
                await client.model()
        return refusal.value

    refusal = asyncio.run(scenario())

    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "UNREACHABLE")


def test_a_client_certificate_without_an_authority_is_refused(
    authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("client", "client.example")

    with pytest.raises(InvalidConfig, match=r"tls\.ca"):
        Client("127.0.0.1:1", tls=TlsConfig(cert, key))


def test_a_renewed_certificate_is_used_for_new_connections(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """Covers a secret of the cluster that is renewed while the process runs."""
    trusting = TlsConfig(ca=authority.ca)
    old_cert, old_key = authority.issue("old", "old.example")
    new_cert, new_key = authority.issue("new", "new.example")
    shown, key = authority.folder / "shown.pem", authority.folder / "shown.key"

    def put(source_cert: Path, source_key: Path) -> None:
        shown.write_bytes(source_cert.read_bytes())
        key.write_bytes(source_key.read_bytes())

    async def scenario() -> None:
        put(old_cert, old_key)
        by_name = {
            name: replace(trusting, server_name=f"{name}.example") for name in ("old", "new")
        }
        async with (
            a_router(tls=TlsConfig(shown, key)) as (_, address),
            AsyncClient(address, tls=by_name["old"], timeout_s=PATIENCE_S) as early,
        ):
            assert (await early.model()).name == "tiny"
            put(new_cert, old_key)  # half of the change
            assert await asyncio.to_thread(model_at, address, by_name["old"]) == "tiny"
            assert "the old certificate stays in use" in caplog.text
            put(new_cert, new_key)
            assert await asyncio.to_thread(model_at, address, by_name["new"]) == "tiny"
            with pytest.raises(BatonError, match=r"old\.example"):
                await asyncio.to_thread(model_at, address, by_name["old"])
            assert (await early.model()).name == "tiny"  # by the connection that it has

    asyncio.run(scenario())
