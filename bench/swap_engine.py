"""An engine for llama-swap: ``python -m bench.swap_engine PORT ACTIVATE PARK PREFILL DECODE``.

It listens once it is as old as an activation takes (its own start is part of that), answers a completion after its
prompt and its tokens (per second), and takes as long as a park to end. Wall seconds. It imports as little as possible:
llama-swap starts one at each swap.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path


def age() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


async def serve(port: int, activate: float, park: float, prefill: float, decode: float) -> None:
    """Serve until SIGTERM."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                if head.startswith(b"post"):
                    length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
                    body = json.loads(await reader.readexactly(length))
                    await asyncio.sleep(-(-len(body["prompt"]) // 4) / prefill + body["max_tokens"] / decode)
                text = b'{"choices": [{"text": ""}]}'
                kind = b"Content-Type: application/json\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n%bContent-Length: %d\r\n\r\n%b" % (kind, len(text), text))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    await asyncio.sleep(activate - age())
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        await ended.wait()
        await asyncio.sleep(park)
        os._exit(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), *map(float, sys.argv[2:])))
