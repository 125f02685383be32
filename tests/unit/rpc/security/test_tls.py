"""TLS files: accepted combinations, and errors for the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from baton.core.errors import InvalidConfig
from baton.rpc.channel import channel_credentials
from baton.rpc.security.certificates import grpc_credentials
from baton.rpc.security.tls import TlsConfig
from tests.support.certificates import Authority, lock_key, make_authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path)


def test_matching_certificate_files_are_accepted(authority: Authority) -> None:
    tls = authority.mutual("node", "localhost")

    assert (tls.listens, tls.dials) == (True, True)
    assert grpc_credentials(tls) is not None
    assert channel_credentials(tls) is not None


def test_certificate_files_deleted_after_loading_are_not_needed(authority: Authority) -> None:
    tls = authority.mutual("node", "localhost")

    for path in authority.folder.iterdir():
        path.unlink()

    assert grpc_credentials(tls) is not None
    assert channel_credentials(tls) is not None


def test_without_certificate_files_connections_are_plain_text() -> None:
    tls = TlsConfig()

    assert (tls.listens, tls.dials) == (False, False)
    assert channel_credentials(tls) is None


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda cert, key, ca: TlsConfig(cert=cert), "--tls-cert is given without --tls-key"),
        (lambda cert, key, ca: TlsConfig(key=key), "--tls-key is given without --tls-cert"),
        (lambda cert, key, ca: TlsConfig(client_ca=ca), "--tls-client-ca needs --tls-cert"),
        (lambda cert, key, ca: TlsConfig(server_name="n"), "--tls-server-name needs --tls-ca"),
        (lambda cert, key, ca: TlsConfig(ca=ca / "no"), "--tls-ca .*/no cannot be read"),
        (lambda cert, key, ca: TlsConfig(cert, key.parent), "--tls-key .* cannot be read"),
        (lambda cert, key, ca: TlsConfig(cert=ca, key=key), "is not the key of --tls-cert"),
        (lambda cert, key, ca: TlsConfig(cert=key, key=key), "hold no certificate with its key"),
        (lambda cert, key, ca: TlsConfig(ca=key), "--tls-ca .* holds no certificate"),
        (lambda cert, key, ca: TlsConfig(cert, key, ca, key), "--tls-client-ca .* holds no"),
    ],
)
def test_unusable_certificate_files_are_refused_with_the_option_name(
    authority: Authority, make: Callable[[Path, Path, Path], TlsConfig], reported: str
) -> None:
    cert, key = authority.issue("node", "localhost")

    with pytest.raises(InvalidConfig, match=reported):
        make(cert, key, authority.ca)


def test_an_encrypted_key_is_refused_without_a_password_prompt(
    authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("node", "localhost")
    locked = tmp_path / "locked.key"
    lock_key(key, locked, "secret")

    with pytest.raises(InvalidConfig, match="the key not encrypted"):
        TlsConfig(cert, locked)
