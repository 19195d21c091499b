"""Text to tokens and back, without a tokenizer: one token is four bytes.

Pure. A prompt is a byte string whose pieces (message headers, message contents, token ids) each fill whole tokens, so a
shared prefix of messages is a shared prefix of tokens, and a generated answer sent back as the next turn's assistant
message continues the very chain that its generation left in the cache. Four bytes a token is near English text in
common vocabularies; real counts differ by script and by model.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BYTES_PER_TOKEN = 4
_PAD = b" "
_CHAIN_BYTES = 8

# Words of exactly one token that need no JSON escape: a space and three letters, 1024 of them.
_CONSONANTS = "bdfgklmnprstvxzh"
_VOWELS = "aeio"
WORDS: tuple[bytes, ...] = tuple(
    f" {first}{vowel}{last}".encode() for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS
)


def padded(text: bytes) -> bytes:
    """The text, filled up with spaces to whole tokens."""
    return text + _PAD * (-len(text) % BYTES_PER_TOKEN)


def render_messages(messages: Iterable[tuple[str, str]], tools: bytes = b"") -> bytes:
    """The prompt of a chat: (role, content) pairs under headers, and the header of the answer to come."""
    parts = [padded(b"<|tools|>\n"), padded(tools)] if tools else []
    for role, content in messages:
        parts.append(padded(f"<|{role}|>\n".encode()))
        parts.append(padded(content.encode()))
    parts.append(padded(b"<|assistant|>\n"))
    return b"".join(parts)


def render_text(prompt: str) -> bytes:
    return padded(prompt.encode())


def render_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as four little-endian bytes each; ids must be in 0..2^32-1."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def token_count(prompt: bytes) -> int:
    return len(prompt) // BYTES_PER_TOKEN


def block_chain(prompt: bytes, block_tokens: int, salt: bytes = b"") -> list[int]:
    """One hash per full block of `block_tokens` tokens; each also covers all blocks before it, and the salt.

    Stable between processes. 64 bits: among a million blocks a false hit has a probability of 3e-8.
    """
    size = block_tokens * BYTES_PER_TOKEN
    chain: list[int] = []
    link = hashlib.blake2b(salt, digest_size=_CHAIN_BYTES).digest()
    for start in range(0, len(prompt) - size + 1, size):
        link = hashlib.blake2b(link + prompt[start : start + size], digest_size=_CHAIN_BYTES).digest()
        chain.append(int.from_bytes(link, "little"))
    return chain


def fingerprint(prompt: bytes, seed: int) -> int:
    """64 stable bits of a prompt, from which its answer and its length are drawn."""
    return int.from_bytes(
        hashlib.blake2b(prompt, digest_size=8, key=(seed % 2**64).to_bytes(8, "little")).digest(), "little"
    )


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """The answer to a prompt: token i is `WORDS[(start + i * stride) mod 1024]`. Equal prompts, equal answers."""

    start: int
    stride: int

    @classmethod
    def of(cls, prompt_fingerprint: int) -> "GeneratedText":
        return cls(prompt_fingerprint & 1023, (prompt_fingerprint >> 10 & 1023) | 1)

    def token(self, index: int) -> bytes:
        return WORDS[(self.start + index * self.stride) & 1023]

    def tokens(self, count: int) -> bytes:
        start, stride = self.start, self.stride
        return b"".join([WORDS[(start + index * stride) & 1023] for index in range(count)])
