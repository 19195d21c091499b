"""An ext-proc server that only receives and sends: what gRPC, the kernel and the protobufs cost, for `bench/stream.py`.

It reads the same messages as the router, with the same options and the same allocator, and writes the same answers
(in full duplex the whole body back), but decides nothing: no JSON, no prompt, no policy. So what the router costs more
is the router's own.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
import psutil
import uvloop
from envoy.service.ext_proc.v3 import external_processor_pb2 as ep

from deploy.local.processes import tied
from services.router.allocator import keep_freed_memory
from services.router.extproc import messages
from services.router.extproc.messages import BodyMode, Routed
from services.router.extproc.server import SERVICE

_ROUTED: Final = Routed(("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"), "0" * 36, "x" * 1_000)


async def _process(_requests: Any, context: Any) -> None:
    """One request's stream, as the router answers it."""
    full_duplex = False
    chunks: list[bytes] = []
    while (message := await context.read()) is not grpc.aio.EOF:
        if message.WhichOneof("request") == "request_headers":
            full_duplex = message.protocol_config.request_body_mode == BodyMode.FULL_DUPLEX_STREAMED
            if not full_duplex:
                await context.write(messages.CONTINUE_REQUEST_HEADERS)
        elif not full_duplex:
            len(message.request_body.body)  # the copy out of the message
            await context.write(messages.routed_body(_ROUTED))
        else:
            chunks.append(message.request_body.body)
            if message.request_body.end_of_stream:
                await context.write(messages.routed_headers(_ROUTED))
                for answer in messages.request_chunks(b"".join(chunks), end=True):
                    await context.write(answer)


async def _serve() -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    handler = grpc.stream_stream_rpc_method_handler(
        _process,
        request_deserializer=ep.ProcessingRequest.FromString,
        response_serializer=ep.ProcessingResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Process": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


@contextlib.asynccontextmanager
async def bare_server() -> AsyncIterator[tuple[str, psutil.Process]]:
    """Such a server in a process of its own: its address, and the process."""
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-c", "from bench.bare_extproc import serve; serve()"]),
        stdout=asyncio.subprocess.PIPE,
        stderr=sys.stderr,
    )
    assert process.stdout is not None
    try:
        port = (await asyncio.wait_for(process.stdout.readline(), 30.0)).decode().strip()
        if not port:
            raise RuntimeError("the bare server didn't come up")
        yield f"127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def serve() -> None:
    """Print the port; serve until the process is ended."""
    keep_freed_memory()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve())
