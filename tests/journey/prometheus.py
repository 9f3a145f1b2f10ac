"""A real Prometheus that scrapes the services of a stack, and promtool. ``scripts/prometheus.sh`` gets both."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.until import until_blocking

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kybernate/prometheus"
WINDOW = {"$__rate_interval": "10s", "$node": ".*"}
"""What Grafana fills in."""


def program(name: str) -> str:
    """``prometheus`` or ``promtool``; skips the test without it, in CI fails."""
    found = shutil.which(name) or shutil.which(name, path=str(CACHE))
    if found is None:
        text = f"{name} is missing: sh scripts/prometheus.sh"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(text)
    return found


def check_metrics(text: str) -> str:
    """What promtool finds wrong with the answer of ``/metrics``."""
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str
    began: float

    async def series(self, query: str) -> list[dict[str, Any]]:
        """The series of a query over the whole time since the start, each second."""
        for name, value in WINDOW.items():
            query = query.replace(name, value)
        asked = {"query": query, "start": str(self.began), "end": str(time.time()), "step": "1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/api/v1/query_range", data=asked) as answer,
        ):
            body = await answer.json()
        assert body["status"] == "success", (query, body)
        found: list[dict[str, Any]] = body["data"]["result"]
        return found

    async def newest(self, query: str, label: str, **where: str) -> dict[str, float]:
        """The last value of each series with these labels, by one of them."""
        found = [one for one in await self.series(query) if where.items() <= one["metric"].items()]
        return {one["metric"][label]: float(one["values"][-1][1]) for one in found}


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrape the targets (pod: host and port) each second; until the context ends."""
    jobs = [{"targets": [address], "labels": {"pod": pod}} for pod, address in targets.items()]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "kyb", "static_configs": jobs}]}
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    argv = [program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    argv.append(f"--web.listen-address={address}")
    log, began = folder / "prometheus.log", time.time()
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "Server is ready" in log.read_text()

        until_blocking(ready, what="Prometheus is ready", saw=log.read_text, timeout=60, interval=0.1)
        yield Prometheus(f"http://{address}", began)
    finally:
        process.terminate()
        process.wait(timeout=30)
