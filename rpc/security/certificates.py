"""TLS certificates of a server, reloaded when their files change."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
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


class ServerCertificates:
    """Certificates for gRPC's servers."""

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._renewals = CertificateReloader(tls)

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._tls),
            self._reloaded,  # type: ignore[arg-type]  # gRPC accepts None for "unchanged"
            require_client_authentication=self._tls.client_ca is not None,
        )

    def _reloaded(self) -> grpc.ServerCertificateConfiguration | None:
        renewed = self._renewals.renewed()
        return None if renewed is None else _configuration(renewed)


def _stamp_of(path: Path) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _configuration(tls: TlsConfig) -> grpc.ServerCertificateConfiguration:
    if tls.cert is None or tls.key is None:
        raise InvalidConfig("a server without a certificate cannot speak TLS; give --tls-cert")
    pairs = [(tls.pem(tls.key), tls.pem(tls.cert))]
    authorities = None if tls.client_ca is None else tls.pem(tls.client_ca)
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=authorities)
