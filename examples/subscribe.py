"""Print every event: of seats, decisions, GPUs. Needs only nats-py; kyb status shows the address:
python examples/subscribe.py nats://127.0.0.1:4222
"""

import asyncio
import contextlib
import json
import sys

import nats
from nats.aio.msg import Msg


async def show(msg: Msg) -> None:
    event = json.loads(msg.data)
    subject = next(event[key] for key in ("seat", "group", "op", "gpu") if event.get(key))
    what = event.get("state") or msg.subject.split(".")[-1]
    seconds = ", ".join(f"{phase} {took:.2f} s" for phase, took in (event.get("seconds") or {}).items())
    way = f"from {event['came_from']} by {event['way']}:" if event.get("way") else ""
    words = filter(None, (event.get("model"), way, event.get("reason"), seconds))
    print(f"{event['node']}/{subject} {what:<12}", *words, flush=True)


async def main(url: str) -> None:
    connection = await nats.connect(url)
    await connection.subscribe("kyb.v1.evt.*.*.*", cb=show)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "nats://127.0.0.1:4222"))
