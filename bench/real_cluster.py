"""One node of real Kubernetes on this machine: ``python -m bench.real_cluster [--image ARCHIVE]… -- COMMAND…``.

The command runs beside etcd, API server, controller manager, scheduler, kube-proxy, kubelet and containerd in network,
mount and process namespaces of their own, with KUBECONFIG set and kubectl on PATH; nothing is left of them. Names of
Services are answered here. What lies in the folder of ``KYB_STATIC_PODS``, which the command has, is a static pod.
``KYB_CLUSTER`` names the folder of the programs (``scripts/kube_apiserver.sh DIR cluster``). Needs root, containerd,
runc, the CNI plugins, iptables and kubectl. An archive is an image as ``docker save`` writes it.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from bench.bench_real_kubelet import (
    CGROUPS,
    CONTAINERD,
    HERE,
    IMAGE,
    KUBELET_DIR,
    clear,
    cni_folder,
    kept_settings,
    pause_image,
)
from kybernate.cgroups import SYS_CGROUP
from tests.until import until

PROGRAMS = Path(os.environ.get("KYB_CLUSTER", "/nonexistent"))
ADDRESS, NODE = "10.213.76.1", "node-1"
"""Of the node. Pods have addresses of the network in _NETWORK, Services of SERVICES."""
SERVICES, PODS = "10.213.96.0/20", "10.213.77.0/24"
OWN = (KUBELET_DIR, Path("/var/lib/kybernate"))
"""Folders of the machine that the node has for itself; so is /run."""
READY_SECONDS = 180.0
PATIENCE_SECONDS = 2.0
"""Of a question that the API server has not answered yet: it is answered by what is known. A client waits 5 s."""
_ZONE = ".svc.cluster.local"
_NETWORK = {
    "cniVersion": "0.4.0",
    "name": "kyb",
    "plugins": [
        {
            "type": "ptp",
            "ipMasq": False,
            "ipam": {
                "type": "host-local",
                "subnet": PODS,
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": "{folder}/leases",
            },
        },
        {"type": "portmap", "capabilities": {"portMappings": True}},
    ],
}


def run(
    command: Sequence[str], images: Sequence[Path] = (), log: Path | None = None, kubelet: Mapping[str, Any] = {}
) -> int:
    """Run a command on a cluster; returns its exit code. ``log``: folder that gets the logs of all programs.
    ``kubelet``: of its configuration."""
    if os.geteuid() != 0 or not (PROGRAMS / "kubelet").exists():
        raise RuntimeError("root and KYB_CLUSTER are needed: see bench/real_cluster.py")
    cni_folder()
    with tempfile.TemporaryDirectory(prefix="kyb-cluster-", ignore_cleanup_errors=True) as name:
        folder, kept = Path(name), kept_settings()
        made = [each for each in OWN if not each.exists()]
        for each in made:
            each.mkdir()
        spaces = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        given = [word for one in images for word in ("--image", str(one))]
        inside = (sys.executable, "-m", "bench.real_cluster", "--inside", str(folder), *given)
        inside = (*inside, "--kubelet", json.dumps(kubelet), "--", *command)
        try:
            return subprocess.run([*spaces, *inside], check=False).returncode
        finally:
            if log is not None:
                log.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-r", folder / "logs", log], check=False)
            clear(folder, kept)
            for each in made:
                with contextlib.suppress(OSError):
                    each.rmdir()


class Names(asyncio.DatagramProtocol):
    """DNS of the cluster's Services. Headless ones answer with their ready pods, also by the pods' names."""

    def __init__(self, kubectl: Sequence[str]) -> None:
        self._kubectl, self._known, self._read_at = kubectl, dict[str, list[str]](), 0.0
        self._reading: asyncio.Task[None] | None = None
        self._transport: asyncio.DatagramTransport
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer through it."""
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """One question: its name in labels, then type and class."""
        at, labels = 12, list[str]()
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1").lower())
            at += 1 + data[at]
        task = asyncio.create_task(self._answer(data[: at + 5], ".".join(labels), addr))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, question: bytes, name: str, addr: Any) -> None:
        if name.endswith(_ZONE) and time.monotonic() > self._read_at + 1:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._renew())
            await asyncio.wait([self._reading], timeout=PATIENCE_SECONDS)
        known = name in self._known
        found = self._known[name] if known and question.endswith(b"\0\1\0\1") else []
        head = question[:2] + (b"\x85\0" if known else b"\x85\3") + b"\0\1" + len(found).to_bytes(2, "big") + bytes(4)
        records = (b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton(one) for one in found)
        self._transport.sendto(head + question[12:] + b"".join(records), addr)

    async def _renew(self) -> None:
        self._known = await asyncio.to_thread(self._read)
        self._read_at = time.monotonic()

    def _read(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        words = ("get", "services,endpointslices.discovery.k8s.io", "--all-namespaces", "--output=json")
        done = subprocess.run([*self._kubectl, *words], capture_output=True, check=True)
        for one in json.loads(done.stdout)["items"]:
            meta = one["metadata"]
            service = meta["labels"]["kubernetes.io/service-name"] if one["kind"] == "EndpointSlice" else meta["name"]
            name = f"{service}.{meta['namespace']}{_ZONE}"
            if one["kind"] == "Service" and one["spec"]["clusterIP"] != "None":
                found[name] = [one["spec"]["clusterIP"]]
            for end in one.get("endpoints") or ():
                if "service.kubernetes.io/headless" in meta["labels"]:
                    found.setdefault(name, []).extend(end["addresses"])
                if end.get("hostname"):
                    found[f"{end['hostname']}.{name}"] = end["addresses"]
        return found


class Node:
    """The programs of the node, in this process's namespaces."""

    def __init__(self, folder: Path, kubelet: Mapping[str, Any]) -> None:
        self.folder, self._of_kubelet = folder, kubelet
        self.kubeconfig = folder / "kubeconfig"
        self.environment = os.environ | {
            "KUBECONFIG": str(self.kubeconfig),
            "KYB_STATIC_PODS": str(folder / "pods"),
            "PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]]),
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, images: Sequence[Path]) -> None:
        """Everything, until the node is ready."""
        self._prepare()
        self._start("etcd", *self._etcd())
        self._start("kube-apiserver", *self._api_server())
        self._run_daemon("containerd", "containerd", "--config", str(self.folder / "containerd.toml"))
        await until(lambda: self._answers("/readyz"), what="the API server", timeout=READY_SECONDS, interval=0.3)
        address = ("--address", str(self.folder / "containerd.sock"), "--namespace", "k8s.io")
        for archive in (pause_image(self.folder), *images):
            await asyncio.to_thread(self._call, "ctr", *address, "images", "import", str(archive))
        config = f"--kubeconfig={self.kubeconfig}"
        key, trusted = self.folder / "account.key", self.folder / "certificates" / "apiserver.crt"
        self._start(
            "kube-controller-manager",
            *(config, "--leader-elect=false", f"--root-ca-file={trusted}"),
            *(f"--service-account-private-key-file={key}", "--bind-address=127.0.0.1"),
        )
        self._start("kube-scheduler", config, "--leader-elect=false", "--bind-address=127.0.0.1")
        self._start("kubelet", f"--config={self._kubelet()}", config, *self._node(), "--v=2")
        self._start("kube-proxy", f"--config={self._proxy()}", f"--hostname-override={NODE}")
        names = Names(["kubectl", f"--kubeconfig={self.kubeconfig}"])
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: names, local_addr=(ADDRESS, 53))
        await until(self._ready, what="a node that is ready", timeout=READY_SECONDS, interval=0.5)

    def stop(self) -> None:
        """Thaw what is frozen, so that the end of the namespace can end it."""
        for state in (one for name in CGROUPS for one in SYS_CGROUP.glob(f"freezer/{name}/**/freezer.state")):
            with contextlib.suppress(OSError):
                state.write_text("THAWED")

    def _prepare(self) -> None:
        self._call("mount", "--make-rshared", "/")
        for place in OWN:
            own = self.folder / place.name
            own.mkdir()
            self._call("mount", "--bind", str(own), str(place))
        self._call("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
        for words in (
            "link set lo up",
            "link add node0 type bridge",
            f"address add {ADDRESS}/24 dev node0",
            "link set node0 up",
            "route add default dev node0",
        ):
            self._call("ip", *words.split())
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for part in ("cni", "logs", "bin", "pods"):
            (self.folder / part).mkdir()
        for program in PROGRAMS.iterdir():
            (self.folder / "bin" / program.name).symlink_to(program.absolute())
        (self.folder / "cni" / "10-kyb.conflist").write_text(json.dumps(_NETWORK).replace("{folder}", str(self.folder)))
        text = CONTAINERD.format(folder=self.folder, image=IMAGE, cni=cni_folder())
        (self.folder / "containerd.toml").write_text(text)
        self._call("openssl", "genrsa", "-out", str(self.folder / "account.key"), "2048")
        (self.folder / "tokens.csv").write_text('administrator,admin,1,"system:masters"\n')
        server = {
            "server": f"https://{ADDRESS}:6443",
            "certificate-authority": str(self.folder / "certificates" / "apiserver.crt"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": server}],
            "users": [{"name": "u", "user": {"token": "administrator"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.kubeconfig.write_text(yaml.safe_dump(config))

    def _etcd(self) -> list[str]:
        own, peer = "http://127.0.0.1:2379", "http://127.0.0.1:2380"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={own}",
            f"--advertise-client-urls={own}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]

    def _api_server(self) -> list[str]:
        key = self.folder / "account.key"
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--advertise-address={ADDRESS}",
            f"--cert-dir={self.folder / 'certificates'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ]

    def _node(self) -> list[str]:
        return [f"--root-dir={KUBELET_DIR}", f"--hostname-override={NODE}", f"--node-ip={ADDRESS}"]

    def _kubelet(self) -> Path:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "healthzPort": 0,
            "podLogsDir": str(self.folder / "pod-logs"),
            "containerRuntimeEndpoint": f"unix://{self.folder}/containerd.sock",
            "clusterDNS": [ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": "",
            "staticPodPath": str(self.folder / "pods"),
            "fileCheckFrequency": "1s",
            **HERE,
            **self._of_kubelet,
        }
        file = self.folder / "kubelet.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def _proxy(self) -> Path:
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clusterCIDR": PODS,
            "clientConnection": {"kubeconfig": str(self.kubeconfig)},
            "conntrack": {"maxPerCore": 0, "min": 0},  # those are the machine's
        }
        file = self.folder / "kube-proxy.yaml"
        file.write_text(yaml.safe_dump(config))
        return file

    def _start(self, name: str, *options: str) -> None:
        self._run_daemon(name, str(self.folder / "bin" / name), *options)

    def _run_daemon(self, name: str, *command: str) -> None:
        with (self.folder / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )

    def _call(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _answers(self, path: str) -> bool:
        self._ended()
        with contextlib.suppress(RuntimeError):
            return self._call("kubectl", "get", "--raw", path).startswith("ok")
        return False

    def _ready(self) -> bool:
        self._ended()
        condition = '{.items[*].status.conditions[?(@.type=="Ready")].status}'
        words = ("get", "nodes", f"--output=jsonpath={condition}")
        return self._call("kubectl", *words) == "True"

    def _ended(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = (self.folder / "logs" / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} has ended with {process.returncode}:\n{tail}")


async def _serve(folder: Path, images: Sequence[Path], command: Sequence[str], kubelet: Mapping[str, Any]) -> int:
    node, begun = Node(folder, kubelet), time.monotonic()
    try:
        await node.start(images)
        print(f"real_cluster: ready after {time.monotonic() - begun:.0f} s: {ADDRESS}", flush=True)
        process = await asyncio.create_subprocess_exec(*command, env=node.environment)
        return await process.wait()
    finally:
        node.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.real_cluster", description=__doc__)
    parser.add_argument("--image", type=Path, action="append", default=[], metavar="ARCHIVE")
    parser.add_argument("--log", type=Path, help="folder that gets the logs of all programs")
    parser.add_argument("--kubelet", type=json.loads, default={}, metavar="JSON", help="of kubelet's configuration")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.inside is not None:
        sys.exit(asyncio.run(_serve(options.inside, options.image, options.command, options.kubelet)))
    sys.exit(run(options.command, options.image, options.log, options.kubelet))


if __name__ == "__main__":
    main()
