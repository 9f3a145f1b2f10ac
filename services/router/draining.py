"""``kyb-router-draining``: waits until a router has no calls left. For a preStop hook.

Kubernetes removes a pod from its Services and runs the hook before it sends SIGTERM. The hook announces that to the
router: kept connections, which a Service does not move, end with their next answer. Until SIGTERM it takes requests, so
that streams can finish and drains are acknowledged. Standard library only.
"""

import argparse
import contextlib
import http.client
import os
import re
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request

POLL_SECONDS = 0.5
LEFT = re.compile(rb"^kybernate_router_(?:held_requests\{[^}]*\}|in_flight_requests)\s+([0-9.eE+]+)$", re.MULTILINE)


def main(argv: list[str] | None = None) -> None:
    """Return when no calls are left, or after ``--seconds``; always with code 0, since the pod ends in both cases."""
    parser = argparse.ArgumentParser("kyb-router-draining", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8780", help="the router of this pod")
    parser.add_argument("--first", type=float, default=5, help="seconds until Services have removed this pod")
    parser.add_argument("--seconds", type=float, default=40, help="most seconds in total")
    parser.add_argument("--pid", type=int, help="the router's process; without it nothing is announced")
    options = parser.parse_args(argv)
    if options.pid is not None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(options.pid, signal.SIGUSR1)
    until = time.monotonic() + options.seconds
    time.sleep(min(options.first, options.seconds))
    while (left := requests_left(options.url)) != 0 and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
    if left != 0:
        sys.stderr.write(f"draining: {left} requests are cut after {options.seconds:g} s\n")


def requests_left(url: str) -> int | None:
    """Return the number of held and in-flight calls: 0 if no router listens, None if it cannot be read."""
    # The router of this pod; the name in its certificate does not matter.
    context = ssl._create_unverified_context() if url.startswith("https:") else None
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=2, context=context) as answer:
            found = LEFT.findall(answer.read())
    except (TimeoutError, http.client.HTTPException):
        return None
    except urllib.error.URLError as error:  # a router that is too busy to accept a connection has not ended
        return None if isinstance(error.reason, TimeoutError) else 0
    except OSError:
        return 0
    return int(sum(float(value) for value in found)) if found else None


if __name__ == "__main__":
    main()
