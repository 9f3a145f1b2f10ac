"""Print every event of a seat. Needs only nats-py: python examples/subscribe.py nats://127.0.0.1:4222"""

import asyncio
import contextlib
import json
import sys

import nats
from nats.aio.msg import Msg


async def show(msg: Msg) -> None:
    event = json.loads(msg.data)
    seconds = ", ".join(f"{phase} {took:.2f} s" for phase, took in event.get("seconds", {}).items())
    model, reason = event.get("model", ""), event.get("reason", "")
    print(f"{event['node']}/{event['seat']} {event['state']:<12} {model} {reason} {seconds}".rstrip(), flush=True)


async def main(url: str) -> None:
    connection = await nats.connect(url)
    await connection.subscribe("kyb.v1.evt.*.*.*", cb=show)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"))
