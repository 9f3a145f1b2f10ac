"""A faulty GPU in ``kyb status`` and ``kyb events``."""

import io
import json

from rich.console import Console

from kybernate.cli.show import event_line, seat_tree
from kybernate.messages import GpuHealthChanged, SeatEvent
from kybernate.roster import GpuRecord
from services.console.core.cluster import Cluster
from services.console.core.overview import overview
from services.console.events import as_sse

SICK = GpuRecord(node="n1", gpu="GPU-3", index=3, groups=("G23",), healthy=False, reason="XID 79", since=100.0)
WELL = GpuRecord(node="n1", gpu="GPU-2", index=2, groups=("G23",))


def shown(*gpus: GpuRecord) -> str:
    out = io.StringIO()
    cluster = Cluster()
    for gpu in gpus:
        cluster.gpus.put(gpu.key, gpu)
    body = json.loads(json.dumps(overview(cluster, 0.0)))
    Console(file=out, width=200).print(seat_tree(body["seats"], nodes=body["nodes"], now=160.0))
    return out.getvalue()


def test_status_shows_a_faulty_gpu_with_its_reason_also_on_a_node_without_pods() -> None:
    assert "GPU 3 unhealthy  60 s  XID 79; no new pods on G23" in shown(SICK, WELL)
    assert "n1" in shown(SICK)
    assert "unhealthy" not in shown(WELL)
    assert "no pod has a seat yet" in shown(WELL)


def test_events_show_a_fault_and_its_end() -> None:
    fault = GpuHealthChanged(
        cause="c", node="n1", gpu="GPU-3", index=3, healthy=False, reason="XID 79", xid=79, groups=("G23",)
    )
    assert as_sse(fault).startswith(b"id: ")
    assert b'"type":"ai.kyb.v1.gpu-health-changed"' in as_sse(fault)
    line = event_line(fault.model_dump()).plain
    assert "gpu-faulty" in line
    assert "GPU 3  G23  node/n1  XID 79" in line
    assert "gpu-healthy" in event_line(fault.model_copy(update={"healthy": True, "reason": ""}).model_dump()).plain
    assert not isinstance(fault, SeatEvent)  # routers and managers must not process it as a seat's state
