"""Reports requests that wait elsewhere, as Prometheus knows them: each is a level of its model for 45 s.

python examples/prometheus_load.py http://prometheus:9090 http://localhost:8780 'sum by (model) (queue_size)'
"""

import json
import sys
import time
from urllib.parse import quote
from urllib.request import Request, urlopen


def report(prometheus: str, router: str, query: str) -> None:
    with urlopen(f"{prometheus}/api/v1/query?query={quote(query)}", timeout=10) as answer:
        samples = json.load(answer)["data"]["result"]
    signals = [
        {
            "specversion": "1.0",
            "id": str(time.time_ns()),
            "source": "prometheus",
            "data": {"model": sample["metric"]["model"], "waiting": int(float(sample["value"][1])), "ttl_seconds": 45},
        }
        for sample in samples
    ]
    headers = {"Content-Type": "application/json"}  # with API keys also "Authorization": "Bearer <a key of signals>"
    with urlopen(Request(f"{router}/v1/signals", json.dumps(signals).encode(), headers), timeout=10) as answer:
        print(answer.read().decode())


if __name__ == "__main__":
    while True:
        report(*sys.argv[1:4])
        time.sleep(15)
