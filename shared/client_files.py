"""Files by which a client shows who it is and knows whom it talks to: looked at before anything starts.

Settings name them. One that can't be used is a fault of its setting; left to a client, it would be found at the first
connection: as a trace, as a server that seems away for ever, or (nats-py, credentials without a JWT) as a loop that
never ends. Edge: reads files.
"""

import base64
import binascii
import ssl
from pathlib import Path
from typing import Final

from shared.errors import FieldError, reason_of

_JWT: Final = b"BEGIN NATS USER JWT"
_SEED: Final = b"BEGIN USER NKEY SEED"
_SEED_PREFIX: Final = 18 << 3
_SEED_BYTES: Final = 36
"""Two of prefixes, 32 of the seed, two of its checksum."""


def tls_client_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    """Client-side TLS from files; None as CA takes the machine's. Raises FieldError for files that can't be used."""
    try:
        context = ssl.create_default_context(cafile=str(ca) if ca else None)
    except OSError as error:
        raise FieldError("tls_ca_file", _said(error), "certificates as PEM") from None
    _load_pair(context, cert, key)
    return context


def check_tls_files(ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """The same faults, without reading the machine's own certificates (which takes 20 ms)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca:
        try:
            context.load_verify_locations(str(ca))
        except OSError as error:
            raise FieldError("tls_ca_file", _said(error), "certificates as PEM") from None
    _load_pair(context, cert, key)


def _load_pair(context: ssl.SSLContext, cert: Path | None, key: Path | None) -> None:
    if cert:
        try:
            # A password is asked for at the terminal else.
            context.load_cert_chain(str(cert), str(key) if key else None, password="")
        except OSError as error:
            allowed = "a certificate and its key as PEM, the key without a password"
            raise FieldError("tls_cert_file, tls_key_file", _said(error), allowed) from None
    elif key:
        raise FieldError("tls_key_file", "a key alone", "one with its tls_cert_file")


def check_nats_credentials(file: Path) -> None:
    """Raises FieldError for a file that isn't one of a NATS user's credentials."""
    lines = _read(file, "credentials_file").splitlines()
    after = [b"", *lines]
    jwt = any(_JWT in before and line.strip() for before, line in zip(after, lines, strict=False))
    seed = any(_SEED in before and _is_seed(line) for before, line in zip(after, lines, strict=False))
    if not (jwt and seed):
        raise FieldError("credentials_file", f"no {'seed' if jwt else 'JWT'} of a user", "a .creds file")


def check_nkey_seed(file: Path) -> None:
    """Raises FieldError for a file that isn't an NKey's seed."""
    if not _is_seed(_read(file, "nkey_seed_file")):
        raise FieldError("nkey_seed_file", "no seed", "an NKey's seed: SU… and 56 characters more")


def _read(file: Path, field: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise FieldError(field, f"a file that can't be read ({reason_of(error)})", "one that can") from None


def _is_seed(text: bytes) -> bool:
    try:
        raw = base64.b32decode(text.strip() + b"=" * (-len(text.strip()) % 8))
    except binascii.Error:
        return False
    checksum = binascii.crc_hqx(raw[:-2], 0).to_bytes(2, "little")
    return len(raw) == _SEED_BYTES and raw[0] & 0xF8 == _SEED_PREFIX and raw[-2:] == checksum


def _said(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return f"a file that can't be read ({reason_of(error)})"
    return "the key of another certificate" if error.reason == "KEY_VALUES_MISMATCH" else "bytes that aren't PEM"
