"""Files by which a client shows who it is: those that work are taken, each other one is told."""

from pathlib import Path

import nkeys
import pytest

from shared.client_files import check_nats_credentials, check_nkey_seed, tls_client_context
from shared.errors import FieldError
from tests.certificates import Authority

SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
JWT = b"-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n"
NKEY = b"-----BEGIN USER NKEY SEED-----\n" + SEED + b"\n------END USER NKEY SEED------\n"


def test_the_tls_context_verifies_by_default() -> None:
    assert tls_client_context(None, None, None).check_hostname


def test_a_ca_and_a_pair_of_its_are_taken(tmp_path: Path) -> None:
    ca, cert, key = _pair(tmp_path)
    assert tls_client_context(ca, cert, key).check_hostname
    cert.write_bytes(cert.read_bytes() + key.read_bytes())
    assert tls_client_context(ca, cert, None)


def test_a_pair_that_is_none_is_told(tmp_path: Path) -> None:
    ca, cert, key = _pair(tmp_path)
    other = tmp_path / "other"
    other.write_bytes(Authority.make().issue("other")[0])
    for files, said in (
        ((ca, cert, other), "tls_cert_file, tls_key_file: found the key of another certificate"),
        ((ca, key, cert), "tls_cert_file, tls_key_file: found bytes that aren't PEM"),
        ((key, cert, key), "tls_ca_file: found bytes that aren't PEM; allowed: certificates as PEM"),
        ((ca, None, key), "tls_key_file: found a key alone; allowed: one with its tls_cert_file"),
        ((tmp_path, None, None), "tls_ca_file: found a file that can't be read"),
    ):
        with pytest.raises(FieldError, match=said):
            tls_client_context(*files)


def test_a_seed_and_credentials_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(SEED + b"\n")
    check_nkey_seed(file)
    file.write_bytes(JWT + b"\nwords between\n\n" + NKEY)
    check_nats_credentials(file)


@pytest.mark.parametrize(
    ("text", "lacks"), [(b"", "JWT"), (NKEY, "JWT"), (JWT, "seed"), (JWT + NKEY.replace(SEED, b"SUA"), "seed")]
)
def test_credentials_that_lack_a_part_are_told_without_their_text(tmp_path: Path, text: bytes, lacks: str) -> None:
    file = tmp_path / "user.creds"
    file.write_bytes(text)
    with pytest.raises(FieldError) as refused:
        check_nats_credentials(file)
    assert str(refused.value) == f"credentials_file: found no {lacks} of a user; allowed: a .creds file"


@pytest.mark.parametrize("seed", [b"", b"SU", SEED[:-1] + b"A", SEED[:-8], b"\xff" * 58, SEED + SEED])
def test_a_seed_that_is_none_is_told_without_its_text(tmp_path: Path, seed: bytes) -> None:
    file = tmp_path / "seed"
    file.write_bytes(seed)
    with pytest.raises(FieldError, match=r"^nkey_seed_file: found no seed; allowed: an NKey's seed"):
        check_nkey_seed(file)


def _pair(folder: Path) -> tuple[Path, Path, Path]:
    authority = Authority.make()
    key, cert = authority.issue("client")
    files = (folder / "ca", folder / "cert", folder / "key")
    for file, text in zip(files, (authority.pem, cert, key), strict=True):
        file.write_bytes(text)
    return files
