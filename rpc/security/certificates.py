"""TLS certificates of gRPC and HTTP servers, reloaded when their files change."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc

from baton.core.errors import InvalidConfig
from baton.rpc.security.tls import TlsConfig

# For each file: inode, modification time, size.
Stamp = tuple[tuple[int, int, int], ...]

log = logging.getLogger(__name__)


class CertificateReloader:
    """Detects changed certificate files, checked at each new connection. Thread-safe."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._seen = self._stamp()

    def renewed(self) -> TlsConfig | None:
        """Return the reloaded configuration, or None if there is no valid change.

        Files that do not match, such as halfway through a replacement, are skipped until they
        change again.
        """
        with self._lock:
            stamp = self._stamp()
            if stamp is None or stamp == self._seen:
                return None
            self._seen = stamp
            try:
                self._tls = replace(self._tls)  # reads and checks them
            except InvalidConfig as error:
                log.warning("the old certificate stays in use: %s", error)
                return None
        log.info("the certificate %s was reloaded", self._tls.cert)
        return self._tls

    def _stamp(self) -> Stamp | None:
        """Return None if a file is missing, such as during a replacement."""
        try:
            return tuple(_stamp_of(path) for path in self._files())
        except OSError:
            return None

    def _files(self) -> Iterator[Path]:
        for path in (self._tls.cert, self._tls.key, self._tls.client_ca):
            if path is not None:
                yield path


def _stamp_of(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def grpc_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """Return credentials of a gRPC server, whose changed certificates are reloaded."""
    reloader = CertificateReloader(tls)

    def reload() -> grpc.ServerCertificateConfiguration | None:
        renewed = reloader.renewed()
        return None if renewed is None else _configuration(renewed)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(tls),
        reload,  # type: ignore[arg-type]  # gRPC accepts None for "unchanged"
        require_client_authentication=tls.client_ca is not None,
    )


def _configuration(tls: TlsConfig) -> grpc.ServerCertificateConfiguration:
    cert, key = _own_files(tls)
    authorities = None if tls.client_ca is None else tls.pem(tls.client_ca)
    return grpc.ssl_server_certificate_configuration(
        [(tls.pem(key), tls.pem(cert))], root_certificates=authorities
    )


def http_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return the SSL context of an HTTP server. Each handshake reloads changed certificates.

    Raises InvalidConfig.
    """
    context = _context(tls)
    # OpenSSL calls this before it picks a certificate, also when a client sends no server name.
    context.sni_callback = _certificate_callback(context, CertificateReloader(tls))
    return context


def _certificate_callback(
    first: ssl.SSLContext, renewals: CertificateReloader
) -> Callable[[ssl.SSLObject, str | None, ssl.SSLContext], None]:
    current = first

    def pick(connection: ssl.SSLObject, _name: str | None, _context_then: ssl.SSLContext) -> None:
        nonlocal current
        renewed = renewals.renewed()
        if renewed is not None:
            try:
                current = _context(renewed)
            except InvalidConfig as error:
                log.warning("the old certificate stays in use over HTTP: %s", error)
        connection.context = current

    return pick


def _context(tls: TlsConfig) -> ssl.SSLContext:
    cert, key = _own_files(tls)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # files that changed after they were validated
        raise InvalidConfig(f"--tls-cert {cert} cannot be used: {error}") from error
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=tls.pem(tls.client_ca).decode())
    return context


def _own_files(tls: TlsConfig) -> tuple[Path, Path]:
    if tls.cert is None or tls.key is None:
        raise InvalidConfig("a server without a certificate cannot speak TLS; give --tls-cert")
    return tls.cert, tls.key
