"""The health check of containers: what it calls healthy, what it says otherwise, and that it needs nothing of ours."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from shared import probe

SCRIPT = Path(probe.__file__)


@contextmanager
def serving(status: int, body: bytes) -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/readyz"
        finally:
            server.shutdown()
            thread.join()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """As an image runs it: by path, isolated, without site packages."""
    command = [sys.executable, "-I", "-S", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_2xx_is_healthy_and_says_nothing():
    with serving(204, b"") as url:
        ended = run(url)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_another_status_is_not_and_the_answer_is_kept():
    with serving(503, b'{"endpoint": "none is ready"}') as url:
        ended = run(url)
    assert ended.returncode == 1
    assert "503" in ended.stdout
    assert '{"endpoint": "none is ready"}' in ended.stdout


def test_nobody_who_listens_is_not_healthy():
    with serving(200, b"") as url:
        pass
    ended = run(url)
    assert ended.returncode == 1
    assert "refused" in ended.stdout


@pytest.mark.parametrize("url", ["", "https://a:1/", "http://a/", "127.0.0.1:1/", "http://:1/"])
def test_what_is_no_address_is_said_to_be_none(url):
    with pytest.raises(ValueError, match="allowed: http://host:port/path"):
        probe.probe(url)
    assert probe.main([url]) == 2
    assert probe.main([]) == 2
