"""The few kubectl commands of this suite, for a fake kubelet that runs as a process: ``kubectl.py URL RUN_DIR …``.

With it the suite's way to a real kubelet is tried out without one.
"""

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data=data), timeout=30) as answer:
        return json.load(answer)


def find(url: str, name: str) -> dict[str, Any]:
    pods = [pod for pod in call(url, "/pods")["items"] if pod["metadata"]["name"] == name]
    return dict(pods[0]) if pods else {}


def main() -> None:
    url, run_dir, verb, *rest = sys.argv[1:]
    if verb == "apply":
        call(url, "/control/create", json.load(sys.stdin))
    elif verb == "get":
        found = find(url, rest[1])
        sys.stdout.write(json.dumps(found) if found else "")
    elif verb == "delete":
        if find(url, rest[1]):
            call(url, "/control/delete", {"name": rest[1], "grace_seconds": 0})
        while find(url, rest[1]):
            time.sleep(0.05)
    elif verb == "logs":
        for log in Path(run_dir).glob(f"pods/default_{rest[0]}_*/{rest[2]}.log"):
            sys.stdout.write(log.read_text())
    else:
        sys.exit(f"kubectl.py: {verb}: not known here")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.HTTPError as error:
        sys.exit(f"kubectl.py: {error}: {error.read().decode()}")
