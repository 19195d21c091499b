"""TLS of the ext-proc port: from files that are read again when they change, or self-signed.

Gateways differ: Istio speaks plain h2c unless a DestinationRule asks for TLS, agentgateway always dials with TLS and
verifies nothing. Both are served without a certificate of one's own: `off`, or `self-signed` with a key that lives as
long as the process. gRPC offers ALPN h2 by itself.

Files are looked at once per handshake (three `stat` calls). A pair that can't be read, or whose key isn't the
certificate's, as in the middle of a renewal, leaves the pair in use; that is logged once per change.
"""

import datetime as dt
import ipaddress
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from shared.errors import FieldError, reason_of

_SELF_SIGNED_DAYS: Final = 3_650
_NAME: Final = "leadtime-router"

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients need a certificate of that authority."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        return (self.certificate, self.key, *((self.client_ca,) if self.client_ca else ()))


@dataclass(frozen=True, slots=True)
class _Pair:
    certificate: bytes
    key: bytes
    client_ca: bytes | None = None

    def configuration(self) -> Any:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.client_ca)


def self_signed(now: dt.datetime) -> grpc.ServerCredentials:
    """Credentials with a new key and a certificate that nobody vouches for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)])
    names = [x509.DNSName(_NAME), x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=_SELF_SIGNED_DAYS))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return grpc.ssl_server_credentials([(key_pem, certificate.public_bytes(serialization.Encoding.PEM))])


def from_files(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that follow the files; FieldError if they can't be used to begin with."""
    source = _Reloading(files)
    return grpc.dynamic_ssl_server_credentials(
        source.first.configuration(), source.changed, require_client_authentication=files.client_ca is not None
    )


class _Reloading:
    """Asked by gRPC at each handshake, on threads of its own."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._log = structlog.get_logger()
        self._stamp = _stamp(files)
        self.first = _read(files)

    def changed(self) -> Any:
        """The new pair as gRPC's configuration; None where the one in use stays."""
        with self._lock:
            try:
                stamp = _stamp(self._files)
            except FieldError:
                stamp = ()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                pair = _read(self._files)
            except FieldError as error:
                self._log.warning("TLS files changed and can't be used; the pair in use stays", error=str(error))
                return None
            self._log.info("TLS files read again")
            return pair.configuration()


def _stamp(files: TlsFiles) -> Stamp:
    try:
        stats = [path.stat() for path in files.paths]
    except OSError as error:
        raise _unusable(error) from None
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def _read(files: TlsFiles) -> _Pair:
    try:
        certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
        client_ca = files.client_ca.read_bytes() if files.client_ca else None
        own = x509.load_pem_x509_certificates(certificate)[0].public_key()
        private: Any = serialization.load_pem_private_key(key, password=None)
        if client_ca is not None:
            x509.load_pem_x509_certificates(client_ca)
    except (OSError, ValueError, TypeError) as error:
        raise _unusable(error) from None
    spki = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if own.public_bytes(*spki) != private.public_key().public_bytes(*spki):
        raise FieldError("tls_key_file", "the key of another certificate", "the key of tls_cert_file's first one")
    return _Pair(certificate, key, client_ca)


def _unusable(error: Exception) -> FieldError:
    return FieldError("tls_cert_file, tls_key_file, tls_client_ca_file", _said(error), "readable PEM files")


def _said(error: Exception) -> str:
    return reason_of(error) if isinstance(error, OSError) else "bytes that aren't PEM"
