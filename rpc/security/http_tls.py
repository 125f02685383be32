"""TLS of HTTP servers, from the same configuration as for gRPC."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable

from baton.core.errors import InvalidConfig
from baton.rpc.security.certificates import CertificateReloader
from baton.rpc.security.tls import TlsConfig

log = logging.getLogger(__name__)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """Return an SSL context that reloads changed certificates at each handshake.

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
    if tls.cert is None or tls.key is None:
        raise InvalidConfig("a server without a certificate cannot speak TLS; give --tls-cert")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:  # files that changed after they were validated
        raise InvalidConfig(f"--tls-cert {tls.cert} cannot be used: {error}") from error
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=tls.pem(tls.client_ca).decode())
    return context
