"""TLS configuration of one process: its certificate and the authorities that it trusts.

The options have the same meaning for every process and client. With `cert` and `key`, the process
listens by TLS and also presents the certificate to servers that it dials. With `ca`, it dials by
TLS and trusts certificates signed by these authorities. With `client_ca`, it serves only clients
with a certificate signed by these authorities. TLS does not encrypt KV data, which is sent by UCX.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from baton.core.errors import InvalidConfig
from baton.core.options import SECURITY, Option


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """PEM files, read and validated at construction. Raises InvalidConfig."""

    cert: Annotated[  # followed by its intermediates
        Path | None, Option("PEM file: certificate of this process.", SECURITY, name="tls_cert")
    ] = None
    key: Annotated[  # not encrypted
        Path | None, Option("PEM file: private key of --tls-cert.", SECURITY, name="tls_key")
    ] = None
    ca: Annotated[  # None: dials in plain text
        Path | None,
        Option(
            "PEM file: trusted authorities; enables TLS for outgoing connections.",
            SECURITY,
            name="tls_ca",
        ),
    ] = None
    client_ca: Annotated[  # None: serves clients without certificates
        Path | None,
        Option(
            "PEM file: authorities of client certificates; enables mutual TLS.",
            SECURITY,
            name="tls_client_ca",
        ),
    ] = None
    server_name: Annotated[
        str,
        Option(
            "Server name to expect in certificates, if it is not the host.",
            SECURITY,
            name="tls_server_name",
        ),
    ] = ""
    # Cached, so that a file that is replaced or removed later does not break new channels.
    _pem_by_path: Mapping[Path, bytes] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_combinations()
        object.__setattr__(self, "_pem_by_path", dict(self._read_files()))
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        for name, path in (("ca", self.ca), ("client-ca", self.client_ca)):
            if path is not None:
                _check_authorities(name, path)

    def pem(self, path: Path) -> bytes:
        """Return the cached content of one of the files."""
        return self._pem_by_path[path]

    @property
    def listens(self) -> bool:
        return self.cert is not None

    @property
    def dials(self) -> bool:
        return self.ca is not None

    def _read_files(self) -> Iterator[tuple[Path, bytes]]:
        files = {"cert": self.cert, "key": self.key, "ca": self.ca, "client-ca": self.client_ca}
        for name, path in files.items():
            if path is not None:
                yield path, _read(name, path)

    def _check_combinations(self) -> None:
        if (self.cert is None) != (self.key is None):
            present, missing = ("cert", "key") if self.key is None else ("key", "cert")
            raise InvalidConfig(f"--tls-{present} is given without --tls-{missing}; give both")
        if self.client_ca is not None and self.cert is None:
            raise InvalidConfig(
                "--tls-client-ca needs --tls-cert and --tls-key: without a certificate of its own "
                "a server cannot request client certificates"
            )
        if self.server_name and self.ca is None:
            raise InvalidConfig(
                "--tls-server-name needs --tls-ca: without it, no certificate is checked"
            )


PLAIN = TlsConfig()


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidConfig(
            f"--tls-{name} {path} cannot be read: {error.strerror}; name a PEM file that this "
            "user may read"
        ) from error


def _check_pair(cert: Path, key: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidConfig(
                f"--tls-key {key} is not the key of --tls-cert {cert}; name the two that were "
                "made together"
            ) from error
        raise InvalidConfig(
            f"--tls-cert {cert} and --tls-key {key} hold no certificate with its key: "
            f"{error.reason or error}; both must be PEM, and the key not encrypted"
        ) from error


def _no_password() -> str:
    """Prevent OpenSSL from prompting for the password of an encrypted key, which would hang."""
    return ""


def _check_authorities(name: str, path: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidConfig(
            f"--tls-{name} {path} holds no certificate of an authority: "
            f"{error.reason or error}; name a PEM file with at least one"
        ) from error


def tls_trouble(target: str, tls: TlsConfig, details: str) -> str | None:
    """Return the cause and its remedy, or None if TLS is not the cause."""
    if "WRONG_VERSION_NUMBER" in details:
        return f"{target} does not speak TLS; leave --tls-ca out, or start it with --tls-cert"
    if "certificate has expired" in details:
        return f"the certificate of {target} has expired; renew it"
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of {target} is not signed by an authority in --tls-ca {tls.ca}"
    if "Hostname Verification Check failed" in details:
        return (
            f"the certificate of {target} is not for {tls.server_name or 'that host'}; dial it by "
            "a name that its subjectAltName carries, or give that name by --tls-server-name"
        )
    return None


def connection_trouble(target: str, tls: TlsConfig, details: str) -> str | None:
    """Return a cause that has to do with TLS, or may have, and its remedy."""
    return tls_trouble(target, tls, details) or closed_connection(target, tls, details)


def closed_connection(target: str, tls: TlsConfig, details: str) -> str | None:
    """Return a text if the server closed the new connection, which may be for TLS."""
    if "failed to connect" not in details or ": Socket closed" not in details:
        return None
    if not tls.dials:
        advice = "if it speaks TLS only, give --tls-ca (`tls=TlsConfig(ca=…)` in Python)"
    elif tls.cert is None:
        advice = "if it wants a client certificate, give --tls-cert and --tls-key"
    else:
        advice = f"{tls.cert} must be signed by an authority of its --tls-client-ca, if it has one"
    return f"{target} closed the connection; {advice}"
