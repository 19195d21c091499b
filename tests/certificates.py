"""A certificate authority of a test's own, and the pairs it issues; for localhost and 127.0.0.1."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """A certificate authority, and the pairs it issues."""

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def make(cls) -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        return cls(key, _certificate("authority", key, key, "authority", ca=True))

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """(key, certificate) as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(name, key, self.key, "authority", ca=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return pem, certificate.public_bytes(serialization.Encoding.PEM)


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, issuer: str, *, ca: bool
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(_NAMES), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .sign(signer, hashes.SHA256())
    )


_NAMES = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]


@dataclass(frozen=True)
class Files:
    """Where `write` put them."""

    authority: Path
    certificate: Path
    key: Path


def write(directory: Path, authority: Authority, name: str) -> Files:
    """A pair of this authority's, and its own certificate, as PEM files."""
    key, certificate = authority.issue(name)
    files = Files(directory / "ca.pem", directory / f"{name}.pem", directory / f"{name}.key")
    for path, data in ((files.authority, authority.pem), (files.certificate, certificate), (files.key, key)):
        path.write_bytes(data)
    return files
