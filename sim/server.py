"""`python -m sim.server --spec FILE|-`: many simulated model servers and their control API in one process.

Reads a `ProcessSpec` as JSON, prints one JSON line with all bound addresses once everything listens, and serves until
SIGTERM or SIGINT, then exits with 0. A bad spec or a port in use ends it with 2 and the reason on stderr.
"""

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import orjson
import uvloop
from pydantic import ValidationError

from shared.errors import reason_of
from shared.faults import in_words
from sim.control import CONTROL_HOST, ControlApi
from sim.model_server import ModelServer
from sim.spec import ProcessSpec


async def serve(spec: ProcessSpec, stop: asyncio.Event) -> None:
    """Run all servers of the spec until `stop` is set."""
    loop = asyncio.get_running_loop()
    servers = {server.name: ModelServer(server, loop) for server in spec.servers}
    control = ControlApi(servers, loop)
    try:
        for server in servers.values():
            await server.start()
        await control.start(spec.control_port)
        sys.stdout.buffer.write(ready_line(servers, control) + b"\n")
        sys.stdout.buffer.flush()
        # What lives from here on is short-lived: keep the collector from walking over the rest again and again.
        gc.collect()
        gc.freeze()
        await stop.wait()
    finally:
        control.close()
        for server in servers.values():
            server.close()


def ready_line(servers: dict[str, ModelServer], control: ControlApi) -> bytes:
    return orjson.dumps(
        {
            "ready": True,
            "control": f"http://{CONTROL_HOST}:{control.port}",
            "servers": [
                {
                    "name": name,
                    "host": server.spec.host,
                    "port": server.port,
                    "url": server.base_url,
                    "models": server.spec.models,
                    "hardware_class": server.spec.hardware().hardware_class,
                }
                for name, server in servers.items()
            ],
        }
    )


async def _run(spec: ProcessSpec) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(spec, stop)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sim.server", description="Simulated vLLM-like model servers over HTTP.")
    parser.add_argument("--spec", required=True, help="JSON file with a process spec, or - for standard input")
    path = parser.parse_args(arguments).spec
    try:
        raw = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        spec = ProcessSpec.model_validate_json(raw)
    except OSError as error:
        return _refused(f"--spec {path}: can't be read ({reason_of(error)})")
    except ValidationError as error:
        return _refused(*(f"--spec: {field}: {fault}" for field, fault in in_words(error.errors(), ProcessSpec)))
    try:
        uvloop.run(_run(spec))
    except OSError as error:
        return _refused(str(error))
    return 0


def _refused(*faults: str) -> int:
    sys.stderr.writelines(f"sim.server: {fault}\n" for fault in faults)
    return 2


if __name__ == "__main__":
    sys.exit(main())
