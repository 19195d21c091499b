"""A health check without a shell or curl: `python -I -S …/shared/probe.py http://127.0.0.1:9090/readyz`.

Exit 0 for a 2xx, else 1 and the answer on stdout, where a container runtime keeps it. It runs every few seconds in each
container, so it imports nothing but `socket` and `sys`: it is started by its path, outside the package.

Limits: plain HTTP, the first 4 KB of the answer.
"""

import socket
import sys

_TIMEOUT_S = 2.0
_MOST_BYTES = 4096


def probe(url: str) -> tuple[bool, str]:
    """Whether the URL answers with a 2xx, and what it answers; raises ValueError for what is no such URL."""
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    host, colon, port = authority.rpartition(":")
    if scheme != "http" or not colon or not host or not port.isdigit():
        raise ValueError(f"found '{url[:128]}'; allowed: http://host:port/path")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_TIMEOUT_S) as connection:
            request = f"GET /{path} HTTP/1.1\r\nhost: {authority}\r\nconnection: close\r\n\r\n"
            connection.sendall(request.encode())
            answer = b""
            while len(answer) < _MOST_BYTES and (part := connection.recv(_MOST_BYTES)):
                answer += part
    except OSError as error:
        return False, f"{url}: {error}"
    status, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    words = status.split(" ", 2)
    return len(words) > 1 and words[1][:1] == "2", f"{status.splitlines()[0] if status else 'no answer'} {body}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stdout.write("usage: probe.py URL\n")
        return 2
    try:
        good, said = probe(arguments[0])
    except ValueError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    if not good:
        sys.stdout.write(f"{said}\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
