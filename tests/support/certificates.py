"""Certificate authorities and certificates, made while a test runs."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from baton.rpc.security.tls import TlsConfig

LIFETIME = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority that writes the certificates it signs into its folder."""

    folder: Path
    name: str
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @property
    def ca(self) -> Path:
        return self.folder / f"{self.name}.pem"

    def issue(
        self, name: str, *subjects: str, lifetime: dt.timedelta = LIFETIME
    ) -> tuple[Path, Path]:
        """Return a certificate and its key for these host names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = x509.SubjectAlternativeName([_general_name(one) for one in subjects])
        signed = (
            _builder(name, self.certificate.subject, key, lifetime)
            .add_extension(alternatives, critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        cert_path, key_path = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        _write_certificate(cert_path, signed)
        _write_key(key_path, key)
        return cert_path, key_path

    def mutual(self, name: str, *subjects: str) -> TlsConfig:
        """Return a mutual TLS configuration that trusts this authority alone."""
        cert, key = self.issue(name, *subjects)
        return TlsConfig(cert=cert, key=key, ca=self.ca, client_ca=self.ca)


def make_authority(folder: Path, name: str = "ca") -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    itself = _name(name)
    certificate = (
        _builder(name, itself, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority = Authority(folder, name, key, certificate)
    _write_certificate(authority.ca, certificate)
    return authority


def lock_key(key: Path, locked: Path, password: str) -> None:
    """Write a copy of the key that is encrypted with the password."""
    opened = serialization.load_pem_private_key(key.read_bytes(), password=None)
    encryption = serialization.BestAvailableEncryption(password.encode())
    locked.write_bytes(
        opened.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        )
    )


def _builder(
    subject: str,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    lifetime: dt.timedelta = LIFETIME,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFETIME)
        .not_valid_after(now + lifetime)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(subject: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(subject))
    except ValueError:
        return x509.DNSName(subject)


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
