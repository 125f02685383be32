"""Diagnosis of failed TLS connections by a second handshake.

gRPC reports a refused connection in the words of its libraries, or as "Socket closed". After a
failed call, this module repeats the handshake with Python's `ssl`, which has specific errors.
"""

from __future__ import annotations

import re
import socket
import ssl
from contextlib import suppress

from baton.rpc.security.tls import TlsConfig

Address = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]  # IPv4, IPv6, others

PROBE_TIMEOUT_S = 3.0
HTTPS_PORT = 443
TARGET = re.compile(r"(?:dns:(?://[^/]*/)?|ipv4:|ipv6:)?\[?([^/]*?)\]?(?::(\d+))?")
# OpenSSL's verification error codes.
EXPIRED = 10
NAME_MISMATCHES = (62, 64)  # host name, IP address
# Length of the first frame that an HTTP/2 server sends if it accepts the handshake.
SETTINGS_FRAME_BYTES = 9


def tls_trouble(target: str, tls: TlsConfig, patience_s: float = PROBE_TIMEOUT_S) -> str | None:
    """Return the cause and its remedy, or None if TLS is not the cause. Blocks on the network."""
    parsed = TARGET.fullmatch(target)
    if parsed is None or not parsed[1]:
        return None
    host, port = parsed[1], int(parsed[2] or HTTPS_PORT)
    with suppress(OSError):  # not reachable, as gRPC has reported already
        for family, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family) as connection:
                connection.settimeout(patience_s)
                return _trouble_at(address, connection, host, target, tls)
    return None


def _trouble_at(
    address: Address,
    connection: socket.socket,
    host: str,
    target: str,
    tls: TlsConfig,
) -> str | None:
    secured = _context(tls).wrap_socket(connection, server_hostname=tls.server_name or host)
    try:
        with secured:
            # wrap_socket on a connected socket would leak it if the peer disconnects meanwhile.
            secured.connect(address)
            if not tls.dials:
                return f"{target} speaks TLS only; give --tls-ca (`tls=TlsConfig(ca=…)` in Python)"
            if _is_rejected(secured):
                return _client_certificate_advice(target, tls)
    except ssl.SSLCertVerificationError as error:
        return _server_certificate_advice(target, tls.server_name or host, tls, error)
    except ssl.SSLError:
        if tls.dials:
            return f"{target} does not speak TLS; leave --tls-ca out, or start it with --tls-cert"
    return None


def _context(tls: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if tls.ca is None:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    context.load_verify_locations(tls.ca)
    if tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def _is_rejected(secured: ssl.SSLSocket) -> bool:
    """Return whether the server closes the connection after the handshake.

    That is how a server rejects a client certificate.
    """
    try:
        return not secured.recv(SETTINGS_FRAME_BYTES)
    except TimeoutError:
        return False
    except OSError:  # an alert, or a connection that was reset
        return True


def _client_certificate_advice(target: str, tls: TlsConfig) -> str:
    if tls.cert is None:
        return f"{target} wants a client certificate; give --tls-cert and --tls-key"
    return (
        f"{target} does not take the certificate {tls.cert}; it must be signed by an authority of "
        "its --tls-client-ca"
    )


def _server_certificate_advice(
    target: str, name: str, tls: TlsConfig, error: ssl.SSLCertVerificationError
) -> str:
    if error.verify_code in NAME_MISMATCHES:
        return (
            f"the certificate of {target} is not for {name}; dial it by a name that its "
            "subjectAltName carries, or give that name by --tls-server-name"
        )
    if error.verify_code == EXPIRED:
        return f"the certificate of {target} has expired; renew it"
    return (
        f"the certificate of {target} is not signed by an authority in --tls-ca {tls.ca}: "
        f"{error.verify_message}"
    )
