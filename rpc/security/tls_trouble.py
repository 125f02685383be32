"""Causes of failed TLS connections, read from gRPC's details of the failed call. Pure."""

from __future__ import annotations

from baton.rpc.security.tls import TlsConfig


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
