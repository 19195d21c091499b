"""A DNS server on loopback that answers what a test says, over real UDP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


@dataclass(slots=True)
class FakeDns:
    """`records`: (name, kind) → (ttl in seconds, texts). A name without any record doesn't exist."""

    records: dict[tuple[str, str], tuple[int, list[str]]] = field(default_factory=dict)
    failing: bool = False
    silent: bool = False
    asked: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0

    @property
    def server(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set(self, name: str, kind: str, *texts: str, ttl: int = 1) -> None:
        self.records[f"{name}.", kind] = (ttl, list(texts))

    def answer(self, wire: bytes) -> bytes | None:
        query = dns.message.from_wire(wire)
        name, kind = query.question[0].name.to_text(), dns.rdatatype.to_text(query.question[0].rdtype)
        self.asked.append((name, kind))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        response.flags |= dns.flags.RA
        found = self.records.get((name, kind))
        if self.failing:
            response.set_rcode(dns.rcode.SERVFAIL)
        elif found is not None and found[1]:
            response.answer.append(dns.rrset.from_text(name, found[0], "IN", kind, *found[1]))
        elif not any(known == name for known, _ in self.records):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, fake: FakeDns) -> None:
        self._fake = fake
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._fake.answer(data)
        if reply is not None and self._transport is not None:
            self._transport.sendto(reply, addr)


@contextlib.asynccontextmanager
async def fake_dns() -> AsyncIterator[FakeDns]:
    """A running server on a free port."""
    fake = FakeDns()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(fake), local_addr=("127.0.0.1", 0))
    fake.port = transport.get_extra_info("sockname")[1]
    try:
        yield fake
    finally:
        transport.close()
