"""A real Prometheus that scrapes the services of a stack, and promtool. ``scripts/prometheus.sh`` gets both."""

import math
import shutil
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

from kybernate.dev.nats_server import free_port
from tests.until import until, until_blocking

WINDOW = {"$__rate_interval": "10s", "$node": ".*", "$model": ".*", "$router": ".*"}
"""What Grafana fills in."""
SCRAPES = 2
"""A rate needs two."""


def program(name: str) -> str:
    """``prometheus`` or ``promtool``; skips the test without it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: put the folder that sh scripts/prometheus.sh prints on PATH")
    return found


def check_metrics(text: str) -> str:
    """What promtool finds wrong with the answer of ``/metrics``."""
    argv = [program("promtool"), "check", "metrics"]
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Series:
    """Labels, and the values of all times, in order."""

    labels: Mapping[str, str]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Prometheus:
    """A running server."""

    url: str
    targets: frozenset[str]
    """Pods."""
    began: float

    async def scraped(self) -> None:
        """Wait until each target was scraped SCRAPES times since this call, by Prometheus' own record of it."""
        called = time.time()
        seen: dict[str, int] = {}

        async def enough() -> bool:
            seen.clear()
            for one in await self._ask("query", query="up[10m]"):
                good = [at for at, value in one["values"] if value == "1" and float(at) > called]
                seen[one["metric"]["pod"]] = len(good)
            return seen.keys() == self.targets and min(seen.values()) >= SCRAPES

        await until(enough, what=f"each target was scraped {SCRAPES} times", saw=lambda: seen, timeout=60, interval=0.2)

    async def series(self, query: str) -> list[Series]:
        """Answer a panel's query for the whole time since the start, each second; series of NaN only are left out."""
        for name, value in WINDOW.items():
            query = query.replace(name, value)
        found = await self._ask("query_range", query=query, start=f"{self.began}", end=f"{time.time()}", step="1")
        rows = [(one["metric"], tuple(float(value) for _, value in one["values"])) for one in found]
        return [Series(labels, values) for labels, values in rows if not all(math.isnan(value) for value in values)]

    async def _ask(self, kind: str, **parameters: str) -> list[dict[str, Any]]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/api/v1/{kind}", data=parameters) as answer,
        ):
            body = await answer.json()
        assert body["status"] == "success", (parameters, body)
        found: list[dict[str, Any]] = body["data"]["result"]
        return found


@contextmanager
def prometheus(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """Scrape the targets (pod: host and port) each second, until the context ends."""
    jobs = [{"targets": [address], "labels": {"pod": pod}} for pod, address in targets.items()]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [{"job_name": "kyb", "static_configs": jobs}]}
    file, log = folder / "prometheus.yml", folder / "prometheus.log"
    file.write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    argv = [program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
    argv.append(f"--web.listen-address={address}")
    began = time.time()
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            return "Server is ready" in log.read_text()

        until_blocking(ready, what="Prometheus is ready", saw=log.read_text, timeout=60, interval=0.1)
        yield Prometheus(f"http://{address}", frozenset(targets), began)
    finally:
        process.terminate()
        process.wait(timeout=30)
